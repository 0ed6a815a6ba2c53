//! What is run: one case is one call of one function with one shape, and the sets of cases are lists of them.

use std::collections::BTreeSet;
use std::fmt;

use pep440_rs::Version;
use serde::{Deserialize, Serialize};

use super::layout::{self, LAMPORT_TOKENS, Scales, Workspace, chunks_overlap};
use super::numbers::DType;
use crate::tables::calls::{Fault, FaultKind, Pattern, Quant, When, calls};

pub const TOKENS: [usize; 6] = [1, 3, 8, 16, 64, 128];
/// 2880 (gpt-oss) gives 180 or 360 threads a block: the last warp is partial.
pub const HIDDEN: [usize; 3] = [2880, 4096, 7168];
pub const RANKS: [usize; 3] = [2, 4, 8];
/// How often a case is replayed, and how often one of the pairwise set.
pub const REPLAYS: u32 = 20;
pub const PAIRWISE_REPLAYS: u32 = 1000;
/// The least number of cases in the pairwise set.
const PAIRWISE_CASES: usize = 60;
/// Experts a token in the MoE cases.
const EXPERTS: usize = 3;

/// One call, by all ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    pub what: What,
    pub dtype: DType,
    pub ranks: usize,
    pub tokens: usize,
    pub hidden: usize,
    /// Launched so that the next kernel may start before the last has ended (programmatic dependent launch).
    pub pdl: bool,
    pub replays: u32,
}

/// The function that is called, and its own choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum What {
    /// `trtllm_allreduce_fusion`
    Fusion {
        pattern: i64,
        oneshot: bool,
        fp32_acc: bool,
        /// The next kernel is let in at the end of this one, not at its start.
        trigger_at_end: bool,
        scales: Scales,
    },
    /// `trtllm_custom_all_reduce`
    Custom { path: Custom, bias: bool },
    /// `trtllm_moe_allreduce_fusion`
    MoeReduction { experts: usize, quant: bool },
    /// `trtllm_moe_finalize_allreduce_fusion`
    MoeFinalize { top_k: usize, shared: bool, weighted: bool },
    /// `trtllm_lamport_initialize`
    Initialize,
    /// `trtllm_lamport_initialize_all`
    InitializeAll,
}

/// The paths through `trtllm_custom_all_reduce`, each with kernels of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Custom {
    /// Up to 16 tokens, residual and norm in one kernel without barriers. The kernels that are hollow where a guard is wrong.
    NormLamport,
    NormOneShot,
    NormTwoShot,
    PrePostOneShot,
    PrePostTwoShot,
    OneShotPull,
    OneShotPush,
    TwoShotPull,
    TwoShotPush,
}

impl Custom {
    pub const ALL: [Self; 9] = [
        Self::NormLamport,
        Self::NormOneShot,
        Self::NormTwoShot,
        Self::PrePostOneShot,
        Self::PrePostTwoShot,
        Self::OneShotPull,
        Self::OneShotPush,
        Self::TwoShotPull,
        Self::TwoShotPush,
    ];

    pub fn word(self) -> &'static str {
        match self {
            Self::NormLamport => "custom-norm-lamport",
            Self::NormOneShot | Self::NormTwoShot => "custom-norm",
            Self::PrePostOneShot | Self::PrePostTwoShot => "custom-pre-post-norm",
            Self::OneShotPull | Self::TwoShotPull => "custom-pull",
            Self::OneShotPush | Self::TwoShotPush => "custom-push",
        }
    }

    /// FlashInfer's `fusion_op_code`.
    pub fn operation(self) -> i64 {
        match self {
            Self::NormLamport | Self::NormOneShot | Self::NormTwoShot => 1,
            Self::PrePostOneShot | Self::PrePostTwoShot => 3,
            _ => 0,
        }
    }

    pub fn oneshot(self) -> bool {
        !matches!(self, Self::NormTwoShot | Self::PrePostTwoShot | Self::TwoShotPull | Self::TwoShotPush)
    }

    /// FlashInfer's `strategy_code`.
    pub fn strategy(self) -> i64 {
        if self.oneshot() { 4 } else { 5 }
    }

    /// FlashInfer's `config_code`: 2 for push.
    pub fn config(self) -> i64 {
        if matches!(self, Self::NormLamport | Self::OneShotPush | Self::TwoShotPush) { 2 } else { 0 }
    }

    pub fn norm(self) -> bool {
        self.operation() != 0
    }
}

