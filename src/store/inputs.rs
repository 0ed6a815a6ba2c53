//! Inputs: everything that decided an artifact, by name. They make its keys, and tell later what has changed since.

use serde::{Deserialize, Serialize};

use super::closure::Closure;
use super::key::{Key, KeyBuilder};
use crate::build::closure::Located;
use crate::build::view::HOST;
use crate::digest::Digest;

/// The file name of the inputs in an entry's folder.
pub const FILE: &str = "inputs.json";

/// The version of the way in which the files' contents make a key.
const ARTIFACT_FORMAT: &str = "fi-arch artifact 1";

/// One named value of a key. Names of places are relative to a root, never paths of a machine.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Field {
    pub name: String,
    #[serde(flatten)]
    pub value: Value,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Value {
    #[serde(rename = "text")]
    Text(String),
    #[serde(rename = "sha256")]
    Digest(Digest),
}

/// Ordered fields and the key that they make: one list for both, so that what is told is what was hashed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fields {
    /// The kind and version of the key; see [`KeyBuilder::new`].
    format: String,
    fields: Vec<Field>,
}

impl Fields {
    pub fn new(format: &str) -> Self {
        Self { format: format.to_owned(), fields: Vec::new() }
    }

    pub fn text(&mut self, name: &str, value: &str) -> &mut Self {
        self.fields.push(Field { name: name.to_owned(), value: Value::Text(value.to_owned()) });
        self
    }

    pub fn digest(&mut self, name: &str, value: Digest) -> &mut Self {
        self.fields.push(Field { name: name.to_owned(), value: Value::Digest(value) });
        self
    }

    /// The kind and version of the key that they make.
    pub fn format(&self) -> &str {
        &self.format
    }

    pub fn key(&self) -> Key {
        let mut key = KeyBuilder::new(&self.format);
        for field in &self.fields {
            match &field.value {
                Value::Text(text) => key.text(&field.name, text),
                Value::Digest(digest) => key.digest(&field.name, *digest),
            };
        }
        key.finish()
    }

    pub fn iter(&self) -> std::slice::Iter<'_, Field> {
        self.fields.iter()
    }

    /// The values of every field called `name`, in order.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Value> {
        self.fields.iter().filter(move |field| field.name == name).map(|field| &field.value)
    }
}

/// A file that the compile read, and its content. A header of the host has an absolute path, by which builders look for it
/// again; the path is no part of a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    #[serde(flatten)]
    pub file: Located,
    pub sha256: Digest,
}

/// All inputs of one artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// What was known before compiling.
    pub request: Fields,
    /// What the compile read, in order of root and path.
    pub files: Vec<Input>,
}

impl Inputs {
    /// The artifact's key: the request, and the content of every file that its compile read.
    pub fn key(&self) -> Key {
        let mut contents: Vec<(String, Digest)> = self.files.iter().map(|input| (key_name(&input.file), input.sha256)).collect();
        contents.sort();
        let mut key = KeyBuilder::new(ARTIFACT_FORMAT);
        key.text("request", &self.request.key().to_string());
        for (name, digest) in contents {
            key.digest(&format!("file {name}"), digest);
        }
        key.finish()
    }

    /// As they stand on disk.
    pub fn to_text(&self) -> String {
        serde_json::to_string_pretty(self).expect("inputs are always JSON") + "\n"
    }

    /// The files without their contents, as the store remembers them.
    pub fn closure(&self) -> Closure {
        Closure { files: self.files.iter().map(|input| input.file.clone()).collect() }
    }
}

/// What a key says of a file's place. The host's headers lie at different places on different machines: only what they say
/// counts.
fn key_name(file: &Located) -> String {
    if file.root == HOST { HOST.to_owned() } else { format!("{}/{}", file.root, file.path) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(files: &[(&str, &str, &str)]) -> Inputs {
        let mut request = Fields::new("test 1");
        request.text("module", "m").digest("source", Digest::of(b"s"));
        let input = |(root, path, content): &(&str, &str, &str)| Input {
            file: Located { root: (*root).into(), path: (*path).into() },
            sha256: Digest::of(content.as_bytes()),
        };
        Inputs { request, files: files.iter().map(input).collect() }
    }

    #[test]
    fn inputs_read_back_make_the_same_keys() {
        let written = inputs(&[("cuda", "include/x.h", "x"), ("host", "/usr/include/y.h", "y")]);
        let text = serde_json::to_string(&written).unwrap();
        let read: Inputs = serde_json::from_str(&text).unwrap();
        assert_eq!(read, written);
        assert_eq!((read.key(), read.request.key()), (written.key(), written.request.key()));
    }

    #[test]
    fn a_host_header_counts_by_its_content_wherever_it_lies_and_no_other_file_does() {
        let key = |files: &[(&str, &str, &str)]| inputs(files).key();
        assert_eq!(key(&[("host", "/usr/include/y.h", "y")]), key(&[("host", "/opt/y.h", "y")]));
        assert_ne!(key(&[("host", "/usr/include/y.h", "y")]), key(&[("host", "/usr/include/y.h", "z")]));
        assert_ne!(key(&[("cuda", "include/x.h", "x")]), key(&[("cuda", "include/z.h", "x")]));
    }
}
