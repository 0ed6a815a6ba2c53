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

impl Policy {
    /// Reads the text of a policy file.
    pub fn parse(text: &str) -> Result<Self> {
        let policy: Self = toml_edit::de::from_str(text)
            .map_err(|error| Error::usage("the policy cannot be read").because(error.to_string().trim().to_owned()))?;
        Ok(policy)
    }
}
