//! Bundles: one file that carries an artifact, and all that belongs to it, to machines that build nothing.
//!
//! A bundle is a tar archive under zstd. `tar --zstd -xf` unpacks it anywhere:
//!
//! ```text
//! bundle.json       what it is, under its checksum: format, release, every other file with its size and SHA-256, in order
//! manifest.json     the manifest of the store's entry, under its checksum
//! inputs.json       everything that decided the artifact
//! overlay.json      the files that the overlay changes or adds: path, digest before and after, why
//! LICENSE, NOTICE   whose what is
//! tables/…          the tables that the edits came from
//! overlay/…         the overlay's files as they should be, relative to the folder that holds `flashinfer/`
//! artifact/…        the artifact
//! ```
//!
//! A bundle has one form. Times, owners and modes in the archive are fixed, so equal contents are equal bytes; and each header
//! of the archive is compared with the one that would be written for the same name and size, so that nothing which this
//! release does not write (a link, a device, a path that leads elsewhere, a second file of one name) is even looked at.
//!
//! The hashes prove that a bundle is whole, not who made it: like a wheel, it is to be taken from those whom one trusts.
//!
//! # When the format changes
//! A field that an older fi-arch can do without is added to `bundle.json`, whose unknown fields are skipped. Any other change
//! is a new [`FORMAT`], which older releases refuse by name.

use std::fs::{self, File, Permissions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::entry::{Entry, is_plain_name};
use super::inputs::{self, Inputs, Value};
use super::manifest::{self, FileRecord, Manifest};
use super::{Key, Store};
use crate::build::view::HOST;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::overlay::Overlay;
use crate::tables;

/// The format of the bundles that this release writes, and the only one that it reads.
pub const FORMAT: u32 = 1;

const INDEX: &str = "bundle.json";
const OVERLAY_INDEX: &str = "overlay.json";
const ARTIFACT_DIR: &str = "artifact/";
const OVERLAY_DIR: &str = "overlay/";
const TABLES_DIR: &str = "tables/";

/// Sizes beyond these are no bundle's. They bound what a forged one can take of memory: one artifact, and all else together.
const ARTIFACT_MAX: u64 = 512 << 20;
const TEXT_MAX: u64 = 64 << 20;
const FILES_MAX: usize = 512;
const BLOCK: usize = 512;

/// zstd's level: artifacts are compressed already, and higher levels gain nothing but time.
const LEVEL: i32 = 9;
/// Bytes that unpacking may look back (2^27), as every zstd allows unasked.
const WINDOW_LOG_MAX: u32 = 27;

/// What a bundle holds, every hash checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Bundle {
    /// The FlashInfer that the overlay is for. The artifact may have been built from another with the same sources.
    pub flashinfer: String,
    pub manifest: Manifest,
    pub inputs: Inputs,
    /// Sorted by path.
    pub overlay: Vec<OverlayFile>,
    pub artifact: Vec<u8>,
    /// The tables that the edits came from: file name and text. Kept for people; nothing reads them back.
    pub tables: Vec<(String, Vec<u8>)>,
    /// Whose what is.
    pub notice: String,
}

/// A file of the overlay, as a bundle carries it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayFile {
    /// Relative to the folder that holds `flashinfer/`.
    pub path: String,
    /// The digest of the installed file that it replaces; none for a file that is added.
    pub pre: Option<Digest>,
    pub post: Vec<u8>,
    /// The ids of the defects that are cured here.
    pub edits: Vec<String>,
}

/// The first file of a bundle.
#[derive(Serialize, Deserialize)]
struct Index {
    format: u32,
    /// For people who open one and wonder.
    what: String,
    flashinfer: String,
    key: Key,
    /// Every other file, in order.
    files: Vec<FileRecord>,
}

#[derive(Serialize, Deserialize)]
struct OverlayRow {
    path: String,
    pre: Option<Digest>,
    post: Digest,
    edits: Vec<String>,
}

