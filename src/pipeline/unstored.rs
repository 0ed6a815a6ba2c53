//! A build whose product goes into a file and not into the store, whatever the judge says of it: to be shown to a GPU by a test.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::{Context, Event, Observer, Prepared, Request, check_fit, compile, judge_it, keep_logs, prepare};
use crate::cubin;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::judge::Verdict;
use crate::store::{Store, staged_beside};

/// What was written.
#[derive(Debug)]
pub struct Unstored {
    pub prepared: Prepared,
    pub verdict: Verdict,
    pub sha256: Digest,
    pub bytes: u64,
}

/// Compiles, judges, and writes the product into the file `output`. Asks no store, and leaves nothing in one.
pub fn build_into(output: &Path, request: &Request, context: &Context, observe: Observer) -> Result<Unstored> {
    let prepared = prepare(request, context, observe)?;
    if prepared.basis.retarget.is_none() {
        return Err(Error::usage("only an artifact for tests alone is written past the store").hint("name the GPU with --run-on"));
    }
    check_fit(&prepared)?;
    let staging = Store::open(&context.home)?.staging()?;
    let dir = staging.path().join("build");
    if let Err(error) = compile(request, &prepared, context, &dir, observe) {
        let interrupted = error.exit() == Exit::Interrupted;
        return Err(if interrupted { error } else { keep_logs(error, &prepared, request.jobs, &dir, &context.home) });
    }
    context.memo.save();
    observe(Event::Step("judging".to_owned()));
    let artifact = dir.join(&prepared.plan.artifact);
    let verdict = judge_it(&prepared, &cubin::read(&artifact)?)?;

    let bytes = fs::read(&artifact).map_err(|e| Error::io("read", &artifact, e))?;
    let failed = |e| Error::io("write", output, e);
    let mut staged = staged_beside(output)?;
    staged.write_all(&bytes).map_err(failed)?;
    staged.as_file().set_permissions(Permissions::from_mode(0o755)).map_err(failed)?;
    staged.persist(output).map_err(|error| failed(error.error))?;
    Ok(Unstored { prepared, verdict, sha256: Digest::of(&bytes), bytes: bytes.len() as u64 })
}
