//! Two inventories, kernel by kernel.

use std::collections::BTreeMap;

use super::{Inventory, Kernel, Kind};
use crate::digest::Digest;

/// How one file differs from another.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Comparison {
    /// How many kernels are in both and the same.
    pub equal: usize,
    pub differences: Vec<Difference>,
}

impl Comparison {
    pub fn is_equal(&self) -> bool {
        self.differences.is_empty()
    }
}

/// One kernel, or one image, for one target that is not the same in both files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    pub target: String,
    pub kind: Kind,
    /// Empty where a whole image is meant: other code than machine code, or all the machine code for a target.
    pub kernel: String,
    pub what: What,
}

/// What is different. A kernel may have several of these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// The other file has it, this one has not.
    Missing,
    /// This file has it, the other has not.
    Added,
    Code,
    /// Registers, shared memory, stack; each as the other file has it and as this one has.
    Resources {
        other: [u64; 3],
        this: [u64; 3],
    },
    BecameHollow,
    NoLongerHollow,
}

/// How `this` differs from `other`. A kernel is known by its target and name. Where one file holds it several times, as objects
/// do that share a template, its copies are compared in the order of their digests.
pub fn compare(this: &Inventory, other: &Inventory) -> Comparison {
    let mut result = Comparison::default();
    let (these, others) = (kernels(this), kernels(other));
    pairs(&these, &others, |(target, kernel), this, other| {
        let mut whats = Vec::new();
        match (this, other) {
            (Some(this), Some(other)) => differences(this, other, &mut whats),
            (Some(_), None) => whats.push(What::Added),
            _ => whats.push(What::Missing),
        }
        result.equal += usize::from(whats.is_empty());
        result.differences.extend(whats.into_iter().map(|what| Difference {
            target: (*target).to_owned(),
            kind: Kind::Sass,
            kernel: (*kernel).to_owned(),
            what,
        }));
    });
    let (these, others) = (images(this), images(other));
    pairs(&these, &others, |(target, kind), this, other| {
        let what = match (this, other) {
            (Some(this), Some(other)) if this == other => return,
            (Some(_), Some(_)) => What::Code,
            (Some(_), None) => What::Added,
            _ => What::Missing,
        };
        result.differences.push(Difference { target: (*target).to_owned(), kind: *kind, kernel: String::new(), what });
    });
    result
}

/// Adds what differs between two kernels of one name.
fn differences(this: &Kernel, other: &Kernel, whats: &mut Vec<What>) {
    let resources = |kernel: &Kernel| [kernel.registers.into(), kernel.shared_bytes, kernel.stack_bytes];
    if this.code != other.code {
        whats.push(What::Code);
    }
    if resources(this) != resources(other) {
        whats.push(What::Resources { other: resources(other), this: resources(this) });
    }
    match (this.hollow, other.hollow) {
        (true, false) => whats.push(What::BecameHollow),
        (false, true) => whats.push(What::NoLongerHollow),
        _ => {}
    }
}

/// The kernels by target and name.
fn kernels(inventory: &Inventory) -> BTreeMap<(&str, &str), Vec<&Kernel>> {
    let mut found: BTreeMap<_, Vec<&Kernel>> = BTreeMap::new();
    for image in &inventory.images {
        for kernel in &image.kernels {
            found.entry((image.target.as_str(), kernel.name.as_str())).or_default().push(kernel);
        }
    }
    found.values_mut().for_each(|copies| copies.sort_by_key(|kernel| kernel.code));
    found
}

/// The digests of all that is not machine code. Machine code stands here once a target, so that a target without kernels counts too.
fn images(inventory: &Inventory) -> BTreeMap<(&str, Kind), Vec<Option<Digest>>> {
    let mut found: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for image in &inventory.images {
        let digests = found.entry((image.target.as_str(), image.kind)).or_default();
        if image.digest.is_some() || digests.is_empty() {
            digests.push(image.digest);
        }
    }
    found.values_mut().for_each(|digests| digests.sort());
    found
}

/// Calls `each` with what stands under every key of both maps, place by place.
fn pairs<K: Ord, V>(these: &BTreeMap<K, Vec<V>>, others: &BTreeMap<K, Vec<V>>, mut each: impl FnMut(&K, Option<&V>, Option<&V>)) {
    for (key, this) in these {
        let other = others.get(key).map_or(&[][..], Vec::as_slice);
        for index in 0..this.len().max(other.len()) {
            each(key, this.get(index), other.get(index));
        }
    }
    for (key, other) in others.iter().filter(|(key, _)| !these.contains_key(key)) {
        other.iter().for_each(|other| each(key, None, Some(other)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Codec, Format, Image};
    use super::*;

    fn image(target: &str, digest: Option<Digest>) -> Image {
        let kind = if digest.is_some() { Kind::Ptx } else { Kind::Sass };
        Image { digest, ..Image::unread(target.to_owned(), kind, Codec::Raw) }
    }

    fn file(images: Vec<Image>) -> Inventory {
        Inventory { format: Format::Fatbin, images, registered: Default::default(), linkage: None }
    }

    #[test]
    fn a_target_without_kernels_and_other_ptx_are_differences() {
        let a = file(vec![image("sm_75", None), image("compute_75", Some(Digest::of(b"a")))]);
        let b = file(vec![image("sm_80", None), image("compute_75", Some(Digest::of(b"b")))]);
        assert!(compare(&a, &a).is_equal());
        let found: Vec<_> = compare(&a, &b).differences.into_iter().map(|d| (d.target, d.what)).collect();
        let expected = [("compute_75", What::Code), ("sm_75", What::Added), ("sm_80", What::Missing)];
        assert_eq!(found, expected.map(|(target, what)| (target.to_owned(), what)));
    }
}