impl Bundle {
    /// The bundle of a stored artifact and of the overlay that goes with it.
    pub fn of(entry: &Entry, overlay: &Overlay) -> Result<Self> {
        let no_inputs = || {
            Error::refused(format!("the entry {} cannot be exported: its list of inputs is missing or broken", entry.key.short()))
                .hint(format!("remove {} and build again", entry.dir.display()))
        };
        let inputs = entry.inputs().ok_or_else(no_inputs)?;
        let artifact = fs::read(&entry.artifact).map_err(|e| Error::io("read", &entry.artifact, e))?;
        if Digest::of(&artifact) != entry.manifest.artifact.sha256 {
            return Err(Error::refused(format!("{} changed while it was exported", entry.artifact.display())));
        }
        let files = overlay.files.iter().map(|file| OverlayFile {
            path: file.path.clone(),
            pre: file.pre,
            post: file.post.clone(),
            edits: file.edits.clone(),
        });
        Ok(Self {
            flashinfer: overlay.release.clone(),
            manifest: entry.manifest.clone(),
            inputs,
            overlay: files.collect(),
            artifact,
            tables: tables::TEXTS.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect(),
            notice: notice(&entry.manifest),
        })
    }

    /// Reads the bundle in the file `path` and checks it: form, every hash, and that its parts speak of one artifact.
    /// Whether the artifact is what its manifest says is for the judge.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io("read", path, e))?;
        if file.metadata().is_ok_and(|meta| meta.is_dir()) {
            return Err(Error::usage(format!("{} is a folder, not a bundle", path.display())));
        }
        Self::read(BufReader::new(file)).map_err(|error| error.within(format!("{} is not used", path.display())))
    }

    fn read(file: impl io::BufRead) -> Result<Self> {
        let mut archive = Archive::new(file)?;
        let index = archive.index()?;
        let mut files = Vec::new();
        for record in &index.files {
            files.push((record.file.as_str(), archive.next(record)?));
        }
        archive.end()?;
        let mut files = files.into_iter();
        let mut next = |name: &str| match files.next() {
            Some((found, bytes)) if found == name => Ok(bytes),
            _ => Err(broken(format!("{name} is not where it should be"))),
        };

        let manifest = manifest::unseal(&next(manifest::FILE)?).map_err(|why| broken(format!("{}: {why}", manifest::FILE)))?;
        let inputs: Inputs = parse(inputs::FILE, &next(inputs::FILE)?)?;
        let rows: Vec<OverlayRow> = parse(OVERLAY_INDEX, &next(OVERLAY_INDEX)?)?;
        next("LICENSE")?;
        let notice = String::from_utf8(next("NOTICE")?).map_err(|_| broken("NOTICE is no text"))?;
        let mut tables = Vec::new();
        let mut overlay = Vec::new();
        let mut artifact = None;
        for (name, bytes) in files {
            let row = rows.get(overlay.len());
            match (name.strip_prefix(TABLES_DIR), name.strip_prefix(OVERLAY_DIR), name.strip_prefix(ARTIFACT_DIR)) {
                (Some(table), ..) if overlay.is_empty() && artifact.is_none() => tables.push((table.to_owned(), bytes)),
                (_, Some(path), _) if artifact.is_none() && row.is_some_and(|row| row.path == path) => {
                    let OverlayRow { path, pre, post, edits } = &rows[overlay.len()];
                    if Digest::of(&bytes) != *post {
                        return Err(broken(format!("{name} is not what {OVERLAY_INDEX} says")));
                    }
                    overlay.push(OverlayFile { path: path.clone(), pre: *pre, post: bytes, edits: edits.clone() });
                }
                (.., Some(file)) if artifact.is_none() && file == manifest.artifact.file => artifact = Some(bytes),
                _ => return Err(broken(format!("{} does not belong in it", name.escape_debug()))),
            }
        }
        let artifact = artifact.ok_or_else(|| broken("it holds no artifact"))?;
        if overlay.len() != rows.len() {
            return Err(broken("files of its overlay are missing"));
        }
        let bundle = Self { flashinfer: index.flashinfer, manifest, inputs, overlay, artifact, tables, notice };
        bundle.speaks_of_one_artifact(&index.key)?;
        Ok(bundle)
    }

    /// Manifest, inputs, overlay and artifact must be those of one build.
    fn speaks_of_one_artifact(&self, key: &Key) -> Result<()> {
        let Self { manifest, inputs, artifact, overlay, .. } = self;
        if manifest.format != manifest::FORMAT {
            return Err(newer(format!(
                "its manifest has format {}, and this fi-arch knows {}",
                manifest.format,
                manifest::FORMAT
            )));
        }
        if !is_plain_name(&manifest.artifact.file) {
            return Err(broken(format!("`{}` is no name for an artifact", manifest.artifact.file.escape_debug())));
        }
        if (manifest.artifact.sha256, manifest.artifact.bytes) != (Digest::of(artifact), artifact.len() as u64) {
            return Err(broken("the artifact is not the one that the manifest describes"));
        }
        let record = |record: &FileRecord| {
            let text = inputs.to_text();
            (record.file == inputs::FILE) && (record.sha256, record.bytes) == (Digest::of(text.as_bytes()), text.len() as u64)
        };
        if !manifest.inputs.as_ref().is_some_and(record) {
            return Err(broken("the list of inputs is not the one that the manifest describes"));
        }
        if (manifest.key, manifest.request) != (inputs.key(), inputs.request.key()) || manifest.key != *key {
            return Err(broken("its inputs do not make the key that it is filed under"));
        }
        let said = |name: &str| match inputs.request.values(name).next() {
            Some(Value::Text(text)) => text.clone(),
            _ => String::new(),
        };
        for (name, value) in [("module", &manifest.module), ("target", &manifest.target), ("nvcc", &manifest.nvcc)] {
            if said(name) != *value {
                return Err(broken(format!("the manifest says {name} {value}, and the inputs {}", said(name))));
            }
        }
        let of_overlay = inputs.request.iter().filter(|field| field.name.starts_with("overlay ")).collect::<Vec<_>>();
        let data: Vec<_> = overlay.iter().filter_map(|file| Some((file.path.strip_prefix("flashinfer/data/")?, file))).collect();
        let same = of_overlay.len() == data.len()
            && of_overlay.iter().zip(&data).all(|(field, (path, file))| {
                field.name == format!("overlay {path}") && field.value == Value::Digest(Digest::of(&file.post))
            });
        if !same {
            return Err(broken("its overlay is not the one that the artifact was built with"));
        }
        if let Some(input) = inputs.files.iter().find(|input| !is_sound_place(&input.file.root, &input.file.path)) {
            return Err(broken(format!("`{}` is no place of an input", input.file.path.escape_debug())));
        }
        Ok(())
    }

    /// Writes the bundle into the file `path`, whole or not at all, in place of what is there. Returns its digest and size.
    pub fn write(&self, path: &Path) -> Result<(Digest, u64)> {
        let failed = |e| Error::io("write", path, e);
        let mut staged = staged_beside(path)?;
        let mut hashing = Hashing { to: BufWriter::new(staged.as_file_mut()), hash: sha2::Sha256::default(), bytes: 0 };
        self.pack(&mut hashing).and_then(|()| hashing.to.flush()).map_err(failed)?;
        let (digest, bytes) = (Digest(sha2::Digest::finalize(hashing.hash.clone()).into()), hashing.bytes);
        drop(hashing);
        staged.as_file().set_permissions(Permissions::from_mode(0o644)).map_err(failed)?;
        staged.as_file().sync_all().map_err(failed)?;
        staged.persist(path).map_err(|error| Error::io("write", path, error.error))?;
        Ok((digest, bytes))
    }

    fn pack(&self, to: &mut dyn Write) -> io::Result<()> {
        let rows = self.overlay.iter().map(|file| OverlayRow {
            path: file.path.clone(),
            pre: file.pre,
            post: Digest::of(&file.post),
            edits: file.edits.clone(),
        });
        let manifest = manifest::seal(serde_json::to_value(&self.manifest).expect("a manifest is always JSON"));
        let inputs = self.inputs.to_text();
        let rows = pretty(&rows.collect::<Vec<_>>());
        let mut files: Vec<(String, &[u8])> = vec![
            (manifest::FILE.to_owned(), manifest.as_bytes()),
            (inputs::FILE.to_owned(), inputs.as_bytes()),
            (OVERLAY_INDEX.to_owned(), rows.as_bytes()),
            ("LICENSE".to_owned(), include_str!("../../LICENSE").as_bytes()),
            ("NOTICE".to_owned(), self.notice.as_bytes()),
        ];
        files.extend(self.tables.iter().map(|(name, text)| (format!("{TABLES_DIR}{name}"), text.as_slice())));
        files.extend(self.overlay.iter().map(|file| (format!("{OVERLAY_DIR}{}", file.path), file.post.as_slice())));
        files.push((format!("{ARTIFACT_DIR}{}", self.manifest.artifact.file), &self.artifact));

        let index = Index {
            format: FORMAT,
            what: format!(
                "{} of FlashInfer {} for {}, built and proven by fi-arch; `fi-arch cache import FILE` takes it in",
                self.manifest.module, self.flashinfer, self.manifest.target
            ),
            flashinfer: self.flashinfer.clone(),
            key: self.manifest.key,
            files: files
                .iter()
                .map(|(name, bytes)| FileRecord { file: name.clone(), sha256: Digest::of(bytes), bytes: bytes.len() as u64 })
                .collect(),
        };
        let index = manifest::seal(serde_json::to_value(index).expect("an index is always JSON"));
        let mut encoder = zstd::Encoder::new(to, LEVEL)?;
        encoder.include_checksum(true)?;
        let mut archive = tar::Builder::new(encoder);
        for (name, bytes) in std::iter::once((INDEX.to_owned(), index.as_bytes())).chain(files) {
            archive.append(&header(&name, bytes.len() as u64)?, bytes)?;
        }
        archive.into_inner()?.finish()?.flush()
    }

    /// Puts the artifact into the store, with what its builders need to find it there. Also returns whether it was new.
    pub fn publish(&self, store: &Store) -> Result<(Entry, bool)> {
        let key = self.manifest.key;
        let known = store.check(&key).is_ok();
        let staging = store.staging()?;
        let artifact = staging.path().join("bundled.so");
        fs::write(&artifact, &self.artifact).map_err(|e| Error::io("write", &artifact, e))?;
        let entry = store.publish(&key, &artifact, &self.manifest, Some(&self.inputs))?;
        store.remember_closure(&self.manifest.request, &self.inputs.closure())?;
        Ok((entry, !known))
    }
}

