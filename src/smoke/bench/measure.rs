//! Over the workers of `bench`: one crew for each artifact, each point measured by all of them in turn.

use std::path::PathBuf;
use std::time::Duration;

use super::plan::{Point, Way};
use super::protocol::{Answer, Order};
use crate::error::{Error, Result};
use crate::smoke::ffi::driver::LinkInfo;
use crate::smoke::protocol::{Answer as Said, Order as Ordered, Outcome};
use crate::smoke::quantiles::slowest;
use crate::smoke::reference::Distance;
use crate::smoke::supervise::{GRACE, Gone, START, Supervisor, said};

/// How long a worker may take to make inputs, or to hold outputs against the reference, beside the time of the GPU.
const HOST: Duration = Duration::from_secs(120);
/// After so many lost sets of workers nothing more is measured: each costs a deadline and a start.
const LOST_AT_MOST: usize = 3;

/// What a crew compares the fused calls with.
#[derive(Debug, Clone)]
pub struct Rival {
    pub nccl: PathBuf,
    /// Our kernels that add and norm, compiled.
    pub norm: PathBuf,
    /// The GPUs whose links are told.
    pub gpus: Vec<usize>,
}

/// What was found about NCCL, and the links between the GPUs.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    pub nccl: Option<String>,
    pub links: Vec<LinkInfo>,
}

/// The workers of one artifact.
pub struct Crew {
    supervisor: Supervisor,
    deadline: Duration,
    rival: Rival,
    /// How many of the workers have loaded what `bench` needs.
    ready: usize,
    /// The number of ranks of the communicator.
    joined: Option<usize>,
    lost: usize,
    pub loaded: Loaded,
}

/// A leg: one way, measured once.
#[derive(Debug, Clone, PartialEq)]
pub struct Leg {
    pub way: Way,
    /// Of each replay, for all timed calls, the slowest rank's, in microseconds.
    pub micros: Vec<f64>,
    pub distance: Distance,
    /// The kernels in the graph, with how often each stands there.
    pub kernels: Vec<(String, usize)>,
    /// Our norm started before NCCL's kernel had ended.
    pub overlaps: bool,
}

/// What a leg came to.
#[derive(Debug, Clone, PartialEq)]
pub enum Came {
    Measured(Leg),
    /// Wrong numbers, a wrong graph, an error or a hang.
    Fault(String),
    /// It was left out, since an earlier leg took the workers with it.
    Left(String),
}

impl Crew {
    pub fn new(supervisor: Supervisor, deadline: Duration, rival: Rival) -> Self {
        Self { supervisor, deadline, rival, ready: 0, joined: None, lost: 0, loaded: Loaded::default() }
    }

    /// Why nothing more is measured with this crew.
    pub fn is_spent(&self) -> Option<String> {
        (self.lost >= LOST_AT_MOST).then(|| format!("workers were lost {} times", self.lost))
    }

    /// Ends the workers in order. Whatever is measured next has new ones: other processes, with their memory elsewhere.
    pub fn stand_down(&mut self) {
        self.supervisor.finish();
        self.supervisor.dismiss("their turn is over");
        (self.ready, self.joined) = (0, None);
    }

    /// Starts the workers of so many ranks, has them load everything and join a communicator.
    pub fn prepare(&mut self, ranks: usize) -> Result<Option<String>> {
        let done = self.try_prepare(ranks);
        self.settle(done).map(Result::err)
    }

    /// Lays out a point; what went wrong, if anything.
    pub fn begin(&mut self, point: &Point, seed: u64, shared_bytes: usize) -> Result<Option<String>> {
        let done = self.try_begin(point, seed, shared_bytes);
        self.settle(done).map(Result::err)
    }

    /// Measures one way through the point that was begun.
    pub fn leg(&mut self, point: &Point, way: Way, warm_up: u32, replays: u32) -> Result<Came> {
        if self.ready < point.ranks {
            return Ok(Came::Left("the workers were lost in an earlier leg".to_owned()));
        }
        let done = self.try_leg(point, way, warm_up, replays);
        Ok(self.settle(done)?.unwrap_or_else(Came::Fault))
    }

    /// What ends the whole run is an error; lost workers are a text, and are started anew when they are next needed.
    fn settle<T>(&mut self, done: Result<T, Gone>) -> Result<Result<T, String>> {
        match done {
            Ok(value) => Ok(Ok(value)),
            Err(Gone::Never(error)) => Err(error),
            Err(Gone::Lost(how)) => {
                (self.ready, self.joined) = (0, None);
                self.lost += 1;
                Ok(Err(how))
            }
        }
    }

