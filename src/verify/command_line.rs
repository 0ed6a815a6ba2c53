//! A command line read without running it: which Python it starts, with which variables, and an engine's flags.
//!
//! Programs that stand before another one (`env`, `nohup`, `numactl`, `fi-arch run`, `torchrun`, `bash -c`, …) are looked
//! through. What cannot be told is said to be so, and never guessed.

use std::path::{Path, PathBuf};

use crate::env::{self, Vars};
use crate::tables::{LaunchFlag, Launcher, Means, launchers};

/// What a command line starts.
#[derive(Debug, Clone, Default)]
pub struct CommandLine {
    /// The variables of the process that it comes to.
    pub vars: Vars,
    /// The folder that it is started in; none for the present one.
    pub folder: Option<PathBuf>,
    /// The programs that were looked through, in order.
    pub through: Vec<String>,
    /// The program that it comes to, as it stands there.
    pub program: String,
    /// The Python options of it, where it is a Python.
    pub python: Option<PythonFlags>,
    /// It starts an engine's server.
    pub engine: Option<&'static Launcher>,
    /// The arguments of the engine, or of the program.
    pub args: Vec<String>,
    /// What could not be read, for people.
    pub unread: Vec<String>,
}

/// The options of a Python that decide what it finds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PythonFlags {
    /// `-S`: no site-packages, and no start-up code.
    pub no_site: bool,
    /// `-E`: no variable that starts with `PYTHON`.
    pub no_variables: bool,
    /// `-s`: no packages of the user.
    pub no_user_site: bool,
    /// `-I`: both of these, and not the working folder.
    pub isolated: bool,
    /// `-P`: not the working folder.
    pub safe_path: bool,
    /// `-m`: a module is started, and the working folder searched first.
    pub module: bool,
}

impl PythonFlags {
    /// `PYTHONPATH` and its like are not read.
    pub fn ignores_variables(self) -> bool {
        self.no_variables || self.isolated
    }

    pub fn ignores_user_site(self) -> bool {
        self.no_user_site || self.isolated
    }
}

/// A program that runs another one.
struct Wrapper {
    name: &'static str,
    /// Its options that take the next word.
    takes: &'static [&'static str],
    /// Words of its own before the program.
    operands: usize,
}

const WRAPPERS: &[Wrapper] = &[
    wrapper("nohup", &[], 0),
    wrapper("setsid", &[], 0),
    wrapper("exec", &["-a"], 0),
    wrapper("command", &[], 0),
    wrapper("time", &["-f", "--format", "-o", "--output"], 0),
    wrapper("nice", &["-n", "--adjustment"], 0),
    wrapper("ionice", &["-c", "--class", "-n", "--classdata"], 0),
    wrapper("chrt", &["-T", "-P", "-D"], 1),
    wrapper("taskset", &[], 1),
    wrapper("timeout", &["-s", "--signal", "-k", "--kill-after"], 1),
    wrapper(
        "numactl",
        &[
            "-i",
            "--interleave",
            "-N",
            "--cpunodebind",
            "-C",
            "--physcpubind",
            "-m",
            "--membind",
            "-p",
            "--preferred",
            "-P",
            "--preferred-many",
            "-w",
            "--weighted-interleave",
        ],
        0,
    ),
    wrapper("stdbuf", &["-i", "--input", "-o", "--output", "-e", "--error"], 0),
    wrapper("unbuffer", &[], 0),
    wrapper(
        "sudo",
        &["-u", "--user", "-g", "--group", "-h", "--host", "-p", "--prompt", "-C", "-D", "--chdir", "-R", "-T", "-U"],
        0,
    ),
    wrapper("tini", &["-p", "-e"], 0),
    wrapper("dumb-init", &["-r", "--rewrite"], 0),
    wrapper("catatonit", &[], 0),
];

/// Programs that start theirs on another machine or in a container: nothing here is what that will see.
const ELSEWHERE: [&str; 9] = ["docker", "podman", "nerdctl", "kubectl", "ssh", "srun", "mpirun", "mpiexec", "apptainer"];

/// Options of `uv run` that take the next word.
const UV: [&str; 14] = [
    "-p",
    "--python",
    "--with",
    "--with-editable",
    "--with-requirements",
    "--env-file",
    "--directory",
    "--project",
    "--extra",
    "--group",
    "--package",
    "--index-url",
    "--index",
    "-w",
];

/// Options of `torchrun` that take the next word.
const TORCHRUN: [&str; 18] = [
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "role",
    "log-dir",
    "redirects",
    "tee",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
    "local-ranks-filter",
];

/// Options of `fi-arch run` and of `fi-arch` itself that take the next word.
const RUN: [&str; 9] = ["--env", "--sm", "--from", "--policy", "--engine", "--on-miss", "--module", "--flashinfer", "--toolkit"];