impl What {
    /// The exported function.
    pub fn function(&self) -> &'static str {
        match self {
            Self::Fusion { .. } => "trtllm_allreduce_fusion",
            Self::Custom { .. } => "trtllm_custom_all_reduce",
            Self::MoeReduction { .. } => "trtllm_moe_allreduce_fusion",
            Self::MoeFinalize { .. } => "trtllm_moe_finalize_allreduce_fusion",
            Self::Initialize => "trtllm_lamport_initialize",
            Self::InitializeAll => "trtllm_lamport_initialize_all",
        }
    }

    /// The row of the tables for a fusion case.
    pub fn pattern(&self) -> Option<&'static Pattern> {
        match self {
            Self::Fusion { pattern, .. } => calls().pattern(*pattern),
            _ => None,
        }
    }

    /// Whether a residual is added and the norm taken.
    pub fn norms(&self) -> bool {
        match self {
            Self::Fusion { .. } => self.pattern().is_some_and(|pattern| pattern.norm),
            Self::Custom { path, .. } => path.norm(),
            Self::MoeReduction { .. } | Self::MoeFinalize { .. } => true,
            Self::Initialize | Self::InitializeAll => false,
        }
    }

    /// Whether a norm is taken before the residual is added, too.
    pub fn norms_first(&self) -> bool {
        matches!(self, Self::Custom { path: Custom::PrePostOneShot | Custom::PrePostTwoShot, .. })
    }

    pub fn quant(&self) -> Option<Quant> {
        match self {
            Self::MoeReduction { quant: true, .. } => Some(Quant::Fp4),
            _ => self.pattern().and_then(|pattern| pattern.quant),
        }
    }
}

impl Case {
    /// A short name of what is computed, for the report.
    pub fn pattern(&self) -> String {
        match self.what {
            What::Fusion { pattern, .. } => {
                calls().pattern(pattern).map_or_else(|| format!("pattern-{pattern}"), |pattern| pattern.name.clone())
            }
            What::Custom { path, .. } => path.word().to_owned(),
            What::MoeReduction { quant: true, .. } => "moe-reduction-fp4".to_owned(),
            What::MoeReduction { .. } => "moe-reduction".to_owned(),
            What::MoeFinalize { .. } => "moe-finalize".to_owned(),
            What::Initialize => "lamport-initialize".to_owned(),
            What::InitializeAll => "lamport-initialize-all".to_owned(),
        }
    }

    /// None for what has no such choice.
    pub fn oneshot(&self) -> Option<bool> {
        match self.what {
            What::Fusion { oneshot, .. } => Some(oneshot),
            What::Custom { path, .. } => Some(path.oneshot()),
            What::MoeReduction { .. } | What::MoeFinalize { .. } => Some(true),
            What::Initialize | What::InitializeAll => None,
        }
    }

    /// How many calls follow each other in the graph.
    pub fn calls(&self) -> usize {
        match self.what {
            // Once round the three parts of the Lamport buffer, each launch with a neighbour to overlap with.
            What::Fusion { .. } | What::MoeReduction { .. } => 3,
            // Flags are part of the graph: flag 1 of the next replay must find the buffers where flag 6 of the last one left
            // them, by twos (data) and by threes (Lamport).
            What::Custom { .. } => 6,
            // It reads its peers' own copies, which they clear in their next call without asking: a second call in the
            // graph could take the data from under a slower rank.
            What::MoeFinalize { .. } => 1,
            What::Initialize | What::InitializeAll => 1,
        }
    }

