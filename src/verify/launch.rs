//! What an engine's command line makes of the fused path: taken, left aside, or wrong.

use serde_json::Value;

use super::activation::Activation;
use super::command_line::{CommandLine, Flags};
use super::{Finding, Report, variables};
use crate::activate::State;
use crate::survey::{self, Package};
use crate::tables::{self, Fusion, Launcher, Means};

/// An engine that a command line starts.
#[derive(Debug)]
pub struct Launch {
    pub launcher: &'static Launcher,
    /// The engine as it is installed.
    pub package: Package,
    pub flags: Flags,
    /// GPUs of tensor parallelism; none where the command line does not tell.
    pub ranks: Option<u32>,
}

/// The edit that lets an engine take the fused path without a flag.
const AUTO_ENABLE: &str = "auto-enable";

/// Reads the command line for what it means; none where it starts no engine that is there.
pub fn read(report: &mut Report, line: &CommandLine) -> Option<Launch> {
    if line.elsewhere() {
        let message = format!(
            "`{}` starts its program in a container or on another machine: what is here says nothing of it",
            line.program
        );
        report.findings.note(Finding::new("command-elsewhere", message).hint("run `fi-arch verify` there"));
        return None;
    }
    for what in &line.unread {
        let message = format!("{what} cannot be told without running it: only its Python and its variables are looked at");
        report.findings.note(
            Finding::new("command-unread", message)
                .hint("name the engine's own command, such as `python -m sglang.launch_server …`"),
        );
    }
    let launcher = line.engine?;
    let environment = report.environment.clone()?;
    let found = survey::package(&environment, &launcher.name, &launcher.name);
    let package = match found {
        Ok(Some(package)) => package,
        Ok(None) => {
            let message = format!("{} is started, and it is not installed in {}", launcher.name, environment.prefix.display());
            report.findings.problem(
                Finding::new("engine-missing", message)
                    .hint("name the environment with --env DIR, or its Python by its full path"),
            );
            return None;
        }
        Err(error) => {
            report.findings.problem(Finding::of("engine-missing", &error));
            return None;
        }
    };
    let flags = Flags::of(line, launcher, &package.version);
    for what in &flags.unread {
        report.findings.note(
            Finding::new("command-unread", format!("{what}: not looked at")).hint("nothing, unless it concerns the all-reduce"),
        );
    }
    let ranks = if flags.has(Means::Ranks) { flags.number(Means::Ranks) } else { Some(1) };
    Some(Launch { launcher, package, flags, ranks })
}

/// Judges it: will the fused path be taken, and is what it then computes right.
pub fn look(report: &mut Report, launch: &Launch, activation: Option<&Activation>) {
    let state = activation.and_then(Activation::state);
    let Some(row) = launch.launcher.fusion_of(&launch.package.version) else {
        let message = format!("{} {} is older than what is known of it", launch.launcher.name, launch.package.version);
        return report.findings.note(Finding::new("engine-unknown", message).hint("only the environment is looked at"));
    };
    switched_on(report, launch, row, state);
    ranks(report, launch, state);
    shapes(report, launch);
    engine_variables(report, launch);
}

/// What to give the engine, ready to be put on a command line, and why.
fn advised(launch: &Launch) -> String {
    let engine = tables::engine(&launch.launcher.name).ok();
    let Some(advice) = engine.and_then(|engine| engine.advice(&launch.package.version)) else {
        return format!("what {}'s own manual says of this version", launch.launcher.name);
    };
    let quoted = |word: &String| match word.split_once('=') {
        Some((flag, value)) if value.contains(' ') => format!("{flag}='{value}'"),
        _ => word.clone(),
    };
    let words: Vec<String> = advice.env.iter().chain(&advice.flags).map(quoted).collect();
    if words.is_empty() { advice.text.clone() } else { format!("`{}` ({})", words.join(" "), advice.text) }
}

/// A flag's finding: what was written, and what follows.
fn flagged(launch: &Launch, code: &str, means: Means, effect: &str, hint: &str) -> Option<Finding> {
    let spelled = launch.flags.spelled(means)?;
    let value = launch.flags.text(means).map(|value| format!(" {value}")).unwrap_or_default();
    Some(Finding::new(code, format!("`{spelled}{value}`: {effect}")).hint(hint))
}

