//! The limits under which the fused path is used on SM 12.x: with which ranks, and up to how many tokens.
//!
//! ```toml
//! format = 1
//! workspace_tokens = 2048   # tokens that the engine makes its workspace for [default: the engine's own number]
//!
//! [[ranks]]
//! count = 2                 # GPUs that take part: 2, 4 or 8; counts that are not named stay on the engine's own path
//! max_tokens = 512          # most tokens of a call [default: the engine's own limit]
//! oneshot_tokens = 64       # one-shot up to here, two-shot beyond [default: FlashInfer's own rule]
//! reason = "fused 5.3 µs, NCCL + add + norm 16.0 µs at 3 tokens, `fi-arch bench`"
//! ```

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The format of the policies that this release writes, and the only one that it reads.
pub const FORMAT: u32 = 1;

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    pub format: u32,
    /// Tokens that the engine makes its workspace for; its own number without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_tokens: Option<u32>,
    /// Sorted by count. Rank counts that are not here stay on the engine's own path.
    pub ranks: Vec<Ranks>,
}

/// The limits for one number of ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ranks {
    pub count: u32,
    /// Most tokens of a call; the engine's own limit without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// One-shot up to here, two-shot beyond; FlashInfer's own rule without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oneshot_tokens: Option<u32>,
    /// Why: what was measured, where.
    pub reason: String,
}

impl Default for Policy {
    /// Two ranks, within the engine's own limits. With 4 and 8 over PCIe the fused path was reported to be slower, so those
    /// want a measurement of the machine at hand.
    fn default() -> Self {
        let reason = "reported faster with 2 ranks; with 4 and 8 over PCIe reported slower: measure, then name them in a policy";
        Self {
            format: FORMAT,
            workspace_tokens: None,
            ranks: vec![Ranks { count: 2, max_tokens: None, oneshot_tokens: None, reason: reason.to_owned() }],
        }
    }
}

/// The rank counts that the kernels are made for. FlashInfer's one-shot rule knows no other, 16 neither.
pub const COUNTS: [u32; 3] = [2, 4, 8];

impl Policy {
    /// Reads a policy file.
    pub fn read(path: &Path) -> Result<Self> {
        let within = |error: Error| error.within(format!("{} is no policy", path.display()));
        let bytes = std::fs::read(path).map_err(|error| {
            Error::usage(format!("the policy {} cannot be read", path.display()))
                .because(error)
                .hint("`--policy` names a TOML file; without it the fused path is used with 2 ranks")
        })?;
        let text = String::from_utf8(bytes).map_err(|error| within(Error::usage("it is no text").because(error)))?;
        Self::parse(&text).map_err(within)
    }

    /// Reads the text of a policy file. Its ranks come back sorted by count.
    pub fn parse(text: &str) -> Result<Self> {
        let mut policy: Self = toml_edit::de::from_str(text).map_err(|error| {
            Error::usage("the policy cannot be read")
                .because(error.to_string().trim().to_owned())
                .hint("a policy has `format = 1` and a table `[[ranks]]` with `count` and `reason` for each rank count")
        })?;
        policy.ranks.sort_by_key(|ranks| ranks.count);
        policy.check()?;
        Ok(policy)
    }

    /// Refuses limits that contradict each other, or that FlashInfer cannot keep.
    pub fn check(&self) -> Result<()> {
        if self.format != FORMAT {
            return Err(Error::usage(format!("the policy has format {}", self.format))
                .because(format!("this fi-arch knows format {FORMAT}"))
                .hint(format!("write `format = {FORMAT}`, or use the fi-arch that the policy was made for")));
        }
        if self.workspace_tokens == Some(0) {
            return Err(Error::usage("`workspace_tokens = 0` leaves no room for a single token")
                .hint("leave it out for the engine's own number"));
        }
        if let Some(pair) = self.ranks.windows(2).find(|pair| pair[0].count == pair[1].count) {
            return Err(Error::usage(format!("the policy names {} ranks twice", pair[0].count))
                .because("nobody can say which of the two is meant")
                .hint("keep one `[[ranks]]` for each count"));
        }
        self.ranks.iter().try_for_each(|ranks| ranks.check(self.workspace_tokens))
    }

    /// The policy as the text of a file, which `heading` begins: lines of a comment.
    pub fn to_toml(&self, heading: &[String]) -> String {
        let mut text: String = heading.iter().map(|line| format!("# {line}\n")).collect();
        let body = toml_edit::ser::to_string_pretty(self).expect("a policy is always TOML");
        if !text.is_empty() {
            text.push('\n');
        }
        text + &body
    }

    /// The limits for `count` ranks; none where they stay on the engine's own path.
    pub fn of(&self, count: u32) -> Option<&Ranks> {
        self.ranks.iter().find(|ranks| ranks.count == count)
    }

    /// The rank counts that it admits, for people: `2`, `2 and 4`, `none`.
    pub fn counts(&self) -> String {
        let counts: Vec<String> = self.ranks.iter().map(|ranks| ranks.count.to_string()).collect();
        match counts.split_last() {
            None => "none".to_owned(),
            Some((last, [])) => last.clone(),
            Some((last, before)) => format!("{} and {last}", before.join(", ")),
        }
    }
}