    /// Parts of the names of the kernels that each call must put into the graph, once each. The same in all releases known.
    pub fn kernels(&self) -> &'static [&'static str] {
        match self.what {
            What::Fusion { oneshot: true, .. } => &["allreduce_fusion_kernel_oneshot_lamport"],
            What::Fusion { oneshot: false, .. } => &["allreduce_fusion_kernel_twoshot_sync"],
            What::Custom { path, .. } => match path {
                Custom::NormLamport => &["lamport_style_one_shot_all_reduce_norm_kernel"],
                Custom::NormOneShot => &["one_shot_all_reduce_norm_kernel"],
                Custom::NormTwoShot => &["twoShotAllReduceKernel", "rms_norm_kernel"],
                Custom::PrePostOneShot => &["one_shot_prenorm_all_reduce_norm_kernel"],
                Custom::PrePostTwoShot => &["twoShotAllReduceKernel", "rms_pre_post_norm_kernel"],
                Custom::OneShotPull | Custom::OneShotPush => &["oneShotAllReduceKernel"],
                Custom::TwoShotPull | Custom::TwoShotPush => &["twoShotAllReduceKernel"],
            },
            What::MoeReduction { .. } => &["moereduce_allreduce_fusion_kernel_oneshot_lamport"],
            What::MoeFinalize { .. } => &["moefinalize_allreduce_fusion_kernel_oneshot_lamport"],
            What::Initialize | What::InitializeAll => &[],
        }
    }

    /// Whether a kernel lets the next one in before its own data has come.
    pub fn triggers_early(&self) -> bool {
        matches!(self.what, What::Fusion { trigger_at_end: false, .. })
    }

    /// Whether no rank may begin a replay before all have ended the one before it.
    pub fn in_step(&self) -> bool {
        matches!(self.what, What::MoeFinalize { .. })
    }

    /// Whether inputs may hold −0.0.
    pub fn takes_negative_zero(&self) -> bool {
        // This path sends its input as it is and waits for what is not −0.0: it would wait for ever.
        !matches!(self.what, What::Custom { path: Custom::NormLamport, .. })
    }

    /// The values of a group that share a scale in the patterns with group scales.
    pub fn group(&self) -> usize {
        if self.hidden.is_multiple_of(128) { 128 } else { 64 }
    }

    /// The buffers that a rank shares with the others.
    pub fn workspace(&self) -> Workspace {
        match self.what {
            What::Custom { .. } | What::InitializeAll => layout::custom(self.ranks, self.tokens, self.hidden),
            _ => layout::fusion(self.ranks, self.tokens, self.hidden, self.dtype.size()),
        }
    }

    /// What the sources of the release are known to do wrong in this call; of an unknown release, what any does.
    pub fn known_fault(&self, release: Option<&Version>) -> Option<&'static Fault> {
        let ragged = !self.hidden.is_multiple_of(256);
        let name = self.to_string();
        let is_in = |path: &String| name.strip_prefix(path.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '));
        let meets = |fault: &&Fault| {
            fault.function == self.what.function()
                && (fault.paths.is_empty() || fault.paths.iter().any(is_in))
                && release.is_none_or(|release| fault.releases.contains(release))
                && match fault.when {
                    When::Always => true,
                    When::Ragged => ragged,
                    When::RaggedRows => ragged && self.tokens > 1,
                    When::UnevenChunks => chunks_overlap(self.tokens * self.hidden, self.ranks, self.dtype.size()),
                }
        };
        // What is always wrong goes before what may be.
        let found = || calls().faults.iter().filter(meets);
        found().find(|fault| fault.kind == FaultKind::Wrong).or_else(|| found().next())
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pattern())?;
        if let Some(oneshot) = self.oneshot() {
            f.write_str(if oneshot { " one-shot" } else { " two-shot" })?;
        }
        write!(f, " {}", self.dtype.word())?;
        match self.what {
            What::Initialize | What::InitializeAll => return Ok(()),
            _ => write!(f, " ranks={} tokens={} hidden={}", self.ranks, self.tokens, self.hidden)?,
        }
        let mut mark = |is: bool, word: &str| if is { write!(f, " {word}") } else { Ok(()) };
        mark(self.pdl, "pdl")?;
        match self.what {
            What::Fusion { fp32_acc, trigger_at_end, scales, pattern, .. } => {
                mark(!fp32_acc && self.dtype != DType::Fp32, "acc16")?;
                mark(!trigger_at_end, "early-trigger")?;
                let laid_out = calls().pattern(pattern).is_some_and(|p| matches!(p.quant, Some(Quant::Fp4 | Quant::Mxfp8)));
                mark(laid_out && scales == Scales::Linear, "linear")?;
            }
            What::Custom { bias, .. } => mark(bias, "bias")?,
            What::MoeFinalize { shared, weighted, .. } => {
                mark(shared, "shared")?;
                mark(weighted, "weighted")?;
            }
            _ => {}
        }
        mark(self.replays >= PAIRWISE_REPLAYS, "long")
    }
}

/// What decides which cases there are.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    /// The target of the GPUs, 120 for 12.0.
    pub sm: u32,
    /// The functions that the artifact exports, without prefix.
    pub functions: BTreeSet<String>,
    /// The codes of the patterns that its kernels name.
    pub patterns: BTreeSet<i64>,
    pub ranks: Vec<usize>,
    /// The release that the artifact was built from, where that is known.
    pub release: Option<Version>,
}