/// An unnamed beginning of the file `path`, in the same folder. Fails where `path` could not be written in the end.
pub fn staged_beside(path: &Path) -> Result<tempfile::NamedTempFile> {
    if path.is_dir() {
        return Err(Error::usage(format!("{} is a folder; name the file to write", path.display())));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    tempfile::NamedTempFile::new_in(folder).map_err(|e| Error::io("write", path, e))
}

/// The one header that a file of this name and size has in a bundle.
fn header(name: &str, bytes: u64) -> io::Result<tar::Header> {
    let mut header = tar::Header::new_ustar();
    header.set_path(name)?;
    header.set_size(bytes);
    header.set_mode(0o644);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_cksum();
    Ok(header)
}

/// Reads an archive file by file, each against what was said of it. Takes no more memory than it has really read.
struct Archive<R: io::BufRead> {
    from: zstd::Decoder<'static, R>,
}

impl<R: io::BufRead> Archive<R> {
    fn new(file: R) -> Result<Self> {
        let mut from = zstd::Decoder::with_buffer(file).map_err(damaged)?.single_frame();
        from.window_log_max(WINDOW_LOG_MAX).map_err(damaged)?;
        Ok(Self { from })
    }

    /// The first file. It is read by the size in its own header, since nothing has spoken of it yet.
    fn index(&mut self) -> Result<Index> {
        let mut block = [0; BLOCK];
        self.from.read_exact(&mut block).map_err(|e| damaged(e).because("it does not begin like a bundle"))?;
        let found = tar::Header::from_byte_slice(&block);
        let bytes = found.entry_size().map_err(|_| broken("it is no tar archive"))?;
        self.expect(&block, INDEX, bytes)?;
        if bytes > TEXT_MAX {
            return Err(broken(format!("{INDEX} would have {bytes} bytes")));
        }
        let text = self.content(INDEX, bytes)?;
        let value = manifest::unseal_value(&text).map_err(|why| broken(format!("{INDEX}: {why}")))?;
        match value["format"].as_u64() {
            Some(format) if format == u64::from(FORMAT) => {}
            Some(format) => return Err(newer(format!("its format is {format}, and this fi-arch knows {FORMAT}"))),
            None => return Err(broken(format!("{INDEX} names no format"))),
        }
        let index: Index = serde_json::from_value(value).map_err(|e| broken(format!("{INDEX}: {e}")))?;
        if index.files.len() > FILES_MAX {
            return Err(broken(format!("it says that it holds {} files", index.files.len())));
        }
        let mut names: Vec<&str> = index.files.iter().map(|record| record.file.as_str()).collect();
        names.sort_unstable();
        if let Some(name) = names.iter().find(|name| !is_sound_path(name)) {
            return Err(broken(format!("`{}` is no path inside of a bundle", name.escape_debug())));
        }
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(broken(format!("it names {} twice", pair[0].escape_debug())));
        }
        let (artifacts, texts): (Vec<_>, Vec<_>) = index.files.iter().partition(|record| record.file.starts_with(ARTIFACT_DIR));
        let sum = |records: &[&FileRecord]| records.iter().fold(0_u64, |sum, record| sum.saturating_add(record.bytes));
        if artifacts.len() != 1 || sum(&artifacts) > ARTIFACT_MAX || sum(&texts) > TEXT_MAX {
            return Err(broken(format!(
                "it says that it holds {} artifacts of {} bytes and {} bytes of other files, which no bundle does",
                artifacts.len(),
                sum(&artifacts),
                sum(&texts)
            )));
        }
        Ok(index)
    }

    /// The content of the next file, which must be the one of `record`.
    fn next(&mut self, record: &FileRecord) -> Result<Vec<u8>> {
        let name = record.file.escape_debug().to_string();
        let mut block = [0; BLOCK];
        self.from.read_exact(&mut block).map_err(damaged)?;
        self.expect(&block, &record.file, record.bytes)?;
        let content = self.content(&name, record.bytes)?;
        if Digest::of(&content) != record.sha256 {
            return Err(broken(format!("the content of {name} is not what {INDEX} says")));
        }
        Ok(content)
    }

    fn expect(&self, block: &[u8; BLOCK], name: &str, bytes: u64) -> Result<()> {
        let expected = header(name, bytes).map_err(|_| broken(format!("`{}` is no name in a bundle", name.escape_debug())))?;
        if expected.as_bytes() == block {
            return Ok(());
        }
        let found = String::from_utf8_lossy(&tar::Header::from_byte_slice(block).path_bytes()).escape_debug().to_string();
        let what = match tar::Header::from_byte_slice(block).entry_type() {
            tar::EntryType::Regular => "another file",
            tar::EntryType::Symlink | tar::EntryType::Link => "a link",
            tar::EntryType::Directory => "a folder",
            tar::EntryType::Char | tar::EntryType::Block | tar::EntryType::Fifo => "a device",
            _ => "something that no bundle holds",
        };
        Err(broken(format!("where {} should come, there is {what} (`{found}`)", name.escape_debug())))
    }

    fn content(&mut self, name: &str, bytes: u64) -> Result<Vec<u8>> {
        let mut content = Vec::new();
        self.from.by_ref().take(bytes).read_to_end(&mut content).map_err(damaged)?;
        let mut padding = Vec::new();
        let wanted = bytes.next_multiple_of(BLOCK as u64) - bytes;
        self.from.by_ref().take(wanted).read_to_end(&mut padding).map_err(damaged)?;
        if content.len() as u64 != bytes || padding.len() as u64 != wanted {
            return Err(broken(format!("it ends within {name}")));
        }
        if padding.iter().any(|byte| *byte != 0) {
            return Err(broken(format!("there is something behind {name}")));
        }
        Ok(content)
    }

    /// Two empty blocks, and nothing behind them.
    fn end(mut self) -> Result<()> {
        let mut rest = Vec::new();
        self.from.by_ref().take(2 * BLOCK as u64 + 1).read_to_end(&mut rest).map_err(damaged)?;
        let behind = self.from.finish().fill_buf().map_err(damaged)?.len();
        if rest.len() != 2 * BLOCK || rest.iter().any(|byte| *byte != 0) || behind > 0 {
            return Err(broken("there is something behind its last file, or its end is missing"));
        }
        Ok(())
    }
}

