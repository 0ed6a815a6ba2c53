//! Overlay and artifact into an environment, and out of it again.

mod byte_code;
mod fit;
mod install;
mod journal;
mod look;
mod originals;
mod package;
mod process;
mod record;
mod run;
pub mod shim;
mod state;
mod status;
mod steps;
mod uninstall;

pub use install::{Asked, Installed, Plan, Planned, Selection, environment, install, plan};
pub use journal::{FOLDER, InPlace, Original, Recovered, Site, peek};
pub use look::{FileFound, FileIs, Found, PackageFound, look, read};
pub use originals::in_place;
pub use package::{Artifact, Package, Served};
pub use process::{Is, Library, Process, Standing, process};
pub use run::{Program, folder as run_folder};
pub use state::{
    ARTIFACT_DIR, ArtifactState, EditState, FILE, FORMAT, FileState, Mode, OVERLAY_DIR, OnMiss, PACKAGE, PackageState, State,
};
pub use status::diff;
pub use uninstall::{FoundFile, TakenBack, uninstall};
