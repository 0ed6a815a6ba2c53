//! Overlay and artifact into an environment, and out of it again.

mod byte_code;
mod fit;
mod install;
mod journal;
mod look;
mod originals;
mod package;
mod record;
pub mod shim;
mod state;
mod steps;
mod uninstall;

pub use install::{Asked, Installed, Plan, Planned, Selection, environment, install, plan, word};
pub use journal::{FOLDER, InPlace, Original, Recovered, Site, peek};
pub use look::{FileFound, FileIs, Found, PackageFound, look, read};
pub use package::{Artifact, Package, Served};
pub use state::{
    ARTIFACT_DIR, ArtifactState, EditState, FILE, FORMAT, FileState, Mode, OVERLAY_DIR, OnMiss, PACKAGE, PackageState, State,
};
pub use uninstall::{FoundFile, TakenBack, uninstall};
