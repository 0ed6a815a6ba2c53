//! Sizes and layouts of the kernels' workspaces and scale factors, in bytes. FlashInfer's own arithmetic, in our words.

/// Shared buffers are rounded up to this.
pub const STEP: usize = 1 << 21;

/// Barrier flags of one rank pair in the fusion kernels.
const BARRIER_FLAGS: usize = 256;
/// Blocks of the kernels that use barriers in `trtllm_custom_all_reduce`, and one more slot.
const BARRIER_BLOCKS: usize = 24 + 1;
/// The most tokens of the Lamport path of `trtllm_custom_all_reduce`.
pub const LAMPORT_TOKENS: usize = 16;

/// One rank's buffers that the other ranks read and write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workspace {
    /// Bytes of each, in the order of FlashInfer's own workspace.
    pub buffers: Vec<usize>,
    /// Which of them must hold −0.0 everywhere before the first call.
    pub lamport: Vec<bool>,
    /// Bytes of one of the three parts of a Lamport buffer; 0 where the parts are buffers of their own.
    pub part: usize,
}

impl Workspace {
    /// Where each buffer begins, in bytes, when they lie behind each other.
    pub fn offsets(&self) -> impl Iterator<Item = usize> + '_ {
        self.buffers.iter().scan(0, |end, bytes| {
            let begin = *end;
            *end += bytes;
            Some(begin)
        })
    }

    pub fn bytes(&self) -> usize {
        self.buffers.iter().sum()
    }
}

/// For the fusion kernels: data, barrier flags, and three Lamport parts in one buffer.
pub fn fusion(ranks: usize, tokens: usize, hidden: usize, element: usize) -> Workspace {
    let part = ranks * tokens * hidden * element;
    let data = ranks * tokens * hidden * element.max(2);
    Workspace {
        buffers: vec![up(data, STEP), up(ranks * BARRIER_FLAGS * 4, STEP), up(3 * part, STEP)],
        lamport: vec![false, false, true],
        part,
    }
}

/// For `trtllm_custom_all_reduce`: data twice, barrier flags in and out, three Lamport buffers.
pub fn custom(ranks: usize, tokens: usize, hidden: usize) -> Workspace {
    let data = up(ranks * tokens * hidden * 4, STEP);
    let flags = up(BARRIER_BLOCKS * 4 * ranks * 2, STEP);
    let lamport = up(ranks * LAMPORT_TOKENS * ranks * hidden * 2, STEP);
    Workspace {
        buffers: vec![data, data, flags, flags, lamport, lamport, lamport],
        lamport: vec![false, false, false, false, true, true, true],
        part: 0,
    }
}

/// One rank's pointer table of the fusion kernels: all ranks' data, flag and Lamport buffers, then the rank's own counters.
pub fn fusion_pointers(buffers: &[Vec<u64>], counters: u64) -> Vec<u64> {
    // `buffers` is by rank; the table is by kind.
    let kinds = buffers.first().map_or(0, Vec::len);
    let mut table: Vec<u64> = (0..kinds).flat_map(|kind| buffers.iter().map(move |rank| rank[kind])).collect();
    table.push(counters);
    table
}

/// What the counters of the fusion kernels start with.
pub fn counters(part: usize) -> [i32; 5] {
    [0, 0, 0, part as i32, 0]
}

/// How block scales lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scales {
    /// Tiles of 128 rows and 4 columns, rows of a tile by 32.
    Swizzled,
    Linear,
}

impl Scales {
    /// FlashInfer's number for it.
    pub fn code(self) -> i64 {
        match self {
            Self::Swizzled => 0,
            Self::Linear => 2,
        }
    }

    /// The bytes that scales of `rows` × `columns` take.
    pub fn bytes(self, rows: usize, columns: usize) -> usize {
        match self {
            Self::Swizzled => up(rows, 128) * up(columns, 4),
            Self::Linear => rows * columns,
        }
    }

    /// The byte of the scale in `row` and `column`.
    pub fn offset(self, row: usize, column: usize, columns: usize) -> usize {
        match self {
            Self::Swizzled => {
                let tile = (row / 128) * columns.div_ceil(4) + column / 4;
                tile * 512 + (row % 32) * 16 + (row % 128 / 32) * 4 + column % 4
            }
            Self::Linear => row * columns + column,
        }
    }
}

