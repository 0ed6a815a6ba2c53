//! Ctrl-C, SIGTERM and SIGHUP: everything that waits looks here, ends its children, removes its folders, and the process exits with 130.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};
use crate::exit::Exit;

static CANCELLED: AtomicBool = AtomicBool::new(false);

/// From now on a signal asks for an orderly end instead of ending the process at once.
pub fn on_signals() {
    // A second registration in one process (tests) is no failure.
    let _ = ctrlc::set_handler(|| CANCELLED.store(true, Ordering::SeqCst));
}

/// Whether a signal has asked this process to end.
pub fn is_asked() -> bool {
    CANCELLED.load(Ordering::SeqCst)
}

/// An error once a signal has asked this process to end. Call it wherever something is waited for.
pub fn check() -> Result<()> {
    if is_asked() {
        return Err(
            Error::new(Exit::Interrupted, "interrupted").because("a signal asked fi-arch to stop; nothing was left behind")
        );
    }
    Ok(())
}
