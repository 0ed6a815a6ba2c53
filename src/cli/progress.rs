//! Progress of long work, on stderr: moving bars on a terminal, one line a step elsewhere, nothing with `--json` on a pipe.

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressStyle};

use super::output::Output;
use crate::build::compile::JobStatus;
use crate::pipeline::Event;

/// Shows events of the pipeline as they come.
pub struct Progress {
    bars: Option<MultiProgress>,
    step: Option<ProgressBar>,
    jobs: Vec<ProgressBar>,
    /// Jobs whose end was told already, where there are no bars.
    told: BTreeSet<String>,
    quiet: bool,
}

impl Progress {
    pub fn new(output: &Output) -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self {
            bars: terminal.then(MultiProgress::new),
            step: None,
            jobs: Vec::new(),
            told: BTreeSet::new(),
            quiet: output.is_json() && !terminal,
        }
    }

    pub fn event(&mut self, event: Event) {
        match event {
            Event::Step(text) => self.begin(&text),
            Event::Warning(text) => self.warn(&text),
            Event::Jobs(status) => self.show(status),
        }
    }

    /// Tells a warning in every mode: it is for people, and stderr is theirs.
    pub fn warn(&self, text: &str) {
        match &self.bars {
            Some(bars) => drop(bars.println(format!("warning: {text}"))),
            None => eprintln!("warning: {text}"),
        }
    }

    /// Removes the bars, so that a result or an error stands alone.
    pub fn finish(&mut self) {
        if let Some(bars) = &self.bars {
            let _ = bars.clear();
        }
        self.step = None;
        self.jobs.clear();
    }

    fn begin(&mut self, text: &str) {
        let Some(bars) = &self.bars else {
            if !self.quiet {
                eprintln!("{text} …");
            }
            return;
        };
        for bar in self.jobs.drain(..).chain(self.step.take()) {
            bar.finish_and_clear();
        }
        let bar = bars.add(spinner("{spinner} {msg} {elapsed:.dim}"));
        bar.set_message(text.to_owned());
        self.step = Some(bar);
    }

    fn show(&mut self, status: &[JobStatus]) {
        let Some(bars) = &self.bars else {
            for job in status.iter().filter(|job| job.done && self.told.insert(job.label.clone())) {
                if !self.quiet {
                    eprintln!("  {} compiled in {}", job.label, HumanDuration(job.elapsed));
                }
            }
            return;
        };
        while self.jobs.len() < status.len() {
            self.jobs.push(bars.add(spinner("  {msg}")));
        }
        for (bar, job) in self.jobs.iter().zip(status) {
            let mark = if job.done { "✓" } else { " " };
            bar.set_message(format!("{mark} {:32} {:13} {:>4} s", job.label, job.stage, job.elapsed.as_secs()));
        }
    }
}

fn spinner(template: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}