const fn wrapper(name: &'static str, takes: &'static [&'static str], operands: usize) -> Wrapper {
    Wrapper { name, takes, operands }
}

/// Reads a command line that a shell has split into words.
pub fn read(words: &[String]) -> CommandLine {
    let mut line = CommandLine::default();
    line.command(words.to_vec(), 0);
    line
}

impl CommandLine {
    /// It goes through `fi-arch run`, which activates for its own process tree.
    pub fn through_run(&self) -> bool {
        self.through.iter().any(|name| name == "fi-arch run")
    }

    /// A command on another machine or in a container.
    pub fn elsewhere(&self) -> bool {
        ELSEWHERE.contains(&base(&self.program))
    }

    /// The file of the program, as the shell would find it; none where there is none.
    pub fn executable(&self) -> Option<PathBuf> {
        let folder = self.folder.clone().or_else(|| std::env::current_dir().ok()).unwrap_or_default();
        if self.program.is_empty() {
            return None;
        }
        if self.program.contains('/') {
            return Some(folder.join(&self.program)).filter(|file| file.is_file());
        }
        self.on_path(&self.program, &folder)
    }

    fn on_path(&self, name: &str, folder: &Path) -> Option<PathBuf> {
        let path = self.vars.var(env::PATH)?;
        std::env::split_paths(&path).map(|dir| folder.join(dir).join(name)).find(|file| file.is_file())
    }

    /// The Python that will run: the program itself, or the one that a script names in its first lines.
    pub fn python_program(&self) -> Option<PathBuf> {
        let file = self.executable()?;
        if self.python.is_some() {
            return Some(file);
        }
        match interpreter(&file)? {
            named if named.components().count() == 1 => self.on_path(named.to_str()?, Path::new("")),
            named => Some(named),
        }
    }

    /// Reads words from the first one that is no variable.
    fn command(&mut self, mut words: Vec<String>, depth: usize) {
        while let Some((name, value)) = words.first().and_then(|word| assignment(word)) {
            self.vars.set(name, value);
            words.remove(0);
        }
        let Some(first) = words.first().cloned() else { return };
        // Nobody writes more; a line that goes in a circle ends here.
        if depth > 16 {
            return self.unread.push(format!("`{first}`: too many programs stand before one another"));
        }
        let rest = words.split_off(1);
        let name = base(&first).to_owned();
        match name.as_str() {
            "env" => self.env(rest, depth),
            "bash" | "sh" | "dash" | "zsh" => self.shell(&first, rest, depth),
            "fi-arch" => self.fi_arch(&first, rest, depth),
            "torchrun" => self.torchrun(&first, rest),
            "uv" if rest.first().is_some_and(|word| word == "run") => {
                let rest = self.after_options(&rest[1..], &UV);
                self.through.push("uv run".to_owned());
                let own = self.folder.clone().unwrap_or_default().join(".venv/bin");
                if let Ok(own) = std::path::absolute(own)
                    && own.is_dir()
                {
                    self.first_on_path(&own);
                }
                self.command(rest, depth + 1);
            }
            _ if is_python(&name) => self.python(&first, rest),
            _ => match WRAPPERS.iter().find(|wrapper| wrapper.name == name) {
                Some(wrapper) => {
                    self.through.push(name);
                    let mut rest = self.after_options(&rest, wrapper.takes);
                    rest.drain(..wrapper.operands.min(rest.len()));
                    self.command(rest, depth + 1);
                }
                None => self.program(&first, rest),
            },
        }
    }

    /// `env -i -u NAME -C DIR A=b CMD`
    fn env(&mut self, words: Vec<String>, depth: usize) {
        self.through.push("env".to_owned());
        let mut words = words.into_iter().peekable();
        while let Some(word) = words.next_if(|word| word.starts_with('-') || assignment(word).is_some()) {
            if let Some((name, value)) = assignment(&word).filter(|_| !word.starts_with('-')) {
                self.vars.set(name, value);
                continue;
            }
            match word.as_str() {
                "-" | "-i" | "--ignore-environment" => self.vars.clear(),
                "-u" | "--unset" => self.vars.unset(&words.next().unwrap_or_default()),
                "-C" | "--chdir" => self.folder = words.next().map(PathBuf::from),
                "-S" | "--split-string" => {
                    let text = words.next().unwrap_or_default();
                    let mut split: Vec<String> =
                        split(&text).into_iter().flatten().map(|word| expand(&word, &self.vars)).collect();
                    split.extend(words);
                    return self.command(split, depth + 1);
                }
                "--" => break,
                _ => {
                    if let Some(name) = word.strip_prefix("--unset=").or_else(|| word.strip_prefix("-u")) {
                        self.vars.unset(name);
                    } else if let Some(dir) = word.strip_prefix("--chdir=").or_else(|| word.strip_prefix("-C")) {
                        self.folder = Some(dir.into());
                    }
                }
            }
        }
        self.command(words.collect(), depth + 1);
    }

    /// `bash -lc "export A=b && source venv/bin/activate && exec python …"`: the last command that is known, or the last one.
    fn shell(&mut self, first: &str, words: Vec<String>, depth: usize) {
        let mut words = words.into_iter();
        let mut script = None;
        while let Some(word) = words.next() {
            match word.strip_prefix('-') {
                Some(letters) if !letters.starts_with('-') && letters.contains('c') => {
                    script = words.next();
                    break;
                }
                // The name of an option: `-o pipefail`
                Some("o" | "O") => _ = words.next(),
                Some(_) => {}
                None => {
                    self.program = first.to_owned();
                    return self.unread.push(format!("the script `{word}`: name the command in it"));
                }
            }
        }
        self.through.push(format!("{} -c", base(first)));
        let Some(script) = script else { return };
        let mut found: Option<Self> = None;
        for mut words in split(&script) {
            words.iter_mut().for_each(|word| *word = expand(word, &self.vars));
            match words.first().map(String::as_str) {
                Some("export") => {
                    words[1..].iter().filter_map(|word| assignment(word)).for_each(|(name, value)| self.vars.set(name, value))
                }
                Some("unset") => words[1..].iter().for_each(|name| self.vars.unset(name)),
                Some("cd") => {
                    if let Some(dir) = words.get(1) {
                        self.folder = Some(self.folder.clone().unwrap_or_default().join(dir));
                    }
                }
                Some("source" | ".") => {
                    if let Some(bin) =
                        words.get(1).map(Path::new).filter(|file| file.ends_with("bin/activate")).and_then(Path::parent)
                    {
                        let bin = self.folder.clone().unwrap_or_default().join(bin);
                        let bin = std::path::absolute(&bin).unwrap_or(bin);
                        self.first_on_path(&bin);
                        self.vars.set(env::VIRTUAL_ENV, bin.parent().unwrap_or(&bin));
                    }
                }
                Some("set" | "ulimit" | "echo" | "mkdir" | "sleep" | "true" | "test" | "[" | "trap" | "umask") | None => {}
                // Not handed on by a shell; put in where the script says `$NAME`.
                Some(_) if words.iter().all(|word| assignment(word).is_some()) => {
                    words.iter().filter_map(|word| assignment(word)).for_each(|(name, value)| self.vars.set(name, value));
                }
                Some(_) => {
                    let mut other = self.clone();
                    other.command(words, depth + 1);
                    if other.engine.is_some() || found.as_ref().is_none_or(|found| found.engine.is_none()) {
                        found = Some(other);
                    }
                }
            }
        }
        if let Some(found) = found {
            *self = found;
        }
    }

    fn fi_arch(&mut self, first: &str, words: Vec<String>, depth: usize) {
        let own = words.iter().take_while(|word| *word != "--").any(|word| word == "run");
        if !own {
            return self.program(first, words);
        }
        self.through.push("fi-arch run".to_owned());
        let command = match words.iter().position(|word| word == "--") {
            Some(at) => words[at + 1..].to_vec(),
            None => {
                let at = words.iter().position(|word| word == "run").unwrap_or(0);
                self.after_options(&words[at + 1..], &RUN)
            }
        };
        self.command(command, depth + 1);
    }

    /// `torchrun --nproc-per-node 2 -m MODULE …`, which is a Python too.
    fn torchrun(&mut self, first: &str, words: Vec<String>) {
        self.through.push("torchrun".to_owned());
        self.program = first.to_owned();
        let mut words = words.into_iter();
        let mut module = false;
        while let Some(word) = words.next() {
            let Some(option) = word.strip_prefix('-') else {
                let rest = words.collect();
                return self.target(&word, module, rest);
            };
            let option = option.trim_start_matches('-').replace('_', "-");
            match option.as_str() {
                "m" | "module" => module = true,
                "r" | "t" => _ = words.next(),
                _ if TORCHRUN.contains(&option.as_str()) => _ = words.next(),
                _ => {}
            }
        }
    }

    /// `python -s -X dev -m MODULE …`
    fn python(&mut self, first: &str, words: Vec<String>) {
        self.program = first.to_owned();
        let mut flags = PythonFlags::default();
        let mut words = words.into_iter();
        'words: while let Some(word) = words.next() {
            let Some(letters) = word.strip_prefix('-').filter(|letters| !letters.is_empty()) else {
                self.python = Some(flags);
                return self.target(&word, false, words.collect());
            };
            if letters.starts_with('-') {
                // `--check-hash-based-pycs default` takes a word; `--help` and its like end it.
                if letters == "-check-hash-based-pycs" {
                    words.next();
                }
                continue;
            }
            for (at, letter) in letters.char_indices() {
                let glued = &letters[at + letter.len_utf8()..];
                match letter {
                    'S' => flags.no_site = true,
                    'E' => flags.no_variables = true,
                    's' => flags.no_user_site = true,
                    'I' => flags.isolated = true,
                    'P' => flags.safe_path = true,
                    'W' | 'X' => {
                        if glued.is_empty() {
                            words.next();
                        }
                        continue 'words;
                    }
                    'm' | 'c' => {
                        let value = if glued.is_empty() { words.next().unwrap_or_default() } else { glued.to_owned() };
                        flags.module = true;
                        self.python = Some(flags);
                        if letter == 'm' && matches!(value.as_str(), "torch.distributed.run" | "torch.distributed.launch") {
                            let (program, python) = (self.program.clone(), self.python);
                            self.torchrun(&program, words.collect());
                            self.python = python;
                            return;
                        }
                        if letter == 'm' {
                            return self.target(&value, true, words.collect());
                        }
                        self.args = words.collect();
                        return self.unread.push("the program behind `-c`".to_owned());
                    }
                    _ => {}
                }
            }
        }
        self.python = Some(flags);
    }

    /// A module (`-m`) or a script that a Python starts.
    fn target(&mut self, name: &str, module: bool, args: Vec<String>) {
        let script = Path::new(name).with_extension("");
        let of = |launcher: &&Launcher| {
            let is_program = !module && launcher.programs.iter().any(|program| *program == base(name));
            let is_module = launcher.modules.iter().any(|known| match module {
                true => known == name,
                false => script.ends_with(known.replace('.', "/")),
            });
            is_program || is_module
        };
        self.args = args;
        self.engine = launchers().iter().find(of);
        // Other modules start a server whatever follows.
        if !module || name.ends_with(".cli.main") {
            self.subcommand();
        }
        if self.engine.is_none() {
            self.unread.push(format!("what `{name}` starts"));
        }
    }

    /// A program that is no Python, no wrapper and no shell.
    fn program(&mut self, first: &str, args: Vec<String>) {
        self.program = first.to_owned();
        self.args = args;
        self.engine = launchers().iter().find(|launcher| launcher.programs.iter().any(|program| program == base(first)));
        self.subcommand();
        if self.engine.is_none() {
            self.unread.push(format!("what `{}` starts", base(first)));
        }
    }

    /// Takes off the word that says which of a program's verbs is meant; another one than a server's starts none.
    fn subcommand(&mut self) {
        let Some(launcher) = self.engine else { return };
        let is_verb = self.args.first().is_some_and(|word| launcher.subcommands.contains(word));
        if is_verb {
            self.args.remove(0);
        } else if self.args.first().is_some_and(|word| !word.starts_with('-')) {
            self.engine = None;
        }
    }

    /// The words behind a program's own options.
    fn after_options(&mut self, words: &[String], takes: &[&str]) -> Vec<String> {
        let mut at = 0;
        while let Some(word) = words.get(at).filter(|word| word.starts_with('-') && word.len() > 1) {
            at += 1;
            if word == "--" {
                break;
            }
            if takes.contains(&word.as_str()) {
                at += 1;
            }
        }
        words.get(at..).unwrap_or_default().to_vec()
    }

    fn first_on_path(&mut self, bin: &Path) {
        let mut path = bin.as_os_str().to_owned();
        if let Some(old) = self.vars.var(env::PATH) {
            path.push(":");
            path.push(old);
        }
        self.vars.set(env::PATH, path);
    }
}