impl Ranks {
    fn check(&self, workspace_tokens: Option<u32>) -> Result<()> {
        let count = self.count;
        if !COUNTS.contains(&count) {
            return Err(Error::usage(format!("the policy names {count} ranks"))
                .because("FlashInfer's kernels and its one-shot rule are made for 2, 4 and 8")
                .hint("other counts stay on the engine's own path; leave them out"));
        }
        if self.reason.trim().is_empty() {
            return Err(Error::usage(format!("the policy gives no reason for {count} ranks"))
                .because("whoever meets it later has to know what was measured, and where")
                .hint("write a line `reason = \"…\"`; `fi-arch bench` writes a whole policy"));
        }
        if self.max_tokens == Some(0) {
            return Err(Error::usage(format!("`max_tokens = 0` for {count} ranks admits no call"))
                .hint("leave out that `[[ranks]]`: counts that are not named stay on the engine's own path"));
        }
        if let (Some(max), Some(workspace)) = (self.max_tokens, workspace_tokens)
            && max > workspace
        {
            return Err(Error::usage(format!(
                "`max_tokens = {max}` for {count} ranks is above `workspace_tokens = {workspace}`"
            ))
            .because("a call with more tokens than its workspace has room for writes outside of it")
            .hint(format!("raise workspace_tokens to {max}, or lower max_tokens to {workspace}")));
        }
        if let (Some(oneshot), Some(max)) = (self.oneshot_tokens, self.max_tokens)
            && oneshot > max
        {
            return Err(Error::usage(format!("`oneshot_tokens = {oneshot}` for {count} ranks is above `max_tokens = {max}`"))
                .because("no call with so many tokens takes the fused path at all")
                .hint(format!("write `oneshot_tokens = {max}` where all of them are to be one-shot")));
        }
        if let Some(oneshot) = self.oneshot_tokens.filter(|oneshot| *oneshot < count) {
            return Err(Error::usage(format!("`oneshot_tokens = {oneshot}` is below the {count} ranks that it is for"))
                .because(format!("two-shot deals tokens out to the ranks: FlashInfer refuses it with {count} tokens or fewer"))
                .hint(format!("write `oneshot_tokens = {count}` at least")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "format = 1\n[[ranks]]\ncount = 2\nreason = \"measured\"\n";

    #[test]
    fn a_policy_is_read_whole_and_sorted_by_count() {
        let text = "format = 1\nworkspace_tokens = 2048\n\
            [[ranks]]\ncount = 4\nmax_tokens = 64\noneshot_tokens = 64\nreason = \"b\"\n\
            [[ranks]]\ncount = 2\nmax_tokens = 2048\noneshot_tokens = 2\nreason = \"a\"\n";
        let policy = Policy::parse(text).unwrap();
        assert_eq!(policy.ranks.iter().map(|ranks| ranks.count).collect::<Vec<_>>(), [2, 4]);
        assert_eq!(policy.of(4).and_then(|ranks| ranks.max_tokens), Some(64));
        assert_eq!((policy.of(8), policy.counts().as_str()), (None, "2 and 4"));
        assert_eq!(Policy::parse(TWO).unwrap().counts(), "2");
    }

    #[test]
    fn the_default_and_a_policy_that_admits_nothing_are_sound() {
        Policy::default().check().unwrap();
        assert_eq!(Policy::default().counts(), "2");
        assert_eq!(Policy::parse("format = 1\nranks = []\n").unwrap().counts(), "none");
    }

    #[test]
    fn every_limit_that_cannot_be_kept_is_refused_with_a_reason_and_a_hint() {
        let two = |line: &str| format!("{TWO}{line}\n");
        for (text, says) in [
            (String::new(), "missing field"),
            ("format = 1\n".to_owned(), "missing field `ranks`"),
            (TWO.replace("format = 1", "format = 2"), "format 2"),
            (TWO.replace("format = 1", "format = 1\nmax_token = 3"), "max_token"),
            (TWO.replace("format = 1", "format = 1\nworkspace_tokens = 0"), "no room"),
            (TWO.replace("format = 1", "format = 1\nworkspace_tokens = -1"), "workspace_tokens"),
            (TWO.replace("count = 2", "count = 16"), "16 ranks"),
            (TWO.replace("count = 2", "count = 1"), "1 ranks"),
            (TWO.replace("measured", " "), "no reason"),
            (TWO.replace("reason = \"measured\"\n", ""), "missing field `reason`"),
            (format!("{TWO}[[ranks]]\ncount = 2\nreason = \"again\"\n"), "twice"),
            (two("max_tokens = 0"), "admits no call"),
            (two("max_tokens = 64\noneshot_tokens = 65"), "above `max_tokens = 64`"),
            (two("oneshot_tokens = 1"), "below the 2 ranks"),
            (two("max_tokens = 64").replace("format = 1", "format = 1\nworkspace_tokens = 63"), "above `workspace_tokens = 63`"),
        ] {
            let error = Policy::parse(&text).expect_err(&text);
            assert_eq!(error.exit() as u8, 2, "{text}");
            assert!(error.to_string().contains(says), "`{says}` is not in {error}");
            assert!(!error.hints().is_empty(), "{error}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut policy = Policy::default();
        policy.ranks[0].max_tokens = Some(512);
        policy.ranks[0].oneshot_tokens = Some(64);
        let text = policy.to_toml(&["measured on \"this\" machine".to_owned()]);
        assert!(text.starts_with("# measured on"), "{text}");
        assert_eq!(Policy::parse(&text).unwrap(), policy, "{text}");
        let none = Policy { ranks: Vec::new(), ..policy };
        assert_eq!(Policy::parse(&none.to_toml(&[])).unwrap(), none, "{}", none.to_toml(&[]));
    }

    #[test]
    fn an_error_names_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "format = 1\n").unwrap();
        let path = file.path().display().to_string();
        assert!(Policy::read(file.path()).unwrap_err().to_string().contains(&path));
        std::fs::write(&file, b"\xff").unwrap();
        assert!(Policy::read(file.path()).unwrap_err().to_string().contains("no text"));
        assert!(Policy::read(&file.path().join("gone")).unwrap_err().to_string().contains("gone"));
    }
}