/// Which set of cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Set {
    /// A gate before a server starts: seconds.
    Quick,
    /// Everything once, 20 replays each.
    All,
    /// Every pair of choices of the fusion function, 1,000 replays each.
    Pairwise,
}

/// A case, and why it is not run where it is not.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    pub case: Case,
    pub not_run: Option<String>,
    pub fault: Option<&'static Fault>,
}

/// The cases of a set, those that share buffers next to each other.
pub fn plan(set: Set, scope: &Scope) -> Vec<Planned> {
    let cases = match set {
        Set::Quick => quick(scope),
        Set::All => all(scope),
        Set::Pairwise => pairwise(scope),
    };
    let planned = cases.into_iter().filter(|case| scope.functions.contains(case.what.function()));
    planned
        .map(|case| {
            let fault = case.known_fault(scope.release.as_ref());
            let not_run = not_run(&case, fault, scope);
            Planned { case, not_run, fault }
        })
        .collect()
}

fn not_run(case: &Case, fault: Option<&Fault>, scope: &Scope) -> Option<String> {
    let wrong = || fault.filter(|fault| fault.kind == FaultKind::Wrong);
    lacking(case, scope).or_else(|| wrong().map(|fault| format!("known fault of the release ({}): {}", fault.id, fault.why)))
}

/// Whether a case can be run, right or wrong.
pub fn lacks_nothing(case: &Case, scope: &Scope) -> bool {
    lacking(case, scope).is_none()
}

/// Why a case cannot be run at all.
fn lacking(case: &Case, scope: &Scope) -> Option<String> {
    if let What::Fusion { oneshot: false, .. } = case.what
        && !is_possible(false, case.tokens, case.ranks)
    {
        return Some(format!("two-shot needs more tokens than ranks: {} are too few for {} ranks", case.tokens, case.ranks));
    }
    let min_sm = match case.what {
        What::MoeReduction { quant: true, .. } => 100,
        _ => case.what.pattern().map_or(0, |pattern| pattern.min_sm),
    };
    (scope.sm < min_sm).then(|| format!("the sources have no body for it below sm_{min_sm}: on sm_{} it writes zeros", scope.sm))
}

fn fusion(pattern: i64, dtype: DType, ranks: usize, tokens: usize, hidden: usize, oneshot: bool, pdl: bool) -> Case {
    let what = What::Fusion { pattern, oneshot, fp32_acc: true, trigger_at_end: true, scales: Scales::Swizzled };
    Case { what, dtype, ranks, tokens, hidden, pdl, replays: REPLAYS }
}

/// The patterns that are known and that the artifact has.
fn patterns(scope: &Scope) -> impl Iterator<Item = &'static Pattern> {
    calls().patterns.iter().filter(|pattern| scope.patterns.contains(&pattern.code))
}

/// The two-shot kernels give each rank at least one token.
fn is_possible(oneshot: bool, tokens: usize, ranks: usize) -> bool {
    oneshot || tokens > ranks
}

fn quick(scope: &Scope) -> Vec<Case> {
    let Some(&ranks) = scope.ranks.first() else { return Vec::new() };
    let mut cases = Vec::new();
    for pattern in patterns(scope) {
        for (at, (oneshot, hidden, tokens)) in
            [(true, 7168, 8), (true, 2880, 8), (true, 7168, 1), (false, 7168, 8), (false, 2880, 8)].into_iter().enumerate()
        {
            for dtype in [DType::Bf16, DType::Fp16] {
                if is_possible(oneshot, tokens, ranks) && (dtype == DType::Bf16 || pattern.code <= 1) {
                    cases.push(fusion(pattern.code, dtype, ranks, tokens, hidden, oneshot, at % 2 == 0));
                }
            }
        }
    }
    let case = |what, dtype, pdl| Case { what, dtype, ranks, tokens: 8, hidden: 7168, pdl, replays: REPLAYS };
    for dtype in [DType::Bf16, DType::Fp16] {
        cases.push(case(What::Custom { path: Custom::NormLamport, bias: false }, dtype, dtype == DType::Bf16));
    }
    cases.push(case(What::MoeReduction { experts: EXPERTS, quant: false }, DType::Bf16, true));
    cases.push(case(What::MoeFinalize { top_k: EXPERTS, shared: true, weighted: true }, DType::Bf16, true));
    cases.iter_mut().for_each(|case| case.replays = 5);
    cases
}