/// Where the group scales of a token lie: columns of four packed bytes, each column as long as all tokens, rounded up to 4.
pub fn group_scale_offset(token: usize, group: usize, tokens: usize) -> usize {
    (group / 4 * up(tokens, 4) + token) * 4 + group % 4
}

/// The bytes of the group scales.
pub fn group_scale_bytes(tokens: usize, groups: usize) -> usize {
    groups.div_ceil(4) * up(tokens, 4) * 4
}

/// Whether blocks of the two-shot kernels of `trtllm_custom_all_reduce` work on elements of each other's chunks. Their launcher
/// rounds the threads up to whole warps, then cuts the exact number of accesses in as many chunks as there are blocks.
pub fn chunks_overlap(elements: usize, ranks: usize, element: usize) -> bool {
    const MOST_THREADS: usize = 512;
    const MOST_BLOCKS: usize = 24;
    let accesses = elements * element / 16 / ranks;
    let threads = up(accesses, 32);
    let Some(cut) = (1..=threads).find(|blocks| threads.is_multiple_of(*blocks) && threads / blocks <= MOST_THREADS) else {
        return false;
    };
    let block = threads / cut;
    let rounds = (1..=cut).find(|rounds| cut / rounds <= MOST_BLOCKS && cut.is_multiple_of(*rounds)).unwrap_or(1);
    let blocks = cut / rounds;
    blocks > 1 && !accesses.div_ceil(blocks).is_multiple_of(block)
}

pub fn up(size: usize, step: usize) -> usize {
    size.div_ceil(step) * step
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn workspaces_have_the_sizes_of_flashinfers_own() {
        let small = fusion(2, 8, 7168, 2);
        assert_eq!((small.buffers, small.part), (vec![STEP; 3], 2 * 8 * 7168 * 2));
        let large = fusion(4, 64, 7168, 2);
        assert_eq!((large.buffers[2], large.part), (12_582_912, 3_670_016));
        assert_eq!(fusion(2, 8, 7168, 4).part, 2 * 8 * 7168 * 4);
        assert_eq!(custom(2, 8, 7168).buffers, vec![STEP; 7]);
        assert_eq!(custom(4, 8, 8192).buffers[4..], [2 * STEP; 3]);
        assert_eq!((large.offsets().collect::<Vec<_>>(), large.bytes()), (vec![0, 2 * STEP, 3 * STEP], 9 * STEP));
    }

    #[test]
    fn the_pointer_table_is_by_kind_then_rank_and_ends_with_the_counters() {
        assert_eq!(fusion_pointers(&[vec![1, 3, 5], vec![2, 4, 6]], 7), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(counters(40), [0, 0, 0, 40, 0]);
    }

    #[test]
    fn chunks_overlap_where_threads_were_rounded_up_and_there_is_more_than_one_block() {
        // 22 warps and a half in two blocks: a block of 368 threads has a chunk of 360 accesses.
        assert!(chunks_overlap(8 * 2880, 4, 2));
        // Whole warps; one block.
        for (elements, ranks) in [(8 * 2880, 2), (8 * 2880, 8), (8 * 7168, 4), (8 * 4096, 8)] {
            assert!(!chunks_overlap(elements, ranks, 2), "{elements} {ranks}");
        }
        assert!(chunks_overlap(64 * 7168 + 16 * 4, 4, 2));
        assert!(!chunks_overlap(0, 2, 2));
    }

    #[test]
    fn every_scale_has_a_byte_of_its_own_within_the_buffer() {
        for (rows, columns) in [(1, 4), (3, 180), (130, 90), (128, 448)] {
            for scales in [Scales::Swizzled, Scales::Linear] {
                let all = (0..rows).flat_map(|row| (0..columns).map(move |column| scales.offset(row, column, columns)));
                let bytes: BTreeSet<usize> = all.collect();
                assert_eq!(bytes.len(), rows * columns);
                assert!(*bytes.last().unwrap() < scales.bytes(rows, columns));
            }
        }
        for (tokens, groups) in [(1, 45), (3, 56), (8, 1)] {
            let all = (0..tokens).flat_map(|token| (0..groups).map(move |group| group_scale_offset(token, group, tokens)));
            let bytes: BTreeSet<usize> = all.collect();
            assert_eq!(bytes.len(), tokens * groups);
            assert!(*bytes.last().unwrap() < group_scale_bytes(tokens, groups));
        }
        assert_eq!(Scales::Swizzled.offset(33, 5, 8), 512 + 16 + 4 + 1);
    }
}
