//! fi-arch makes FlashInfer's JIT modules work on GPUs that the installed FlashInfer does not list,
//! proves that they work, and ships the result.
//!
//! The map of the crate, in the order in which its parts may depend on each other (a part uses only parts above it):
//!
//! | part | what it is |
//! | --- | --- |
//! | [`exit`], [`error`], [`mod@env`], [`cancel`], [`digest`], [`memo`] | exit codes, the one error type, environment variables, Ctrl-C, SHA-256, remembered digests |
//! | [`target`] | SM targets: parsing, family rules, what an nvcc can emit |
//! | [`policy`] | the limits under which the fused path is used |
//! | [`tables`] | `arch-tables/` read into types; look-up by digest and release |
//! | [`survey`] | what is on this machine; knows nothing of gates |
//! | [`sites`] | finds gates and defects in files; changes nothing |
//! | [`overlay`] | sites + edits → post-images |
//! | [`build`] | toolchain, provisioning, plan, compile scheduler |
//! | [`releases`] | holds the tables against released wheels, drafts the rows of a new release |
//! | [`cubin`] | fat binaries, ELF, SASS marks → inventory; needs no CUDA toolkit, knows nothing of FlashInfer |
//! | [`judge`] | inventory + linkage → verdict |
//! | [`store`] | key, manifest, lock, publish, gc, bundles |
//! | [`pipeline`] | the one place that knows build, judge and store: look up, lock, compile, judge, publish, explain; export and import |
//! | [`activate`] | overlay plus artifact into an environment, and out of it again |
//! | [`verify`] | what is wrong in an environment, and what FlashInfer would load in it; `doctor` stands on it |
//! | [`smoke`] | runs an artifact on GPUs and holds its numbers against a reference; `bench` measures it |
//! | [`cli`] | one file a verb; human and JSON output; no logic of its own |

pub mod cancel;
pub mod digest;
pub mod env;
pub mod error;
pub mod exit;
pub mod memo;

pub mod target;

pub mod policy;

pub mod tables;

pub mod survey;

pub mod sites;

pub mod overlay;

pub mod build;

pub mod releases;

pub mod cubin;

pub mod judge;

pub mod store;

pub mod pipeline;

pub mod activate;

pub mod verify;

pub mod smoke;

pub mod cli;