fn switched_on(report: &mut Report, launch: &Launch, row: &Fusion, state: Option<&State>) {
    let name = format!("{} {}", launch.launcher.name, launch.package.version);
    let flags = &launch.flags;
    let advise = format!("add {}", advised(launch));
    if let Some(off) = flagged(launch, "fusion-off", Means::FusionOff, "the fused path is forbidden", "leave it out") {
        report.findings.problem(off);
    }
    if let Some(switch) = &row.switch {
        return passes(report, launch, row, switch, &advise);
    }
    let backend = launch.launcher.flags.iter().find(|flag| flag.means == Means::Backend);
    if let (Some(backend), Some(value)) = (backend, flags.text(Means::Backend))
        && !backend.right.iter().any(|right| right == value)
    {
        let right = backend.right.join("` or `");
        let message = format!("`{} {value}`: SM 12.x has the `{right}` kernels alone", backend.spelled[0]);
        report.findings.problem(Finding::new("fusion-backend", message).hint(format!("write {}", advised(launch))));
    }
    if flags.has(Means::Fusion) || flags.has(Means::Backend) {
        return;
    }
    let by_itself = state.is_some_and(|state| {
        let engine = state.packages.iter().find(|package| package.name == launch.launcher.name);
        engine.is_some_and(|package| package.edits.iter().any(|edit| edit.id == AUTO_ENABLE))
    });
    if by_itself {
        let message =
            format!("{name} was edited to take the fused path by itself, for the models for which it does so on other GPUs");
        return report.findings.note(Finding::new("fusion-flag-absent", message).hint(format!("for any other model {advise}")));
    }
    let message = match row.default.as_str() {
        "off" => format!("{name} takes the fused path only when it is told to, and the flag is absent"),
        default => format!("the flag for the fused path is absent; {name} has it {default}"),
    };
    report.findings.add(row.default == "off", Finding::new("fusion-flag-absent", message).hint(advise));
}

/// The passes of an engine that compiles: named in JSON, or key by key.
fn passes(report: &mut Report, launch: &Launch, row: &Fusion, switch: &str, advise: &str) {
    let mut settings = Value::Object(serde_json::Map::new());
    for (key, text) in launch.flags.all(Means::Compile) {
        let value = serde_json::from_str::<Value>(text);
        match (key, value) {
            ("", Ok(Value::Object(value))) => merge(&mut settings, Value::Object(value)),
            // A bare number is the level of compilation.
            ("", Ok(Value::Number(level))) => merge(&mut settings, serde_json::json!({ "level": level })),
            ("", _) => {
                let message = format!(
                    "`{}` is followed by what is no JSON object: {text}",
                    launch.flags.spelled(Means::Compile).unwrap_or_default()
                );
                report.findings.problem(Finding::new("compilation-config", message).hint(advise.to_owned()));
                return;
            }
            (key, value) => {
                let value = value.unwrap_or_else(|_| Value::String(text.to_owned()));
                let nested =
                    key.rsplit('.').fold(value, |value, key| Value::Object([(key.to_owned(), value)].into_iter().collect()));
                merge(&mut settings, nested);
            }
        }
    }
    let pass = |key: &str| settings.pointer(&format!("/pass_config/{key}")).filter(|value| !value.is_null());
    let name = format!("{} {}", launch.launcher.name, launch.package.version);
    let is_on = |value: &Value| {
        matches!(value, Value::Bool(true)) || value.as_str().is_some_and(|text| text.eq_ignore_ascii_case("true"))
    };
    match pass(switch) {
        None => {
            let message = format!("{name} does not fuse on SM 12.x by itself, and `pass_config.{switch}` is absent");
            report.findings.problem(Finding::new("fusion-flag-absent", message).hint(advise.to_owned()));
        }
        Some(value) if !is_on(value) => {
            report
                .findings
                .problem(Finding::new("fusion-off", format!("`pass_config.{switch}` is {value}")).hint(advise.to_owned()));
        }
        Some(_) => {
            let limit = row.limit.as_deref().filter(|limit| pass(limit).and_then(Value::as_f64).is_none_or(|limit| limit <= 0.0));
            if let Some(limit) = limit {
                let message =
                    format!("{name} has no limit of its own for SM 12.x, and without `pass_config.{limit}` it does not fuse");
                report.findings.problem(Finding::new("fusion-limit-absent", message).hint(advise.to_owned()));
            }
        }
    }
    let level = ["mode", "level"].iter().find_map(|key| settings.get(*key));
    let no_level = level
        .is_some_and(|level| level.as_u64() == Some(0) || level.as_str().is_some_and(|text| text.eq_ignore_ascii_case("none")));
    let off = flagged(launch, "passes-off", Means::Eager, "nothing is compiled, so no pass fuses anything", "leave it out")
        .or_else(|| {
            launch
                .flags
                .number(Means::Level)
                .filter(|level| *level == 0)
                .and_then(|_| flagged(launch, "passes-off", Means::Level, "no pass runs at level 0", "leave it out"))
        })
        .or_else(|| {
            no_level
                .then(|| Finding::new("passes-off", "the compilation config turns compilation off").hint("leave its `mode` out"))
        });
    if let Some(off) = off {
        report.findings.problem(off);
    }
}

/// Puts the keys of one object over those of another.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