/// The flags of an engine's command line that matter, in order; the last one of a meaning counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    /// What it means, as it was spelled, and its value.
    found: Vec<(Means, String, Option<String>)>,
    /// Files and values that could not be read.
    pub unread: Vec<String>,
}

impl Flags {
    /// Reads the arguments of a command line for `version` of its engine.
    pub fn of(line: &CommandLine, launcher: &Launcher, version: &str) -> Self {
        let mut flags = Self::default();
        // The command line wins over the file that it names.
        if let Some(file) = value_of(&line.args, &launcher.config) {
            let path = line.folder.clone().unwrap_or_default().join(&file);
            match std::fs::read_to_string(&path) {
                Ok(text) => {
                    let args = of_yaml(&text, &mut flags.unread);
                    flags.read(&args, launcher, version);
                }
                Err(error) => flags.unread.push(format!("{}: {error}", path.display())),
            }
        }
        flags.read(&line.args, launcher, version);
        flags
    }

    /// How the flag of a meaning was spelled, where it is there.
    pub fn spelled(&self, means: Means) -> Option<&str> {
        self.last(means).map(|(_, spelled, _)| spelled.as_str())
    }

    pub fn has(&self, means: Means) -> bool {
        self.last(means).is_some()
    }

    pub fn text(&self, means: Means) -> Option<&str> {
        self.last(means)?.2.as_deref()
    }

