//! The headers of our own that overlays and builds add, carried in the program.

const HEADERS: [(&str, &str); 3] = [
    ("fi_arch/block_sum.cuh", include_str!("../../cuda-src/include/fi_arch/block_sum.cuh")),
    ("fi_arch/cluster_size.cuh", include_str!("../../cuda-src/include/fi_arch/cluster_size.cuh")),
    ("fi_arch/logging.h", include_str!("../../cuda-src/include/fi_arch/logging.h")),
];

/// The text of a header that the tables name, relative to `cuda-src/include`.
pub fn text(name: &str) -> &'static str {
    let header = HEADERS.iter().find(|(known, _)| *known == name);
    header.unwrap_or_else(|| panic!("arch-tables name the header {name}, which cuda-src/include does not have")).1
}