    fn try_prepare(&mut self, ranks: usize) -> Result<(), Gone> {
        self.supervisor.staff(ranks)?;
        let first = self.ready;
        for at in first..ranks {
            let Rival { nccl, norm, gpus } = self.rival.clone();
            self.supervisor.order_one(at, &Ordered::Bench(Order::Load { nccl, norm, gpus }));
        }
        if first < ranks {
            for answer in self.supervisor.gather_within(first..ranks, START)? {
                match answer {
                    Said::Bench(Answer::Loaded { nccl, links }) => self.loaded = Loaded { nccl: Some(nccl), links },
                    Said::Lacks(why) => {
                        return Err(Gone::Never(
                            Error::machine("what the fused path is compared with cannot be used here")
                                .because(why)
                                .hint("--nccl names another; the libraries of torch's environment (--env DIR) belong together"),
                        ));
                    }
                    other => return Err(self.supervisor.dismiss(&said(&other))),
                }
            }
            self.ready = ranks;
        }
        if self.joined == Some(ranks) {
            return Ok(());
        }
        self.supervisor.order_one(0, &Ordered::Bench(Order::Unique));
        let id = match self.supervisor.gather_within(0..1, START)?.pop() {
            Some(Said::Bench(Answer::Unique { id })) => id,
            other => return Err(self.supervisor.dismiss(&other.map_or_else(String::new, |other| said(&other)))),
        };
        self.supervisor.order(ranks, |rank| Ordered::Bench(Order::Join { id: id.clone(), rank, ranks }));
        for answer in self.supervisor.gather_within(0..ranks, START)? {
            if !matches!(answer, Said::Bench(Answer::Joined)) {
                return Err(self.supervisor.dismiss(&said(&answer)));
            }
        }
        self.joined = Some(ranks);
        Ok(())
    }

    fn try_begin(&mut self, point: &Point, seed: u64, shared_bytes: usize) -> Result<(), Gone> {
        let begin = |rank| Ordered::Bench(Order::Begin { point: *point, seed, rank, shared_bytes });
        self.supervisor.order(point.ranks, begin);
        for answer in self.supervisor.gather_within(0..point.ranks, self.deadline + HOST)? {
            if !matches!(answer, Said::Bench(Answer::Begun)) {
                return Err(self.supervisor.dismiss(&said(&answer)));
            }
        }
        Ok(())
    }

    fn try_leg(&mut self, point: &Point, way: Way, warm_up: u32, replays: u32) -> Result<Came, Gone> {
        let mut leg = Leg { way, micros: Vec::new(), distance: Distance::default(), kernels: Vec::new(), overlaps: false };
        match self.all(point.ranks, &Order::Capture { way }, HOST)? {
            Ok(answers) => {
                for answer in answers {
                    if let Answer::Captured { kernels, overlaps } = answer {
                        leg.kernels = kernels;
                        leg.overlaps = overlaps;
                    }
                }
            }
            Err(fault) => return Ok(Came::Fault(fault)),
        }
        if let Some(fault) = self.check(point, &mut leg)? {
            return Ok(Came::Fault(fault));
        }
        let mut ranks = Vec::new();
        match self.all(point.ranks, &Order::Time { warm_up, replays }, GRACE)? {
            Ok(answers) => {
                ranks.extend(answers.into_iter().filter_map(|answer| match answer {
                    Answer::Timed { micros } => Some(micros),
                    _ => None,
                }));
            }
            Err(fault) => return Ok(Came::Fault(fault)),
        }
        // The graph that was timed computes right numbers still.
        if let Some(fault) = self.check(point, &mut leg)? {
            return Ok(Came::Fault(format!("after {} replays: {fault}", warm_up + replays)));
        }
        leg.micros = slowest(&ranks);
        Ok(Came::Measured(leg))
    }

    /// What is wrong with the numbers, if anything.
    fn check(&mut self, point: &Point, leg: &mut Leg) -> Result<Option<String>, Gone> {
        let answers = match self.all(point.ranks, &Order::Check, HOST)? {
            Ok(answers) => answers,
            Err(fault) => return Ok(Some(fault)),
        };
        for answer in answers {
            if let Answer::Checked { error, of_bound, wrong } = answer {
                if wrong.is_some() {
                    return Ok(wrong);
                }
                leg.distance = leg.distance.max(Distance { relative: error, of_bound });
            }
        }
        Ok(None)
    }

    /// The answers of all ranks to one order. A graph or a call that is wrong is a text, after which workers go on.
    fn all(&mut self, ranks: usize, order: &Order, patience: Duration) -> Result<Result<Vec<Answer>, String>, Gone> {
        self.supervisor.order(ranks, |_| Ordered::Bench(order.clone()));
        let mut found = Vec::with_capacity(ranks);
        let mut fault = None;
        for answer in self.supervisor.gather_within(0..ranks, self.deadline + patience)? {
            match answer {
                Said::Bench(answer) if answers(&answer, order) => found.push(answer),
                Said::Skipped(why) | Said::Ended(Outcome { wrong: Some(why), .. }) => fault = Some(why),
                other => return Err(self.supervisor.dismiss(&said(&other))),
            }
        }
        Ok(match fault {
            Some(fault) => Err(fault),
            None => Ok(found),
        })
    }
}

/// Whether an answer is one to this order.
fn answers(answer: &Answer, order: &Order) -> bool {
    matches!(
        (order, answer),
        (Order::Capture { .. }, Answer::Captured { .. })
            | (Order::Check, Answer::Checked { .. })
            | (Order::Time { .. }, Answer::Timed { .. })
    )
}