    /// The number of a meaning; none where it is absent or no number.
    pub fn number(&self, means: Means) -> Option<u32> {
        self.text(means)?.trim().parse().ok()
    }

    /// All values of a meaning, with what followed the flag's name behind a dot (`-cc.pass_config.x=1`).
    pub fn all(&self, means: Means) -> impl Iterator<Item = (&str, &str)> {
        self.found.iter().filter(move |(is, _, _)| *is == means).filter_map(|(_, spelled, value)| {
            let dotted = spelled.split_once('.').map_or("", |(_, dotted)| dotted);
            Some((dotted, value.as_deref()?))
        })
    }

    fn last(&self, means: Means) -> Option<&(Means, String, Option<String>)> {
        self.found.iter().rev().find(|(is, _, _)| *is == means)
    }

    fn read(&mut self, args: &[String], launcher: &Launcher, version: &str) {
        let mut args = args.iter().peekable();
        while let Some(arg) = args.next() {
            if !arg.starts_with('-') {
                continue;
            }
            let (name, glued) = arg.split_once('=').map_or((arg.as_str(), None), |(name, value)| (name, Some(value)));
            let name = if launcher.underscores { underscored(name) } else { name.to_owned() };
            let Some((flag, glued)) = flag(launcher, &name, glued) else { continue };
            let value = match (flag.value, glued) {
                (false, _) => None,
                (true, Some(value)) => Some(value),
                (true, None) => args.next().cloned(),
            };
            if !flag.holds_in(version) {
                continue;
            }
            if let Some(value) = value.as_ref().filter(|value| value.contains('$')) {
                self.unread.push(format!("`{name} {value}`: the shell has not put in what it stands for"));
            }
            self.found.push((flag.means, name, value));
        }
    }
}

