//! What is measured: points (a shape with a number of ranks), and the ways through each.

use serde::{Deserialize, Serialize};

use crate::smoke::cases::{Case, Custom, What};
use crate::smoke::layout::{self, Scales, Workspace};
use crate::smoke::numbers::DType;
use crate::tables::calls::OneShot;

/// The function that is measured, and its pattern: all-reduce, residual add, RMSNorm.
pub const FUNCTION: &str = "trtllm_allreduce_fusion";
pub const PATTERN: i64 = 1;
/// What the names of our own kernels begin with: the one that stands behind NCCL in line, and the two behind it apart.
pub const NORM: &str = "add_rms_norm";
pub const ADD: &str = "residual_add";
pub const LONE_NORM: &str = "lone_rms_norm";
/// The tokens of a sweep. 3 is a decoding step with two tokens of speculation.
pub const TOKENS: [usize; 13] = [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];
pub const HIDDEN: usize = 7168;
/// The decoding step: each layer reduces twice, behind attention and behind the MLP.
pub const LAYERS: usize = 61;
pub const STEP_CALLS: usize = 2 * LAYERS;
pub const STEP_TOKENS: usize = 3;
/// Sets of inputs and outputs that the calls of a graph use in turn. Not a divisor of 3, the parts of the Lamport buffer: what a
/// call would find there of an earlier one is never what it waits for.
pub const SETS: usize = 2;
/// The most elements of a row: our norm holds it in the registers of a block.
pub const MOST_HIDDEN: usize = 1024 * 8 * 4;

/// A way from the ranks' partial sums to the normed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// NCCL's all-reduce, then our kernel that adds the residual and norms, on one stream.
    Nccl,
    /// NCCL's all-reduce on a stream of its own, forked and joined by events, then our kernel that adds and the one that norms.
    NcclApart,
    OneShot,
    TwoShot,
}

impl Way {
    pub const FUSED: [Self; 2] = [Self::OneShot, Self::TwoShot];
    /// What the fused ones are compared with, the stronger first.
    pub const RIVALS: [Self; 2] = [Self::Nccl, Self::NcclApart];

    pub fn word(self) -> &'static str {
        Mode::from(self).word()
    }
}

/// How the sums are made: a way, or the choice between two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// NCCL and our norm in line: what everything is compared with.
    Nccl,
    /// NCCL on a stream of its own, with separate kernels that add and norm.
    NcclApart,
    OneShot,
    TwoShot,
    /// What FlashInfer takes where nobody chooses: one of the two, with its figures.
    Auto,
}

impl Mode {
    pub fn word(self) -> &'static str {
        match self {
            Self::Nccl => "nccl",
            Self::NcclApart => "nccl-apart",
            Self::OneShot => "one-shot",
            Self::TwoShot => "two-shot",
            Self::Auto => "auto",
        }
    }
}

impl From<Way> for Mode {
    fn from(way: Way) -> Self {
        match way {
            Way::Nccl => Self::Nccl,
            Way::NcclApart => Self::NcclApart,
            Way::OneShot => Self::OneShot,
            Way::TwoShot => Self::TwoShot,
        }
    }
}

/// Why points are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scenario {
    /// One call, over many numbers of tokens.
    Sweep,
    /// All calls of a decoding step in one graph.
    Step,
}

impl Scenario {
    pub fn word(self) -> &'static str {
        match self {
            Self::Sweep => "sweep",
            Self::Step => "step",
        }
    }
}

/// A shape with a number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    pub scenario: Scenario,
    pub ranks: usize,
    pub tokens: usize,
    pub hidden: usize,
    pub dtype: DType,
    /// Calls in a graph, without the first, which is not timed.
    pub calls: usize,
}

impl Point {
    /// What a way through it is called: `sweep one-shot 2 ranks 3 tokens`.
    pub fn name(&self, mode: &str) -> String {
        format!("{} {mode} {} ranks {} tokens", self.scenario.word(), self.ranks, self.tokens)
    }

    /// Bytes of one rank's input.
    pub fn bytes(&self) -> usize {
        self.tokens * self.hidden * self.dtype.size()
    }

    pub fn workspace(&self) -> Workspace {
        layout::fusion(self.ranks, self.tokens, self.hidden, self.dtype.size())
    }

    /// The case of the reference that `way` is held against: the fused kernels add in float32, NCCL in the type itself.
    pub fn case(&self, way: Way) -> Case {
        let what = match way {
            Way::Nccl | Way::NcclApart => What::Custom { path: Custom::NormOneShot, bias: false },
            fused => What::Fusion {
                pattern: PATTERN,
                oneshot: fused == Way::OneShot,
                fp32_acc: true,
                trigger_at_end: true,
                scales: Scales::Swizzled,
            },
        };
        let Self { ranks, tokens, hidden, dtype, .. } = *self;
        Case { what, dtype, ranks, tokens, hidden, pdl: true, replays: 1 }
    }