fn all(scope: &Scope) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::Bf16, DType::Fp16, DType::Fp32] {
        for what in [What::Initialize, What::InitializeAll] {
            cases.push(Case { what, dtype, ranks: 1, tokens: 8, hidden: 7168, pdl: false, replays: 1 });
        }
    }
    for &ranks in &scope.ranks {
        for pattern in patterns(scope) {
            for oneshot in [true, false] {
                for hidden in HIDDEN {
                    all_of_pattern(pattern, oneshot, hidden, ranks, &mut cases);
                }
            }
        }
        for hidden in HIDDEN {
            all_custom(hidden, ranks, &mut cases);
            all_moe(hidden, ranks, &mut cases);
        }
    }
    cases
}

fn all_of_pattern(pattern: &Pattern, oneshot: bool, hidden: usize, ranks: usize, cases: &mut Vec<Case>) {
    let possible = |tokens: &usize| is_possible(oneshot, *tokens, ranks);
    for dtype in [DType::Bf16, DType::Fp16] {
        for tokens in TOKENS {
            for pdl in [false, true] {
                cases.push(fusion(pattern.code, dtype, ranks, tokens, hidden, oneshot, pdl));
            }
        }
        let Some(tokens) = [8, 16].into_iter().find(possible) else { continue };
        let base = fusion(pattern.code, dtype, ranks, tokens, hidden, oneshot, true);
        let with = |fp32_acc, trigger_at_end, scales| {
            let what = What::Fusion { pattern: pattern.code, oneshot, fp32_acc, trigger_at_end, scales };
            Case { what, ..base.clone() }
        };
        cases.push(with(false, true, Scales::Swizzled));
        if oneshot {
            cases.push(with(true, false, Scales::Swizzled));
        }
        if matches!(pattern.quant, Some(Quant::Fp4 | Quant::Mxfp8)) {
            cases.push(with(true, true, Scales::Linear));
        }
    }
    if pattern.quant != Some(Quant::Fp4)
        && let Some(tokens) = [8, 16].into_iter().find(possible)
    {
        for pdl in [false, true] {
            cases.push(fusion(pattern.code, DType::Fp32, ranks, tokens, hidden, oneshot, pdl));
        }
    }
}

fn all_custom(hidden: usize, ranks: usize, cases: &mut Vec<Case>) {
    for path in Custom::ALL {
        for dtype in [DType::Bf16, DType::Fp16] {
            let tokens: &[usize] = match path {
                Custom::NormLamport => &[1, 8, 16],
                // Fewer tokens take the Lamport path.
                Custom::NormOneShot => &[64],
                _ => &[8],
            };
            for &tokens in tokens {
                assert!(path != Custom::NormLamport || tokens <= LAMPORT_TOKENS);
                for (pdl, bias) in [(false, false), (true, false), (true, true)] {
                    if bias && (!path.norm() || tokens == 1) {
                        continue;
                    }
                    let what = What::Custom { path, bias };
                    cases.push(Case { what, dtype, ranks, tokens, hidden, pdl, replays: REPLAYS });
                }
            }
        }
    }
}

fn all_moe(hidden: usize, ranks: usize, cases: &mut Vec<Case>) {
    for dtype in [DType::Bf16, DType::Fp16] {
        for tokens in [1, 8, 64] {
            for pdl in [false, true] {
                let mut push = |what| cases.push(Case { what, dtype, ranks, tokens, hidden, pdl, replays: REPLAYS });
                push(What::MoeReduction { experts: EXPERTS, quant: false });
                if tokens == 8 {
                    push(What::MoeReduction { experts: EXPERTS, quant: true });
                }
                push(What::MoeFinalize { top_k: EXPERTS, shared: pdl, weighted: true });
                if tokens == 8 {
                    push(What::MoeFinalize { top_k: EXPERTS, shared: !pdl, weighted: false });
                }
            }
        }
    }
}