fn ranks(report: &mut Report, launch: &Launch, state: Option<&State>) {
    let Some(ranks) = launch.ranks else { return };
    let flag = &launch.launcher.flags.iter().find(|flag| flag.means == Means::Ranks).expect("every engine has one").spelled[0];
    if ranks <= 1 {
        let message =
            format!("the command line asks for one GPU: there is no all-reduce, and nothing to fuse (`{flag}` is {ranks})");
        report.findings.problem(Finding::new("one-rank", message).hint(format!("`{flag} 2`, where the model is to be spread")));
        return;
    }
    if let Some(state) = state
        && state.policy.of(ranks).is_none()
    {
        let message = format!(
            "the policy admits {} ranks, and the command line asks for {ranks}: all of them stay on the engine's own path",
            state.policy.counts()
        );
        let hint = "measure them on this machine, and name them in a policy: `fi-arch install --policy FILE`";
        report.findings.problem(Finding::new("ranks-not-admitted", message).hint(hint));
    }
    let nodes = launch.flags.number(Means::Nodes).unwrap_or(1).max(1);
    let wanted = (ranks * launch.flags.number(Means::Stages).unwrap_or(1).max(1)).div_ceil(nodes) as usize;
    let shown = variables::visible(&report.vars);
    let there = match (report.gpus.len(), shown) {
        (0, shown) => shown,
        (gpus, Some(shown)) => Some(shown.min(gpus)),
        (gpus, None) => Some(gpus),
    };
    // That none is visible is said by itself.
    if let Some(there) = there.filter(|there| *there > 0 && *there < wanted) {
        let message = format!("the command line asks for {wanted} GPUs on a machine, and {there} are visible here");
        report.findings.problem(Finding::new("more-ranks-than-gpus", message).hint("lower it, or look at CUDA_VISIBLE_DEVICES"));
    }
}

/// Ways of spreading a model with which the fused path is not taken, or is wrong.
fn shapes(report: &mut Report, launch: &Launch) {
    let number = |means| launch.flags.number(means).unwrap_or(1);
    let mut say = |wrong: bool, code: &str, means: Means, effect: &str, hint: &str| {
        if wrong && let Some(finding) = flagged(launch, code, means, effect, hint) {
            report.findings.problem(finding);
        }
    };
    let ranks = launch.ranks.unwrap_or(1);
    say(
        number(Means::Stages) > 1,
        "pipeline-parallel",
        Means::Stages,
        "the fused path is left aside, or takes the processes of all stages for ranks of one all-reduce",
        "use one stage, or leave the fused path off",
    );
    say(
        number(Means::Nodes) > 1,
        "several-nodes",
        Means::Nodes,
        "the trtllm kernels reach the memory of GPUs of one machine alone",
        "leave the fused path off over several machines",
    );
    let data = number(Means::DataParallel);
    say(
        launch.flags.has(Means::DpAttention) && data > 1,
        "dp-attention",
        Means::DpAttention,
        "attention is not spread over all ranks, and the engine leaves the fused path aside",
        "leave it out where the fused path is wanted",
    );
    say(
        number(Means::AttentionGroups) > 1,
        "dp-attention",
        Means::AttentionGroups,
        "attention is not spread over all ranks, and the engine leaves the fused path aside",
        "leave it out where the fused path is wanted",
    );
    say(
        launch.launcher.flags.iter().all(|flag| flag.means != Means::DpAttention) && data > 1,
        "data-parallel",
        Means::DataParallel,
        "the fused path with several groups of ranks was reported to be broken",
        "start one server for each group",
    );
    let experts = number(Means::Experts);
    say(
        experts > 1 && experts < ranks,
        "hybrid-ep",
        Means::Experts,
        "experts that are spread over a part of the ranks: the fused path sums over too few of them, on every GPU, or is left aside",
        "make it as many as the ranks, or 1",
    );
    say(
        number(Means::Context) > 1,
        "context-parallel",
        Means::Context,
        "the engine leaves the fused path aside",
        "leave it out where the fused path is wanted",
    );
    say(
        launch.flags.has(Means::Deterministic),
        "deterministic",
        Means::Deterministic,
        "the engine switches the fused path off",
        "leave it out where the fused path is wanted",
    );
}

fn engine_variables(report: &mut Report, launch: &Launch) {
    let version = &launch.package.version;
    for variable in launch.launcher.variables.iter().filter(|variable| variable.holds_in(version)) {
        let value = report.vars.text(&variable.name);
        match (&variable.want, value) {
            (Some(want), Some(value)) if value != *want => {
                let message = format!("{}={value}: SM 12.x has the {want} kernels alone", variable.name);
                report
                    .findings
                    .problem(Finding::new("engine-variable", message).hint(format!("export {}={want}", variable.name)));
            }
            (Some(want), None) => {
                let message = format!("{} is unset: {} tries other kernels first", variable.name, launch.launcher.name);
                report.findings.note(Finding::new("engine-variable", message).hint(format!("export {}={want}", variable.name)));
            }
            _ => {}
        }
        if variable.keeps_off && report.vars.is_on(&variable.name) {
            let message = format!("{} is set: plain all-reduces take another path of FlashInfer", variable.name);
            report.findings.note(
                Finding::new("engine-other-path", message).hint("measure both: which one is faster depends on the machine"),
            );
        }
    }
}
