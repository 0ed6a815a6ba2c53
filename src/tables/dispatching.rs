//! Which libraries choose among their own kernels at run time.

use std::sync::OnceLock;

use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    library: Vec<Library>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Library {
    name: String,
}

/// Whether the library in a file of this name launches on a GPU only those of its kernels that it has chosen for it.
pub fn chooses_its_kernels(file_name: &str) -> bool {
    static TABLE: OnceLock<Table> = OnceLock::new();
    let table = TABLE.get_or_init(|| super::parse("dispatching", include_str!("../../arch-tables/dispatching.toml")));
    table.library.iter().any(|library| file_name.starts_with(&library.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vendor_libraries_choose_and_modules_do_not() {
        assert!(chooses_its_kernels("libcusparseLt.so.0") && chooses_its_kernels("libcudnn_engines_precompiled.so.9"));
        assert!(
            !chooses_its_kernels("trtllm_comm.so")
                && !chooses_its_kernels("libtorch_cuda.so")
                && !chooses_its_kernels("common_ops.abi3.so")
        );
    }
}