/// A small set of fusion cases in which any two choices occur together wherever they can.
fn pairwise(scope: &Scope) -> Vec<Case> {
    let codes: Vec<i64> = patterns(scope).filter(|pattern| scope.sm >= pattern.min_sm).map(|pattern| pattern.code).collect();
    let dtypes = [DType::Bf16, DType::Fp16, DType::Fp32];
    let sizes = [codes.len(), dtypes.len(), 2, 2, 2, 2, TOKENS.len(), HIDDEN.len(), scope.ranks.len()];
    let quant = |code: i64| calls().pattern(code).and_then(|pattern| pattern.quant);
    let case = |row: &[usize]| {
        let oneshot = row[2] == 0;
        let what = What::Fusion {
            pattern: codes[row[0]],
            oneshot,
            fp32_acc: row[4] == 0,
            // Only the one-shot kernel has the choice.
            trigger_at_end: row[5] == 0 || !oneshot,
            scales: Scales::Swizzled,
        };
        let (tokens, hidden, ranks) = (TOKENS[row[6]], HIDDEN[row[7]], scope.ranks[row[8]]);
        Case { what, dtype: dtypes[row[1]], ranks, tokens, hidden, pdl: row[3] == 1, replays: PAIRWISE_REPLAYS }
    };
    let possible = |row: &[usize]| {
        let oneshot = row[2] == 0;
        // float32 is summed as it is, and no FP4 is made of it.
        let sums = dtypes[row[1]] != DType::Fp32 || (row[4] == 0 && quant(codes[row[0]]) != Some(Quant::Fp4));
        is_possible(oneshot, TOKENS[row[6]], scope.ranks[row[8]]) && (oneshot || row[5] == 0) && sums
    };
    covering(&sizes, possible, PAIRWISE_CASES).iter().map(|row| case(row)).collect()
}