/// Whether `path` stays inside of the folder that it is unpacked in, on every system.
fn is_sound_path(path: &str) -> bool {
    !path.is_empty()
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
        && path.bytes().all(|b| b.is_ascii_graphic() && b != b'\\')
}

/// Whether a builder may look for an input there: below its root, or (the host's headers) anywhere but among devices.
fn is_sound_place(root: &str, path: &str) -> bool {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').filter(|part| !matches!(*part, "" | ".")) {
        match part {
            ".." if parts.pop().is_none() => return false,
            ".." => {}
            _ => parts.push(part),
        }
    }
    match root {
        HOST => path.starts_with('/') && parts.first().is_some_and(|top| !matches!(*top, "dev" | "proc" | "sys" | "run")),
        _ => !path.starts_with('/') && !parts.is_empty() && is_plain_name(root),
    }
}

fn parse<T: serde::de::DeserializeOwned>(name: &str, text: &[u8]) -> Result<T> {
    serde_json::from_slice(text).map_err(|error| broken(format!("{name}: {error}")))
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("it is always JSON") + "\n"
}

fn damaged(error: io::Error) -> Error {
    broken("it is cut short, damaged, or no bundle at all").because(error)
}

fn broken(why: impl Into<String>) -> Error {
    Error::refused(why).hint("export or copy the bundle again; nothing of it was taken in")
}

