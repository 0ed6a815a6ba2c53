//! The first real error in a compiler's output, and what to do about it. Pure text work.

/// What the output of a failed command says.
#[derive(Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// The first line that is an error, not its consequence; None when the output has none.
    pub first_error: Option<String>,
    pub hint: Option<&'static str>,
}

/// Causes that look alike to a user, by a text in the output: the first match wins.
const HINTS: &[(&str, &str)] = &[
    ("No space left on device", "free some disk space, or set FI_ARCH_HOME to a folder on another disk"),
    ("Disk quota exceeded", "free some of your quota, or set FI_ARCH_HOME to a folder on another disk"),
    (
        "unsupported GNU version",
        "this nvcc does not know the host compiler: set CXX to an older g++ (CUDA's installation guide lists them)",
    ),
    (
        "unsupported clang version",
        "this nvcc does not know the host compiler: set CXX to a g++ that CUDA's installation guide lists",
    ),
    ("Unsupported gpu architecture", "this nvcc is too old for the target: name a newer toolkit with --toolkit DIR"),
    (
        "is not defined for option 'gpu-name'",
        "ptxas and nvcc are of different releases: name one whole toolkit with --toolkit DIR",
    ),
    (
        "cannot find -lcudart",
        "the toolkit has no libcudart to link: install its runtime package, or name another with --toolkit DIR",
    ),
    ("cannot find -lcuda", "no libcuda to link: fi-arch does not need it; report the command in the log"),
    ("out of memory", "the compiler ran out of memory: run again with --jobs 1"),
    ("cannot allocate memory", "the compiler ran out of memory: run again with --jobs 1"),
    (
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "the compiler ran out of memory: run again with --jobs 1",
    ),
    (
        "not supported on .target 'sm_90a'",
        "sm_90a lacks this instruction; --run-on replaces the conversion to FP4 alone, so this code cannot be run there",
    ),
    ("No such file or directory", "a header or tool is missing: the toolkit or the FlashInfer on this machine is incomplete"),
    ("catastrophic error", "the compiler gave up at the line above; the full log has its context"),
];

/// Reads the output of a failed command. `signal` is the signal that ended it, if one did.
pub fn diagnose(output: &str, signal: Option<i32>) -> Diagnosis {
    let first_error = output.lines().map(str::trim).find(|line| is_error(line)).map(ToOwned::to_owned);
    let lower = output.to_ascii_lowercase();
    let by_text = HINTS.iter().find(|(text, _)| lower.contains(&text.to_ascii_lowercase())).map(|(_, hint)| *hint);
    // SIGKILL without a word is how the kernel's out-of-memory killer looks from here; nvcc reports a killed child by name.
    let killed = signal == Some(9) || lower.contains("killed") || lower.contains("signal 9");
    let hint = if killed && (first_error.is_none() || by_text.is_none()) {
        Some(
            "something killed the compiler, most likely for memory: run again with --jobs 1, or raise the container's memory limit",
        )
    } else {
        by_text
    };
    Diagnosis { first_error, hint }
}

fn is_error(line: &str) -> bool {
    // `file(12): error: …`, `file:3:4: error: …`, `file: fatal error: …`, `nvcc fatal   : …`, `ptxas fatal   : …`,
    // `ptxas error   : …`, `ptxas /tmp/x.ptx, line 7; error   : …`, `/usr/bin/ld: cannot find …`, `… undefined reference to …`
    let tools = ["nvcc", "ptxas", "fatbinary", "nvlink", "cicc", "cudafe++", "gcc", "g++", "c++", "cc1plus", "collect2"];
    line.contains("error:")
        || line.contains("error   :")
        || tools.iter().any(|tool| {
            line.strip_prefix(tool)
                .is_some_and(|rest| rest.trim_start().starts_with("fatal") || rest.trim_start().starts_with("error"))
        })
        || line.contains("ld: cannot find")
        || line.contains("undefined reference to")
        || line.contains("catastrophic error")
        || line.ends_with("Killed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_is_shown_not_the_warnings_before_it_or_its_consequences() {
        let log = "a.cu(3): warning #177-D: variable \"x\" was declared but never referenced\n\
                   Remark: The warnings can be suppressed\n\
                   b.cuh(77): error: identifier \"foo\" is undefined\n\
                   b.cuh(78): error: expected a \";\"\n2 errors detected in the compilation of \"a.cu\".\n";
        let diagnosis = diagnose(log, None);
        assert_eq!(diagnosis.first_error.as_deref(), Some("b.cuh(77): error: identifier \"foo\" is undefined"));
    }

    #[test]
    fn faults_that_look_alike_get_their_own_hints() {
        let hint = |log, signal| diagnose(log, signal).hint.unwrap_or("");
        assert!(hint("fatal error: error writing to /x: No space left on device", None).contains("disk"));
        assert!(hint("", Some(9)).contains("memory"));
        assert!(hint("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", None).contains("--jobs 1"));
        assert!(hint("#error -- unsupported GNU version! gcc versions later than 15 are not supported!", None).contains("CXX"));
        assert!(hint("nvcc fatal   : Unsupported gpu architecture 'compute_120f'", None).contains("--toolkit"));
        assert!(hint("a.cu:1:10: fatal error: curand.h: No such file or directory", None).contains("incomplete"));
        assert_eq!(diagnose("nothing to see", Some(1)).hint, None);
    }

    #[test]
    fn errors_of_every_tool_are_seen() {
        for line in [
            "nvcc fatal   : Unknown option '-static-global-template-stub=false'",
            "ptxas fatal   : Ptx assembly aborted due to errors",
            "ptxas /tmp/x.ptx, line 7; error   : Feature 'cvt with .e2m1x2' not supported on .target 'sm_120'",
            "/usr/bin/ld: cannot find -lcudart: No such file or directory",
            "x.o: undefined reference to `foo'",
        ] {
            assert_eq!(diagnose(line, None).first_error.as_deref(), Some(line));
        }
    }
}