/// Rows in which every pair of levels of two factors occurs that occurs in any possible row. Where these are fewer than `least`,
/// others follow, in which the pairs occur once more. Greedy, and always the same.
fn covering(sizes: &[usize], possible: impl Fn(&[usize]) -> bool, least: usize) -> Vec<Vec<usize>> {
    let total: usize = sizes.iter().product();
    let row = |mut number: usize| -> Vec<usize> {
        sizes
            .iter()
            .map(|size| {
                let level = number % size;
                number /= size;
                level
            })
            .collect()
    };
    let rows: Vec<Vec<usize>> = (0..total).map(row).filter(|row| possible(row)).collect();
    let largest = sizes.iter().copied().max().unwrap_or(0);
    let pair =
        |row: &[usize], one: usize, other: usize| ((one * sizes.len() + other) * largest + row[one]) * largest + row[other];
    let pairs = |row: &[usize]| -> Vec<usize> {
        let factors = 0..row.len();
        factors
            .clone()
            .flat_map(|one| (one + 1..row.len()).map(move |other| (one, other)))
            .map(|(a, b)| pair(row, a, b))
            .collect()
    };
    let of_rows: Vec<Vec<usize>> = rows.iter().map(|row| pairs(row)).collect();
    let mut open = vec![false; sizes.len() * sizes.len() * largest * largest];
    of_rows.iter().flatten().for_each(|pair| open[*pair] = true);
    let all_open = open.clone();
    let (mut chosen, mut covered) = (Vec::new(), false);
    while !covered || chosen.len() < least {
        let gain = |pairs: &Vec<usize>| pairs.iter().filter(|pair| open[**pair]).count();
        // The first of the best: the choice never depends on anything but the factors.
        let left = of_rows.iter().enumerate().filter(|(at, _)| !chosen.contains(at));
        match left.map(|(at, pairs)| (gain(pairs), std::cmp::Reverse(at))).max() {
            Some((gain, std::cmp::Reverse(at))) if gain > 0 => {
                of_rows[at].iter().for_each(|pair| open[*pair] = false);
                chosen.push(at);
            }
            None => break,
            Some(_) => {
                covered = true;
                open.clone_from(&all_open);
            }
        }
    }
    chosen.into_iter().map(|at| rows[at].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(sm: u32) -> Scope {
        Scope {
            sm,
            functions: calls().functions.iter().map(|function| function.name.clone()).collect(),
            patterns: calls().patterns.iter().map(|pattern| pattern.code).collect(),
            ranks: RANKS.to_vec(),
            release: None,
        }
    }

    #[test]
    fn every_known_fault_is_met_by_a_case_and_none_stands_for_a_release_that_it_is_not_in() {
        let planned = plan(Set::All, &scope(120));
        for fault in &calls().faults {
            let met: Vec<_> = planned.iter().filter(|one| one.fault.is_some_and(|found| found.id == fault.id)).collect();
            assert!(!met.is_empty(), "{}", fault.id);
            let run = |one: &&&Planned| one.not_run.is_none();
            assert_eq!(met.iter().filter(run).count(), if fault.kind == FaultKind::Race { met.len() } else { 0 }, "{}", fault.id);
        }
        let case = |name: &str| planned.iter().find(|one| one.case.to_string() == name).unwrap();
        let id = |name: &str| case(name).fault.map(|fault| fault.id.as_str());
        assert_eq!(id("custom-pre-post-norm one-shot bf16 ranks=2 tokens=8 hidden=2880"), Some("custom-pre-post-ragged"));
        assert_eq!(id("custom-pre-post-norm one-shot bf16 ranks=2 tokens=8 hidden=4096"), Some("custom-barrier"));
        assert_eq!(id("custom-pre-post-norm two-shot bf16 ranks=2 tokens=8 hidden=4096"), Some("custom-pre-post-two-shot"));
        assert_eq!(id("custom-pull two-shot bf16 ranks=4 tokens=8 hidden=2880"), Some("custom-two-shot-overlap"));
        assert_eq!(id("custom-norm-lamport one-shot bf16 ranks=2 tokens=8 hidden=7168"), None);
        assert_eq!(id("norm one-shot bf16 ranks=2 tokens=8 hidden=2880"), None);
        let old: Version = "0.4.1".parse().unwrap();
        assert_eq!(case("custom-pull two-shot bf16 ranks=4 tokens=8 hidden=2880").case.known_fault(Some(&old)), None);
    }

    #[test]
    fn no_case_stands_in_a_set_twice_and_names_tell_them_apart() {
        for set in [Set::Quick, Set::All, Set::Pairwise] {
            let planned = plan(set, &scope(120));
            let names: BTreeSet<String> = planned.iter().map(|planned| planned.case.to_string()).collect();
            assert_eq!(names.len(), planned.len(), "{set:?}");
        }
    }

    #[test]
    fn all_has_every_function_pattern_path_and_shape() {
        let planned = plan(Set::All, &scope(120));
        for function in &calls().functions {
            assert!(planned.iter().any(|p| p.case.what.function() == function.name), "{}", function.name);
        }
        for pattern in &calls().patterns {
            for oneshot in [true, false] {
                for (tokens, hidden) in TOKENS.into_iter().flat_map(|t| HIDDEN.map(|h| (t, h))) {
                    let found = planned.iter().any(|p| {
                        matches!(p.case.what, What::Fusion { pattern: code, oneshot: shot, .. } if code == pattern.code && shot == oneshot)
                            && (p.case.tokens, p.case.hidden) == (tokens, hidden)
                    });
                    assert!(found, "{} {oneshot} {tokens} {hidden}", pattern.name);
                }
            }
        }
        for path in Custom::ALL {
            assert!(planned.iter().any(|p| matches!(p.case.what, What::Custom { path: one, .. } if one == path)), "{path:?}");
        }
        let hollow_path = |p: &Planned| {
            matches!(p.case.what, What::Custom { path: Custom::NormLamport, .. }) && p.case.tokens == 8 && p.not_run.is_none()
        };
        assert!(planned.iter().any(hollow_path));
    }

    #[test]
    fn two_shot_is_never_asked_of_too_few_tokens() {
        for set in [Set::Quick, Set::All, Set::Pairwise] {
            for planned in plan(set, &scope(120)) {
                if let What::Fusion { oneshot: false, .. } = planned.case.what {
                    let few = planned.case.tokens <= planned.case.ranks;
                    assert_eq!(planned.not_run.as_ref().is_some_and(|why| why.contains("too few")), few, "{}", planned.case);
                }
            }
        }
    }

    #[test]
    fn what_a_target_has_no_code_for_is_named_and_not_run() {
        let fp4 = |p: &Planned| p.case.what.quant() == Some(Quant::Fp4);
        let hopper = plan(Set::All, &scope(90));
        assert!(hopper.iter().filter(|p| fp4(p)).count() > 10);
        let why_not = |why: &String| why.contains("sm_90") || why.contains("too few");
        assert!(hopper.iter().filter(|p| fp4(p)).all(|p| p.not_run.as_ref().is_some_and(why_not)));
        let blackwell = plan(Set::All, &scope(120));
        assert!(blackwell.iter().filter(|p| fp4(p) && p.case.hidden == 7168 && p.case.tokens > 8).all(|p| p.not_run.is_none()));
        // The two sets differ in nothing else.
        assert_eq!(hopper.len(), blackwell.len());
    }

    #[test]
    fn the_pairwise_set_has_sixty_cases_on_any_target_and_every_pair_of_choices_that_can_run() {
        const MOST: usize = 16;
        /// The choices of a case, each as a number below `MOST`.
        fn choices(case: &Case) -> [usize; 9] {
            let What::Fusion { pattern, oneshot, fp32_acc, trigger_at_end, .. } = case.what else { panic!("{case}") };
            let Case { dtype, pdl, tokens, hidden, ranks, .. } = *case;
            let [oneshot, pdl, fp32_acc, trigger_at_end] = [oneshot, pdl, fp32_acc, trigger_at_end].map(usize::from);
            let at = |list: &[usize], value| list.iter().position(|one| *one == value).unwrap();
            let (tokens, hidden, ranks) = (at(&TOKENS, tokens), at(&HIDDEN, hidden), at(&RANKS, ranks));
            [pattern as usize, dtype as usize, oneshot, pdl, fp32_acc, trigger_at_end, tokens, hidden, ranks]
        }
        /// Notes each pair of them: which two, and what they are.
        fn note(case: &Case, pairs: &mut [bool]) {
            let all = choices(case);
            for one in 0..all.len() {
                for other in one + 1..all.len() {
                    pairs[((one * all.len() + other) * MOST + all[one]) * MOST + all[other]] = true;
                }
            }
        }
        for (sm, codes) in [(90, 0..6), (120, 0..6), (90, 0..15), (120, 0..15)] {
            let scope = Scope { patterns: codes.clone().collect(), ..scope(sm) };
            let planned = plan(Set::Pairwise, &scope);
            assert!((60..=96).contains(&planned.len()), "{} of sm_{sm}", planned.len());
            assert!(planned.iter().all(|one| one.not_run.is_none() && one.case.replays == PAIRWISE_REPLAYS));
            let mut covered = vec![false; 9 * 9 * MOST * MOST];
            planned.iter().for_each(|one| note(&one.case, &mut covered));
            // All that could be asked for, by the rules of the functions and not by how the set is made.
            let mut allowed = vec![false; covered.len()];
            for pattern in calls().patterns.iter().filter(|one| codes.contains(&one.code) && one.min_sm <= sm) {
                let choices =
                    [DType::Bf16, DType::Fp16, DType::Fp32].into_iter().flat_map(|dtype| (0..16).map(move |at| (dtype, at)));
                for (dtype, at) in choices {
                    let [oneshot, pdl, fp32_acc, trigger_at_end] = [1, 2, 4, 8].map(|bit| at & bit != 0);
                    if (!oneshot && !trigger_at_end) || (dtype == DType::Fp32 && (!fp32_acc || pattern.quant == Some(Quant::Fp4)))
                    {
                        continue;
                    }
                    let scales = Scales::Swizzled;
                    let what = What::Fusion { pattern: pattern.code, oneshot, fp32_acc, trigger_at_end, scales };
                    for (tokens, hidden) in TOKENS.into_iter().flat_map(|tokens| HIDDEN.map(|hidden| (tokens, hidden))) {
                        for ranks in RANKS.into_iter().filter(|ranks| oneshot || tokens > *ranks) {
                            note(&Case { what, dtype, ranks, tokens, hidden, pdl, replays: 1 }, &mut allowed);
                        }
                    }
                }
            }
            assert!(allowed.iter().filter(|is| **is).count() > 200);
            let other = covered.iter().zip(&allowed).position(|(covered, allowed)| covered != allowed);
            assert_eq!(other.map(|at| (at / MOST / MOST, at / MOST % MOST, at % MOST)), None, "sm_{sm}");
        }
    }

    #[test]
    fn a_covering_covers_what_is_possible_and_nothing_else() {
        let rows = covering(&[3, 3, 3], |row| row[0] != 2 || row[1] != 2, 0);
        assert!(rows.iter().all(|row| row[0] != 2 || row[1] != 2));
        for one in 0..3 {
            for other in 0..3 {
                assert_eq!(rows.iter().any(|row| (row[0], row[1]) == (one, other)), (one, other) != (2, 2));
                assert!(rows.iter().any(|row| (row[1], row[2]) == (one, other)));
            }
        }
        assert!(rows.len() <= 12);
        // More than there must be are others, and no more than there are.
        assert_eq!(covering(&[3, 3], |_| true, 100).len(), 9);
        let more = covering(&[3, 3, 3], |_| true, 15);
        assert_eq!((more.len(), more.iter().collect::<BTreeSet<_>>().len()), (15, 15));
    }
}
