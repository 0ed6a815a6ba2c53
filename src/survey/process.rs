//! Programs on `PATH`, and running one with a deadline.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::env;

/// How a program ended and what it printed.
#[derive(Debug)]
pub(crate) struct Ran {
    pub ok: bool,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// The last line that says something: stderr's, else stdout's.
    pub fn last_line(&self) -> String {
        let last = |text: &str| text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned);
        last(&self.stderr).or_else(|| last(&self.stdout)).unwrap_or_else(|| "it said nothing".to_owned())
    }
}

/// Runs `command` without input and collects what it prints. Past `deadline` it is killed, and the error is `TimedOut`.
pub(crate) fn run(command: &mut Command, deadline: Duration) -> io::Result<Ran> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let stdout = read_aside(child.stdout.take());
    let stderr = read_aside(child.stderr.take());
    let end = Instant::now() + deadline;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() >= end {
            let _ = child.kill();
            // Not `wait`: a program stuck in a driver does not die of a kill, and must not hold us.
            std::thread::sleep(Duration::from_millis(10));
            let _ = child.try_wait();
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} s", deadline.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    // A grandchild may keep a pipe open after the child has ended: take what is there, don't wait for it.
    let text = |pipe: mpsc::Receiver<Vec<u8>>| {
        String::from_utf8_lossy(&pipe.recv_timeout(Duration::from_secs(2)).unwrap_or_default()).into_owned()
    };
    Ok(Ran { ok: status.success(), stdout: text(stdout), stderr: text(stderr) })
}

fn read_aside(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    if let Some(mut pipe) = pipe {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            let _ = sender.send(bytes);
        });
    }
    receiver
}

/// Every executable file called `name` on `PATH`, in order, as absolute paths with their symlinks unresolved.
pub(crate) fn on_path(name: impl AsRef<OsStr>) -> Vec<PathBuf> {
    let path = env::var(env::PATH).unwrap_or_default();
    let mut found: Vec<PathBuf> = Vec::new();
    for dir in std::env::split_paths(&path).filter(|dir| !dir.as_os_str().is_empty()) {
        let file = dir.join(name.as_ref());
        if is_executable(&file)
            && let Ok(file) = std::path::absolute(&file)
            && !found.contains(&file)
        {
            found.push(file);
        }
    }
    found
}

/// Whether `path` is a file with an execute permission.
pub(crate) fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Whether `path` starts with `#!`.
pub(crate) fn is_script(path: &Path) -> bool {
    let mut head = [0; 2];
    std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut head)).is_ok() && &head == b"#!"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_hangs_is_killed_at_its_deadline() {
        let start = Instant::now();
        let error = run(Command::new("sleep").arg("30"), Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn output_larger_than_a_pipe_is_read_whole() {
        let ran = run(Command::new("sh").args(["-c", "yes | head -c 300000; echo last >&2"]), Duration::from_secs(10)).unwrap();
        assert_eq!((ran.ok, ran.stdout.len(), ran.last_line().as_str()), (true, 300_000, "last"));
    }
}
