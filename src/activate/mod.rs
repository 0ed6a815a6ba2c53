//! Overlay and artifact into an environment, and out of it again.

mod look;
pub mod shim;
mod state;

pub use look::{FileFound, FileIs, Found, PackageFound, look, read};
pub use state::{
    ARTIFACT_DIR, ArtifactState, EditState, FILE, FORMAT, FileState, Mode, OVERLAY_DIR, OnMiss, PACKAGE, PackageState, State,
};