fn newer(why: impl Into<String>) -> Error {
    Error::new(Exit::Unsupported, why)
        .hint("it was made by another release of fi-arch: use that one, or export it anew with this one")
}

/// Passes on what is written, and hashes it.
struct Hashing<W> {
    to: W,
    hash: sha2::Sha256,
    bytes: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        sha2::Digest::update(&mut self.hash, &bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Whose what is, in a bundle with this manifest.
fn notice(manifest: &Manifest) -> String {
    let runtime = match manifest.verdict.needed.iter().find(|name| name.starts_with("libcudart")) {
        Some(name) => format!("is not in it; the artifact loads {name} from the machine that it runs on"),
        None => {
            "is linked in from libcudart_static.a, which the CUDA Toolkit's licence names among what may be passed on".to_owned()
        }
    };
    let Manifest { module, flashinfer, tvm_ffi, nvcc, .. } = manifest;
    format!(
        "This bundle was made by fi-arch {}. Whose what is:

artifact/      The module {module}, compiled from the sources of FlashInfer {flashinfer}: Copyright the FlashInfer team, and for
               what came from TensorRT-LLM and vLLM their own authors, under the Apache License 2.0 (see LICENSE). Changed by
               fi-arch as overlay/ shows. It includes inline code of apache-tvm-ffi {tvm_ffi} (Apache License 2.0), of the
               CUDA {nvcc} headers (NVIDIA, under the CUDA Toolkit's licence; CCCL under Apache License 2.0 with LLVM exception)
               and of the C++ standard library (GPLv3 with GCC runtime exception, or Apache License 2.0 with LLVM exception).
               The CUDA runtime {runtime}.
               The driver's library (libcuda) is never in it.
overlay/       Files of FlashInfer with fi-arch's changes, and headers of fi-arch (below include/fi_arch): Apache License 2.0.
               Each changed file is listed in overlay.json with the digest of its original.
tables/        fi-arch's: Apache License 2.0.
*.json         fi-arch's.
",
        manifest.fi_arch
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_leaves_the_folder_that_a_bundle_is_unpacked_in() {
        for path in ["manifest.json", "overlay/flashinfer/data/include/x.cuh", "tables/flashinfer/modules.toml"] {
            assert!(is_sound_path(path), "{path}");
        }
        for path in ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a/", "a\\b", "a\0b", "a b", "ä"] {
            assert!(!is_sound_path(path), "{path:?}");
        }
    }

    #[test]
    fn no_input_is_looked_for_outside_of_its_root_or_among_devices() {
        for (root, path) in
            [("data", "include/flashinfer/comm/../x.h"), ("cuda", "include/x.h"), ("host", "/usr/include/c++/12/bit")]
        {
            assert!(is_sound_place(root, path), "{root} {path}");
        }
        for (root, path) in [
            ("data", "../x"),
            ("data", "a/../../x"),
            ("cuda", "/etc/x"),
            ("host", "x.h"),
            ("host", "/dev/zero"),
            ("host", "/usr/../dev/zero"),
            ("a/b", "x"),
        ] {
            assert!(!is_sound_place(root, path), "{root} {path}");
        }
    }
}
