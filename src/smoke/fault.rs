//! Faults that a test plants in a run, to show that each is caught: [`FI_ARCH_FAULT`](crate::env::FI_ARCH_FAULT).

use std::sync::OnceLock;
use std::time::Duration;

use crate::env;

/// What goes wrong on purpose. It is done to what is passed to the artifact, or to a worker; what judges is left alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    /// `smoke:stride`: the fused all-reduce is told shorter rows than there are.
    Stride,
    /// `smoke:unwritten`: the first call of a case writes where the second one does.
    Unwritten,
    /// `smoke:few-tokens`: two-shot is told as many tokens as there are ranks.
    FewTokens,
    /// `smoke:absent:R`: rank R, a process of its own, does not come to the second replay.
    Absent(usize),
    /// `smoke:dies:R`: its process ends there.
    Dies(usize),
    /// `smoke:seed`: the GPU is given another seed for its inputs than the host.
    Seed,
}

/// The fault that this process was told to plant; none is planted without.
pub fn planted() -> Option<Planted> {
    static PLANTED: OnceLock<Option<Planted>> = OnceLock::new();
    *PLANTED.get_or_init(|| read(&env::var(env::FI_ARCH_FAULT)?.into_string().ok()?))
}

/// Does to this process what is planted for a rank in a replay, counted from 0; returns where nothing is.
pub fn strike(rank: usize, replay: u32) {
    match planted() {
        Some(Planted::Absent(absent)) if (absent, 1) == (rank, replay) => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
        Some(Planted::Dies(dies)) if (dies, 1) == (rank, replay) => std::process::abort(),
        _ => {}
    }
}

fn read(text: &str) -> Option<Planted> {
    let text = text.strip_prefix("smoke:")?;
    let rank = |text: &str| text.parse().ok();
    match text {
        "stride" => Some(Planted::Stride),
        "unwritten" => Some(Planted::Unwritten),
        "few-tokens" => Some(Planted::FewTokens),
        "seed" => Some(Planted::Seed),
        _ => match text.split_once(':')? {
            ("absent", text) => rank(text).map(Planted::Absent),
            ("dies", text) => rank(text).map(Planted::Dies),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_read_by_its_name_and_other_texts_are_none() {
        assert_eq!(read("smoke:stride"), Some(Planted::Stride));
        assert_eq!(read("smoke:absent:1"), Some(Planted::Absent(1)));
        for text in ["step:7:kill", "smoke:", "smoke:absent", "smoke:absent:x", "smoke:other", ""] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
