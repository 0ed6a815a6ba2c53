//! The Python package `fi_arch_shim`, and what starts it. Carried in the program.

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
/// Starts the shim on every Python. Python 3.15 and later skip it where [`START`] stands beside it.
pub const PTH: &str = include_str!("shim/fi_arch_shim.pth");

/// The name of [`START`] in site-packages. It must be that of [`PTH_FILE`] but for the ending.
pub const START_FILE: &str = "fi_arch_shim.start";
/// Starts the shim on Python 3.15 and later (PEP 829); older ones take no notice.
pub const START: &str = include_str!("shim/fi_arch_shim.start");

/// The name of [`SITECUSTOMIZE`] in its folder.
pub const SITECUSTOMIZE_FILE: &str = "sitecustomize.py";
/// Starts the shim for `run`, from the first folder of `PYTHONPATH`, and then runs the `sitecustomize` behind it.
pub const SITECUSTOMIZE: &str = include_str!("shim/sitecustomize.py");