/// The flag of that name, and its value where that is glued to it (`-O3`).
fn flag<'l>(launcher: &'l Launcher, name: &str, glued: Option<&str>) -> Option<(&'l LaunchFlag, Option<String>)> {
    let glued = glued.map(str::to_owned);
    let plain = name.split('.').next().unwrap_or(name);
    let exact = launcher.flags.iter().find(|flag| flag.spelled.iter().any(|spelled| spelled == plain));
    if let Some(flag) = exact.filter(|flag| plain == name || flag.means == Means::Compile) {
        return Some((flag, glued));
    }
    if !name.starts_with("--") {
        let short = launcher.flags.iter().filter(|flag| flag.value).find_map(|flag| {
            let is_short = |spelled: &&String| spelled.len() == 2;
            flag.spelled.iter().filter(is_short).find_map(|spelled| Some((flag, name.strip_prefix(spelled.as_str())?.to_owned())))
        });
        return short.map(|(flag, value)| (flag, Some(value)));
    }
    // argparse takes the beginning of a name for the name. Short beginnings are other flags' names.
    let mut begun =
        launcher.flags.iter().filter(|flag| name.len() >= 10 && flag.spelled.iter().any(|full| full.starts_with(name)));
    match (begun.next(), begun.next()) {
        (Some(flag), None) => Some((flag, glued)),
        _ => None,
    }
}

/// `--tensor_parallel_size` as `--tensor-parallel-size`; what stands behind a dot is a key, and stays.
fn underscored(name: &str) -> String {
    match name.split_once('.') {
        Some((flag, key)) => format!("{}.{key}", flag.replace('_', "-")),
        None => name.replace('_', "-"),
    }
}

/// The value of a flag in `--a b` or `--a=b`.
fn value_of(args: &[String], name: &str) -> Option<String> {
    let at = args.iter().position(|arg| arg == name || arg.strip_prefix(name).is_some_and(|rest| rest.starts_with('=')))?;
    match args[at].split_once('=') {
        Some((_, value)) => Some(value.to_owned()),
        None => args.get(at + 1).cloned(),
    }
}

/// The arguments in a YAML file of plain `key: value` lines. Nested values are told to be unread.
fn of_yaml(text: &str, unread: &mut Vec<String>) -> Vec<String> {
    let mut args = Vec::new();
    for line in text.lines() {
        let code = line.split(" #").next().unwrap_or_default().trim_end();
        if code.trim().is_empty() || code.starts_with('#') || code == "---" {
            continue;
        }
        if code.starts_with([' ', '\t', '-']) {
            unread.push(format!("the config file's line `{}`", code.trim()));
            continue;
        }
        let Some((key, value)) = code.split_once(':') else { continue };
        let value = value.trim().trim_matches(['"', '\'']);
        let key = key.trim().trim_matches(['"', '\'']);
        match value.to_ascii_lowercase().as_str() {
            "true" => args.push(format!("--{key}")),
            "false" | "" | "null" | "~" => {}
            _ => args.extend([format!("--{key}"), value.to_owned()]),
        }
    }
    args
}

