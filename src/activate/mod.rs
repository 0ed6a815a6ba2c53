//! Overlay and artifact into an environment, and out of it again.

mod state;

pub use state::{
    ARTIFACT_DIR, ArtifactState, EditState, FILE, FORMAT, FileState, Mode, OVERLAY_DIR, OnMiss, PACKAGE, PackageState, State,
};
