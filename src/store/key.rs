//! Keys: SHA-256 over everything that decides a result, and over nothing else.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

use crate::digest::Digest;

/// The name of a result by what decides it. Shown and stored as 64 lower-case hex digits, and in no other spelling,
/// so that a key is always safe as a file name and two names never mean one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Digest);

impl Key {
    /// The first twelve hex digits: enough for people, never for a comparison.
    pub fn short(&self) -> String {
        self.0.short()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Key {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<Digest>() {
            Ok(digest) if digest.to_string() == text => Ok(Self(digest)),
            _ => Err(format!("`{}` is no key (64 lower-case hex digits)", text.escape_debug())),
        }
    }
}

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Collects named fields into a [`Key`].
///
/// Fields are *ordered*: the same fields in another order give another key. A list (flags) goes in as it stands; a set
/// (files of a folder) is sorted by the caller first. Each name and each value is hashed behind its length, so no text
/// can move from one field into its neighbour.
///
/// Callers put in contents and modes: never a path of this machine, never a time stamp.
#[derive(Debug, Clone)]
pub struct KeyBuilder(Sha256);

impl KeyBuilder {
    /// Starts a key of the kind and version `format`, such as `artifact 1`. Keys of two formats never meet.
    pub fn new(format: &str) -> Self {
        let mut builder = Self(Sha256::new());
        builder.part(b"fi-arch key");
        builder.part(format.as_bytes());
        builder
    }

    pub fn text(&mut self, name: &str, value: &str) -> &mut Self {
        self.field(b"text", name, value.as_bytes())
    }

    pub fn digest(&mut self, name: &str, value: Digest) -> &mut Self {
        self.field(b"digest", name, &value.0)
    }

    pub fn finish(self) -> Key {
        Key(Digest(self.0.finalize().into()))
    }

    fn field(&mut self, kind: &[u8], name: &str, value: &[u8]) -> &mut Self {
        self.part(kind);
        self.part(name.as_bytes());
        self.part(value);
        self
    }

    fn part(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(fields: &[(&str, &str)]) -> Key {
        let mut builder = KeyBuilder::new("test 1");
        for (name, value) in fields {
            builder.text(name, value);
        }
        builder.finish()
    }

    #[test]
    fn text_cannot_move_from_one_field_into_its_neighbour() {
        assert_ne!(key(&[("x", "ab"), ("x", "c")]), key(&[("x", "a"), ("x", "bc")]));
        assert_ne!(key(&[("xa", "b")]), key(&[("x", "ab")]));
        assert_ne!(key(&[("x", ""), ("y", "")]), key(&[("x", "y")]));
        assert_ne!(key(&[("x", "a")]), key(&[("x", "a"), ("", "")]));
        assert_eq!(key(&[("x", "a"), ("y", "b")]), key(&[("x", "a"), ("y", "b")]));
    }

    #[test]
    fn order_kind_and_format_are_part_of_a_key() {
        assert_ne!(key(&[("x", "a"), ("y", "b")]), key(&[("y", "b"), ("x", "a")]));
        assert_ne!(KeyBuilder::new("a 1").finish(), KeyBuilder::new("a 2").finish());
        let digest = Digest([b'a'; 32]);
        let mut as_digest = KeyBuilder::new("test 1");
        as_digest.digest("x", digest);
        assert_ne!(as_digest.finish(), key(&[("x", &"a".repeat(32))]));
    }

    /// Every entry in every store is filed under this rule: a change of it strands them all, and must be meant.
    #[test]
    fn keys_stay_the_same_from_release_to_release() {
        let mut builder = KeyBuilder::new("test 1");
        builder.text("target", "sm_120f").digest("source", Digest::of(b"abc"));
        assert_eq!(builder.finish().to_string(), "e52e4cabd98885e0cc89ca0dcae9d09df868cd080998ef5bef3774fccb1b22e0");
    }

    #[test]
    fn only_the_canonical_spelling_is_a_key() {
        let text = key(&[]).to_string();
        assert_eq!(text.parse::<Key>().unwrap(), key(&[]));
        for wrong in [text.to_uppercase(), text[1..].to_owned(), format!("{text}0"), format!("+{}", &text[1..]), "../".repeat(32)]
        {
            assert!(wrong.parse::<Key>().is_err(), "{wrong}");
        }
    }
}