    /// Why FlashInfer's Python would not take this way.
    pub fn impossible(&self, way: Way, rule: Option<&OneShot>) -> Option<String> {
        match way {
            Way::TwoShot if self.tokens <= self.ranks => {
                Some(format!("two-shot needs more tokens than ranks: {} are too few for {}", self.tokens, self.ranks))
            }
            Way::OneShot if rule.is_some_and(|rule| !rule.holds(self.ranks, self.bytes())) => {
                Some("one-shot: its buffer would be larger than FlashInfer makes it".to_owned())
            }
            _ => None,
        }
    }

    /// What FlashInfer itself takes; none where its rule knows no such number of ranks.
    pub fn auto(&self, rule: Option<&OneShot>) -> Option<Way> {
        rule?.takes(self.ranks, self.bytes()).map(|oneshot| if oneshot { Way::OneShot } else { Way::TwoShot })
    }
}

/// What a user asks for.
#[derive(Debug, Clone)]
pub struct Wanted {
    pub scenarios: Vec<Scenario>,
    pub tokens: Vec<usize>,
    pub hidden: usize,
    pub dtype: DType,
}

/// All points, those of one number of ranks next to each other.
pub fn points(wanted: &Wanted, ranks: &[usize]) -> Vec<Point> {
    let Wanted { hidden, dtype, .. } = *wanted;
    let mut points = Vec::new();
    for &ranks in ranks {
        for &scenario in &wanted.scenarios {
            let point = |tokens, calls| Point { scenario, ranks, tokens, hidden, dtype, calls };
            match scenario {
                Scenario::Sweep => points.extend(wanted.tokens.iter().map(|&tokens| {
                    let calls = calls_for(tokens * hidden * dtype.size());
                    point(tokens, calls)
                })),
                Scenario::Step => points.push(point(STEP_TOKENS, STEP_CALLS)),
            }
        }
    }
    points
}

/// As many calls as a step has where they are short; fewer where each takes long.
fn calls_for(bytes: usize) -> usize {
    const SHORT: usize = 1 << 20;
    (STEP_CALLS * SHORT / bytes.max(1)).clamp(16, STEP_CALLS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::calls::calls;

    fn point(ranks: usize, tokens: usize) -> Point {
        let (scenario, hidden, dtype) = (Scenario::Sweep, HIDDEN, DType::Bf16);
        Point { scenario, ranks, tokens, hidden, dtype, calls: 16 }
    }

    #[test]
    fn a_graph_has_the_calls_of_a_step_while_they_are_short_and_never_fewer_than_16() {
        let calls = |tokens: usize| calls_for(tokens * HIDDEN * 2);
        assert_eq!((calls(1), calls(3), calls(64)), (122, 122, 122));
        assert!(calls(256) < 122 && calls(256) > 16);
        assert_eq!(calls(2048), 16);
    }

    #[test]
    fn every_number_of_ranks_gets_all_scenarios() {
        let wanted = Wanted {
            scenarios: vec![Scenario::Sweep, Scenario::Step],
            tokens: TOKENS.to_vec(),
            hidden: HIDDEN,
            dtype: DType::Fp16,
        };
        let points = points(&wanted, &[2, 4]);
        assert_eq!(points.len(), 2 * (TOKENS.len() + 1));
        assert!(points.windows(2).all(|pair| pair[0].ranks <= pair[1].ranks));
        let step = points.iter().find(|point| point.scenario == Scenario::Step).unwrap();
        assert_eq!((step.tokens, step.calls, step.bytes()), (3, 122, 3 * 7168 * 2));
    }

    #[test]
    fn two_shot_is_left_out_where_flashinfer_refuses_it() {
        let rule = calls().oneshot(FUNCTION, None);
        assert!(point(4, 4).impossible(Way::TwoShot, rule).unwrap().contains("more tokens than ranks"));
        for way in [Way::OneShot, Way::Nccl, Way::NcclApart] {
            assert_eq!(point(4, 4).impossible(way, rule), None);
        }
        assert_eq!(point(4, 5).impossible(Way::TwoShot, rule), None);
        assert!(point(8, 1 << 15).impossible(Way::OneShot, rule).is_some());
    }

    #[test]
    fn auto_goes_by_the_rule_of_the_release_and_is_nothing_without_one() {
        let rule = calls().oneshot(FUNCTION, None);
        assert_eq!(point(8, 3).auto(rule), Some(Way::OneShot));
        assert_eq!(point(8, 2048).auto(rule), Some(Way::TwoShot));
        assert_eq!(point(8, 3).auto(None), None);
        assert_eq!(point(16, 3).auto(rule), None);
    }

    #[test]
    fn a_call_never_finds_what_it_waits_for_in_the_buffer_of_an_earlier_one() {
        const PARTS: usize = 3;
        assert!((0..100).all(|call| call % SETS != (call + PARTS) % SETS));
    }
}
