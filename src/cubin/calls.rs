//! Which code a kernel can reach, and so which code counts as its own.
//!
//! The rule, from the plainest case to the darkest:
//! 1. Everything in the kernel's own code section is its own. There the compiler puts its copies of the functions that it did
//!    not inline.
//! 2. A function that the call graph (`.nv.callgraph`) or a relocation of the code names counts with its whole code section,
//!    and so on from there.
//! 3. A function that is named and not in the image counts as able to write, and makes the kernel opaque. Except the few of
//!    the system that hand no result to anyone: printing, a failed assertion, the device heap, and the software way of loading
//!    into the block's own shared memory.
//! 4. A call through a function pointer counts as able to write, wherever it goes, and makes the kernel opaque.
//! 5. So does a call instruction for which nothing of the above names a target.

use std::collections::{BTreeMap, BTreeSet};

use super::bytes::u32_at;

/// A place that a call can go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A code section of the image, by index.
    Section(usize),
    /// A function that the image does not hold, by symbol index.
    Missing(usize),
}

/// The calls between the code sections of one image.
#[derive(Debug, Default)]
pub struct Graph {
    edges: BTreeMap<Place, BTreeSet<Place>>,
    /// The sections that call through a pointer.
    indirect: BTreeSet<Place>,
}

/// What can be reached from one code section.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// The start itself among them.
    pub sections: BTreeSet<usize>,
    pub missing: BTreeSet<usize>,
    pub indirect: bool,
}

impl Graph {
    pub fn add(&mut self, caller: Place, callee: Place) {
        if caller != callee {
            self.edges.entry(caller).or_default().insert(callee);
        }
    }

    /// Adds the edges of a `.nv.callgraph` section; `place` says where a symbol index is.
    ///
    /// The section is pairs of symbol indices in four groups, each opened by a pair of zero and a negative number: calls (-1),
    /// functions whose address is taken (-2), callers through a pointer (-3) and where those may go (-4).
    pub fn add_section(&mut self, section: &[u8], place: impl Fn(u32) -> Option<Place>) {
        let mut group = 0;
        for pair in section.chunks_exact(8) {
            let (Some(first), Some(second)) = (u32_at(pair, 0), u32_at(pair, 4)) else { return };
            match (first, second.cast_signed()) {
                (0, marker @ -4..=-1) => group = marker,
                _ if group == -1 || group == -4 => {
                    if let (Some(caller), Some(callee)) = (place(first), place(second)) {
                        self.add(caller, callee);
                    }
                }
                _ if group == -3 => self.indirect.extend(place(first)),
                _ => {}
            }
        }
    }

    /// What can be reached from the code section `start`.
    pub fn reach(&self, start: usize) -> Reach {
        let mut seen = BTreeSet::from([Place::Section(start)]);
        let mut open = vec![Place::Section(start)];
        let mut reach = Reach::default();
        while let Some(place) = open.pop() {
            match place {
                Place::Section(section) => reach.sections.insert(section),
                Place::Missing(symbol) => reach.missing.insert(symbol),
            };
            reach.indirect |= self.indirect.contains(&place);
            open.extend(self.edges.get(&place).into_iter().flatten().filter(|callee| seen.insert(**callee)));
        }
        reach
    }
}

/// True for a function of the system that writes nothing that a caller or another kernel could take for a result.
pub fn is_quiet(name: &[u8]) -> bool {
    matches!(name, b"vprintf" | b"__assertfail" | b"__assert_fail" | b"malloc" | b"free")
        || (name.starts_with(b"__cuda_syscall_cp_async_bulk") && name.ends_with(b"_unicast"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(pairs: &[(u32, i32)]) -> Vec<u8> {
        pairs.iter().flat_map(|(a, b)| [a.to_le_bytes(), b.to_le_bytes()].concat()).collect()
    }

    fn place(symbol: u32) -> Option<Place> {
        let symbol = usize::try_from(symbol).ok()?;
        Some(if symbol < 100 { Place::Section(symbol) } else { Place::Missing(symbol) })
    }

    #[test]
    fn a_cycle_of_calls_ends() {
        let mut graph = Graph::default();
        graph.add_section(&section(&[(0, -1), (1, 2), (2, 3), (3, 1), (3, 100), (0, -2), (9, 1), (0, -3), (0, -4)]), place);
        let reach = graph.reach(1);
        assert_eq!(reach.sections, BTreeSet::from([1, 2, 3]));
        assert_eq!(reach.missing, BTreeSet::from([100]));
        assert!(!reach.indirect);
        assert_eq!(graph.reach(9).sections, BTreeSet::from([9]));
    }

    #[test]
    fn a_call_through_a_pointer_is_seen_from_every_caller() {
        let mut graph = Graph::default();
        graph.add_section(&section(&[(0, -1), (1, 2), (0, -2), (0, -3), (2, 1), (0, -4), (2, 7)]), place);
        assert_eq!(graph.reach(1), Reach { sections: BTreeSet::from([1, 2, 7]), missing: BTreeSet::new(), indirect: true });
    }
}
