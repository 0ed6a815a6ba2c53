//! The Python package `fi_arch_shim`, and what starts it. Carried in the program.

use std::ffi::OsStr;
use std::path::Path;

/// The package's files, by name. `state.json`, overlay and artifacts come to stand beside them.
pub const FILES: &[(&str, &str)] = &[
    ("__init__.py", include_str!("shim/__init__.py")),
    ("__main__.py", include_str!("shim/__main__.py")),
    ("_artifacts.py", include_str!("shim/_artifacts.py")),
    ("_gpu.py", include_str!("shim/_gpu.py")),
    ("_imports.py", include_str!("shim/_imports.py")),
    ("_limits.py", include_str!("shim/_limits.py")),
    ("_overlay.py", include_str!("shim/_overlay.py")),
    ("_require.py", include_str!("shim/_require.py")),
    ("_specs.py", include_str!("shim/_specs.py")),
];

/// The name of [`PTH`] in site-packages.
pub const PTH_FILE: &str = "fi_arch_shim.pth";
/// Starts the shim. Python wants one line that begins with `import`; this one says by itself what is wrong with a damaged
/// package, and nothing where the package is gone. What it does then stands in it as text, so that no start has to compile it.
pub const PTH: &str = include_str!("shim/fi_arch_shim.pth");

/// The first Python that starts the shim by [`START`] alone: it takes no notice of [`PTH`]'s line any more.
///
/// Python 3.15 to 3.17 take either, and skip [`PTH`] where [`START_FILE`] stands beside it. For them [`PTH`] is the better
/// one: to find the function that [`START`] names, Python imports `pkgutil`, which costs each of its starts 7 ms (measured
/// with 3.15.2), and it tells of a damaged package with a traceback.
pub const START_SINCE: (u32, u32) = (3, 18);
/// The name of [`START`] in site-packages. It must be that of [`PTH_FILE`] but for the ending.
pub const START_FILE: &str = "fi_arch_shim.start";
/// Starts the shim by PEP 829. Python before 3.15 takes no notice of it.
pub const START: &str = include_str!("shim/fi_arch_shim.start");

/// What starts the shim in the site-packages folder `site`: names and texts, the one that makes it active last. A folder that does not
/// tell its Python gets both.
pub fn starters(site: &Path) -> Vec<(&'static str, &'static str)> {
    let minor = |name: &OsStr| name.to_str()?.strip_prefix("python3.")?.trim_end_matches('t').parse::<u32>().ok();
    let python = site.iter().rev().find_map(minor);
    let needs_start = python.is_none_or(|minor| (3, minor) >= START_SINCE);
    needs_start.then_some((START_FILE, START)).into_iter().chain([(PTH_FILE, PTH)]).collect()
}

/// The name of [`SITECUSTOMIZE`] in its folder.
pub const SITECUSTOMIZE_FILE: &str = "sitecustomize.py";
/// Starts the shim for `run`, from the first folder of `PYTHONPATH`, and then runs the `sitecustomize` behind it.
pub const SITECUSTOMIZE: &str = include_str!("shim/sitecustomize.py");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_gets_the_start_that_it_reads_and_the_cheaper_of_two() {
        let names = |site: &str| starters(Path::new(site)).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names("/venv/lib/python3.11/site-packages"), [PTH_FILE]);
        assert_eq!(names("/venv/lib/python3.17t/site-packages"), [PTH_FILE]);
        assert_eq!(names("/venv/lib/python3.18/site-packages"), [START_FILE, PTH_FILE]);
        assert_eq!(names("/usr/lib/python3/dist-packages"), [START_FILE, PTH_FILE]);
    }
}