/// `NAME=value`
fn assignment(word: &str) -> Option<(&str, &str)> {
    let (name, value) = word.split_once('=')?;
    let starts = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
    (starts && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')).then_some((name, value))
}

fn base(program: &str) -> &str {
    program.rsplit('/').next().unwrap_or(program)
}

/// `python`, `python3`, `python3.11`, `python3.13t`
fn is_python(name: &str) -> bool {
    name.strip_prefix("python").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.' || byte == b't'))
}

/// The Python in the first line of a console script, or its bare name where that goes by `PATH`. For paths that are long or
/// have spaces pip writes a second form.
fn interpreter(script: &Path) -> Option<PathBuf> {
    let bytes = std::fs::read(script).ok().filter(|bytes| bytes.starts_with(b"#!"))?;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4096)]).into_owned();
    let mut lines = text.lines();
    let first = lines.next()?.strip_prefix("#!")?.trim();
    let second = lines.next().unwrap_or_default();
    if let Some(exec) = second.strip_prefix("'''exec'") {
        let exec = exec.trim_start();
        let path = match exec.strip_prefix('"') {
            Some(quoted) => quoted.split('"').next()?,
            None => exec.split_whitespace().next()?,
        };
        return Some(PathBuf::from(path));
    }
    let mut words = first.split_whitespace();
    let program = words.next()?;
    if base(program) == "env" {
        let name = words.find(|word| !word.starts_with('-'))?;
        return is_python(base(name)).then(|| PathBuf::from(name));
    }
    is_python(base(program)).then(|| PathBuf::from(program))
}

/// The commands of a shell's script as words: split at `;`, `&&`, `||`, `|`, `&` and line ends, quotes taken off. What the
/// shell would put in for a `$` inside single quotes stays as it stands; `expand` puts in the rest.
fn split(script: &str) -> Vec<Vec<String>> {
    let mut commands: Vec<Vec<String>> = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut chars = script.chars().peekable();
    let end = |commands: &mut Vec<Vec<String>>, word: &mut Option<String>| {
        if let Some(word) = word.take() {
            commands.last_mut().expect("one is always there").push(word);
        }
    };
    while let Some(char) = chars.next() {
        match char {
            '\'' => {
                let quoted: String = chars.by_ref().take_while(|char| *char != '\'').collect();
                // Not to be expanded later: the shell leaves it alone.
                word.get_or_insert_default().push_str(&quoted.replace('$', "\u{1}"));
            }
            '"' => {
                let word = word.get_or_insert_default();
                while let Some(char) = chars.next().filter(|char| *char != '"') {
                    match char {
                        '\\' if matches!(chars.peek(), Some('"' | '\\' | '$' | '`')) => {
                            let next = chars.next().unwrap_or_default();
                            word.push(if next == '$' { '\u{1}' } else { next });
                        }
                        _ => word.push(char),
                    }
                }
            }
            '\\' => match chars.next() {
                Some('\n') | None => {}
                Some(next) => word.get_or_insert_default().push(next),
            },
            '#' if word.is_none() => while chars.next_if(|char| *char != '\n').is_some() {},
            ';' | '&' | '|' | '\n' | '(' | ')' | '{' | '}' if !(matches!(char, '{' | '}') && word.is_some()) => {
                end(&mut commands, &mut word);
                commands.push(Vec::new());
            }
            '>' | '<' => {
                // A redirection is no word: `>log`, `2>&1`, `< /dev/null`.
                if word.as_ref().is_some_and(|word| word.bytes().all(|byte| byte.is_ascii_digit())) {
                    word = None;
                }
                end(&mut commands, &mut word);
                while chars.next_if(|char| matches!(char, '>' | '<' | '&' | ' ')).is_some() {}
                while chars.next_if(|char| !char.is_whitespace() && !matches!(char, ';' | '&' | '|')).is_some() {}
            }
            char if char.is_whitespace() => end(&mut commands, &mut word),
            '$' if chars.peek() == Some(&'{') => {
                let word = word.get_or_insert_default();
                word.push('$');
                for char in chars.by_ref() {
                    word.push(char);
                    if char == '}' {
                        break;
                    }
                }
            }
            char => word.get_or_insert_default().push(char),
        }
    }
    end(&mut commands, &mut word);
    commands.retain(|words| !words.is_empty());
    commands
}

