//! Which code a GPU can run: the one rule, for `scan` and for all that judges what would be loaded.
//!
//! | code | runs on SM X.Y |
//! | --- | --- |
//! | machine code, no suffix (`sm_120`) | the same major, and a minor not above Y: `sm_120` on 12.0 and 12.1, `sm_121` not on 12.0 |
//! | machine code, `f` (`sm_120f`) | the same family, and a minor not above Y |
//! | machine code, `a` (`sm_120a`) | that chip alone |
//! | PTX, no suffix (`compute_90`) | every GPU that is not older, once its driver has compiled it |
//! | PTX, `f` and `a` | as machine code of that suffix |
//! | intermediate code for link-time optimisation | nothing: it is no code yet |
//!
//! A family is the GPUs of one major; 10.1 (later called 11.0) is one of its own. Boards of the Tegra line (8.7, 11.0) run code
//! for their own number alone, so code for 8.6 is not called usable on 8.7.
//!
//! Sources: "Compute Capability and binary compatibility" and "Family-specific features" in NVIDIA's CUDA programming guide.

use super::Kind;

/// How a GPU can run a piece of code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Usable {
    /// Its driver compiles PTX first: at the first start, with a driver that knows this PTX.
    ThroughDriver,
    /// As it is.
    Directly,
}

/// How a GPU of SM `on` (121 for 12.1) can run code of `kind` for `sm` with `suffix`; None when it cannot.
pub fn usable(kind: Kind, sm: u32, suffix: &str, on: u32) -> Option<Usable> {
    let how = match kind {
        Kind::Sass => Usable::Directly,
        Kind::Ptx => Usable::ThroughDriver,
        Kind::LtoIr | Kind::Other(_) => return None,
    };
    let fits = match (suffix, kind) {
        _ if sm == on => true,
        ("a", _) => false,
        ("f", _) => family(sm) == family(on) && sm < on,
        (_, Kind::Ptx) => sm < on,
        _ => family(sm) == family(on) && sm < on && !is_tegra(on) && !is_tegra(sm),
    };
    fits.then_some(how)
}

/// A number for the family of an SM: its major, but for the one that was renumbered.
fn family(sm: u32) -> u32 {
    match sm {
        101 => 11,
        _ => sm / 10,
    }
}

fn is_tegra(sm: u32) -> bool {
    matches!(sm, 53 | 62 | 72 | 87 | 101 | 110)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(kind: Kind, target: &str, on: u32) -> bool {
        let suffix = target.trim_start_matches(|c: char| c.is_ascii_digit());
        usable(kind, target.trim_end_matches(suffix).parse().unwrap(), suffix, on).is_some()
    }

    #[test]
    fn machine_code_runs_within_its_major_upwards_within_its_family_or_on_its_chip_alone() {
        for (target, runs, not) in [
            ("120", &[120, 121][..], &[100, 103, 90, 110][..]),
            ("120f", &[120, 121], &[100, 90]),
            ("120a", &[120], &[121]),
            ("121", &[121], &[120]),
            ("121f", &[121], &[120]),
            ("121a", &[121], &[120]),
            ("100", &[100, 103], &[101, 110, 120]),
            ("100f", &[100, 103], &[101, 120]),
            ("103a", &[103], &[100]),
            ("90a", &[90], &[100]),
            ("80", &[80, 86, 89], &[75, 87, 90]),
            ("86", &[86, 89], &[80, 87]),
        ] {
            runs.iter().for_each(|&sm| assert!(on(Kind::Sass, target, sm), "{target} on {sm}"));
            not.iter().for_each(|&sm| assert!(!on(Kind::Sass, target, sm), "{target} on {sm}"));
        }
    }

    #[test]
    fn ptx_is_compiled_for_every_newer_gpu_unless_its_suffix_forbids_it() {
        for (target, runs, not) in [
            ("50", &[75, 90, 120, 121][..], &[][..]),
            ("90", &[90, 100, 120], &[89]),
            ("120", &[120, 121], &[103, 90]),
            ("90a", &[90], &[100, 120]),
            ("120f", &[120, 121], &[103]),
            ("100f", &[100, 103], &[120]),
        ] {
            runs.iter().for_each(|&sm| assert!(on(Kind::Ptx, target, sm), "{target} on {sm}"));
            not.iter().for_each(|&sm| assert!(!on(Kind::Ptx, target, sm), "{target} on {sm}"));
        }
        assert_eq!(usable(Kind::Ptx, 120, "", 120), Some(Usable::ThroughDriver));
        assert_eq!(usable(Kind::Sass, 120, "f", 120), Some(Usable::Directly));
    }

    #[test]
    fn intermediate_code_is_no_code_yet() {
        assert_eq!(usable(Kind::LtoIr, 120, "", 120), None);
        assert_eq!(usable(Kind::Other(64), 120, "", 120), None);
    }
}