/// Puts in the values of `$NAME`, `${NAME}` and `${NAME:-default}`, where they are known; the rest stays as it stands.
fn expand(word: &str, vars: &Vars) -> String {
    let mut text = String::new();
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('$') {
        text.push_str(before);
        let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
        let (inside, next) = match after.strip_prefix('{') {
            Some(braced) => braced.split_once('}').unwrap_or((braced, "")),
            None => after.split_at(after.find(|char| !is_name(char)).unwrap_or(after.len())),
        };
        let (name, default) =
            inside.split_once(":-").or_else(|| inside.split_once('-')).map_or((inside, None), |(n, d)| (n, Some(d)));
        let known = !name.is_empty() && name.chars().all(is_name);
        match vars.text(name).filter(|_| known).or_else(|| default.filter(|_| known).map(str::to_owned)) {
            Some(value) => text.push_str(&value),
            None => text.push_str(&rest[before.len()..rest.len() - next.len()]),
        }
        rest = next;
    }
    text.push_str(rest);
    text.replace('\u{1}', "$")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> CommandLine {
        let words = split(text);
        assert_eq!(words.len(), 1, "{text}");
        read(&words[0].iter().map(|word| word.replace('\u{1}', "$")).collect::<Vec<_>>())
    }

    fn sglang(text: &str) -> Flags {
        let line = line(text);
        Flags::of(&line, line.engine.unwrap_or_else(|| panic!("{text}: {line:?}")), "0.5.9")
    }

    #[test]
    fn an_engine_is_found_behind_whatever_stands_before_it() {
        for (text, engine, through) in [
            ("python -m sglang.launch_server --tp 2", "sglang", &[][..]),
            ("/venv/bin/python3.11 -u -X dev -msglang.launch_server --tp 2", "sglang", &[]),
            ("A=1 sglang serve --tp 2", "sglang", &[]),
            ("/venv/bin/vllm serve model -tp 2", "vllm", &[]),
            ("python -m vllm.entrypoints.openai.api_server -tp=2", "vllm", &[]),
            ("python /src/python/sglang/launch_server.py --tp 2", "sglang", &[]),
            ("python /venv/bin/vllm serve model", "vllm", &[]),
            ("python -m vllm.entrypoints.cli.main serve model", "vllm", &[]),
            ("env -u X -C /tmp A=1 nohup python -m sglang.launch_server", "sglang", &["env", "nohup"]),
            ("fi-arch run -- python -m sglang.launch_server", "sglang", &["fi-arch run"]),
            ("fi-arch -v run --policy p.toml vllm serve m", "vllm", &["fi-arch run"]),
            ("numactl --cpunodebind=0 -m 0 python -m sglang.launch_server", "sglang", &["numactl"]),
            ("taskset -c 0-7 nice -n 5 timeout -k 5 10h sglang serve", "sglang", &["taskset", "nice", "timeout"]),
            ("torchrun --nproc_per_node 2 --standalone -m sglang.launch_server", "sglang", &["torchrun"]),
            ("python -m torch.distributed.run --nproc-per-node=2 -m vllm.entrypoints.api_server", "vllm", &["torchrun"]),
            ("sudo -E -u me A=1 tini -- vllm serve m", "vllm", &["sudo", "tini"]),
            ("uv run --with x --python 3.12 vllm serve m", "vllm", &["uv run"]),
            ("env -S 'A=1 python -m sglang.launch_server'", "sglang", &["env"]),
            (
                "bash -lc 'set -e; export A=1 && cd /tmp && exec python -m sglang.launch_server >log 2>&1'",
                "sglang",
                &["bash -c", "exec"],
            ),
        ] {
            let found = line(text);
            assert_eq!(found.engine.map(|launcher| launcher.name.as_str()), Some(engine), "{text}: {found:?}");
            assert_eq!(found.through, through, "{text}");
        }
    }

    #[test]
    fn what_starts_no_server_is_said_to_be_unread() {
        for text in [
            "ls -l",
            "python -c 'import sglang'",
            "python train.py",
            "sglang version",
            "vllm bench latency",
            "bash x.sh",
            "python -m vllm.entrypoints.cli.main bench",
        ] {
            let found = line(text);
            assert!(found.engine.is_none() && !found.unread.is_empty(), "{text}: {found:?}");
        }
        assert!(line("docker run image python -m sglang.launch_server").elsewhere());
    }

    #[test]
    fn variables_are_those_of_the_process_that_it_comes_to() {
        let found = line("A=1 B=2 env -u B C='x y' python -m sglang.launch_server");
        let value = |name: &str| found.vars.text(name);
        assert_eq!((value("A"), value("B"), value("C")), (Some("1".into()), None, Some("x y".into())));
        assert_eq!(line("env -i A=1 python x.py").vars.var("PATH"), None);
        let script =
            "export TP=4 X=\"a b\"; unset HOME; python -m sglang.launch_server --tp ${TP} --pp ${PP:-1} --nnodes $N '$X'";
        let found = read(&["bash".to_owned(), "-c".to_owned(), script.to_owned()]);
        assert_eq!((found.vars.text("X"), found.vars.text("HOME")), (Some("a b".into()), None));
        assert_eq!(found.args.last().map(String::as_str), Some("$X"));
        let flags = Flags::of(&found, found.engine.unwrap(), "0.5.9");
        assert_eq!((flags.number(Means::Ranks), flags.number(Means::Stages)), (Some(4), Some(1)));
        assert_eq!((flags.number(Means::Nodes), flags.unread.len()), (None, 1));
    }

    #[test]
    fn a_script_that_activates_an_environment_starts_its_python() {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        std::fs::write(bin.join("python"), "").unwrap();
        let script = format!("source {}/activate && python -m sglang.launch_server", bin.display());
        let found = read(&["bash".to_owned(), "-c".to_owned(), script]);
        assert_eq!(found.python_program(), Some(bin.join("python")));
    }

    #[test]
    fn the_options_of_python_are_read_in_every_form() {
        let flags = |text: &str| line(text).python.unwrap();
        assert!(flags("python -I -m sglang.launch_server").isolated);
        assert!(flags("python -uS -m sglang.launch_server").no_site);
        assert!(flags("python -W ignore -Es -m sglang.launch_server").ignores_user_site());
        assert!(!flags("python -m sglang.launch_server -S -I").no_site);
        assert!(!flags("python -X importtime -Wall x.py -I").isolated);
        assert!(flags("python -P x.py").safe_path);
    }

    #[test]
    fn a_flag_is_read_in_every_spelling_and_the_last_one_counts() {
        for (text, ranks) in [
            ("sglang serve --tp 2", Some(2)),
            ("sglang serve --tp=2", Some(2)),
            ("sglang serve --tp-size 4 --tensor-parallel-size=8", Some(8)),
            ("sglang serve --tensor-paral 4", Some(4)),
            ("sglang serve --tp two", None),
            ("sglang serve --tp", None),
        ] {
            assert_eq!(sglang(text).number(Means::Ranks), ranks, "{text}");
        }
        assert!(sglang("sglang serve --enable-flashinfer-allreduce-fusion --tp 2").has(Means::Fusion));
        // Other flags, whose names begin alike.
        assert!(!sglang("sglang serve --enable-flashinfer-autotune").has(Means::Fusion));
        assert!(!sglang("sglang serve --enable-dp-lm-head").has(Means::DpAttention));
    }

    #[test]
    fn vllms_spellings_are_read() {
        let line = line(
            "vllm serve m -tp=2 --pipeline_parallel_size 2 -O3 -cc.pass_config.fuse_allreduce_rms=true \
             --compilation_config '{\"pass_config\": {\"fi_allreduce_fusion_max_size_mb\": 64}}'",
        );
        let flags = Flags::of(&line, line.engine.unwrap(), "0.16.0");
        assert_eq!((flags.number(Means::Ranks), flags.number(Means::Stages)), (Some(2), Some(2)));
        assert_eq!(flags.text(Means::Level), Some("3"));
        let all: Vec<_> = flags.all(Means::Compile).collect();
        assert_eq!(all[0], ("pass_config.fuse_allreduce_rms", "true"));
        assert!(all[1].0.is_empty() && all[1].1.starts_with('{'));
    }

    #[test]
    fn a_config_file_is_read_and_the_command_line_wins_over_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("server.yaml");
        let text =
            "# why\ntp-size: 8\nenable-flashinfer-allreduce-fusion: true\nenable-dp-attention: false\nlora-paths:\n  - a\n";
        std::fs::write(&file, text).unwrap();
        let flags = sglang(&format!("sglang serve --config {} --tp 2", file.display()));
        assert_eq!((flags.number(Means::Ranks), flags.has(Means::Fusion), flags.has(Means::DpAttention)), (Some(2), true, false));
        assert_eq!(flags.unread.len(), 1);
        assert_eq!(sglang("sglang serve --config /nonexistent.yaml").unread.len(), 1);
    }

    #[test]
    fn a_console_script_names_its_python() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("vllm");
        for (text, expected) in [
            ("#!/venv/bin/python3.11\nimport sys\n", Some("/venv/bin/python3.11")),
            ("#!/bin/sh\n'''exec' \"/a b/bin/python\" \"$0\" \"$@\"\n' '''\n", Some("/a b/bin/python")),
            ("#!/usr/bin/env python3\n", Some("python3")),
            ("#!/bin/sh\nexec python\n", None),
            ("\x7fELF", None),
        ] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(interpreter(&file), expected.map(PathBuf::from), "{text}");
        }
    }
}
