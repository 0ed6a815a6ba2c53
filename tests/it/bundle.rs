//! Bundles: an artifact carried to a machine that builds nothing, whole and unforged, or not at all.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use fi_arch::digest::Digest;
use fi_arch::pipeline;
use fi_arch::store::{Bundle, OverlayFile, seal_manifest};
use serde_json::{Value, json};

use crate::support::sandbox::{Ran, SMALL, Sandbox};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Builds with `args` (a hit) and exports into the sandbox's file `name`.
fn export(sandbox: &Sandbox, name: &str) -> (PathBuf, Value) {
    let file = sandbox.path(name);
    let built = sandbox.build(&[SMALL, &["--export", text(&file)]].concat());
    (file, built)
}

#[test]
fn the_same_artifact_is_exported_as_the_same_bytes_over_whatever_lay_there() {
    let sandbox = Sandbox::with_small_build();
    let (first, built) = export(&sandbox, "first.fia");
    assert_eq!(built["cache"], "hit");
    fs::write(sandbox.path("second.fia"), "something else").unwrap();
    let (second, _) = export(&sandbox, "second.fia");
    let bytes = fs::read(&first).unwrap();
    assert!(bytes == fs::read(second).unwrap());
    assert_eq!(built["export"]["sha256"], Digest::of(&bytes).to_string());
    assert_eq!(built["export"]["bytes"], bytes.len());
}

#[test]
fn what_was_taken_in_elsewhere_is_a_hit_there_and_can_be_handed_on_unchanged() {
    let (one, two) = (Sandbox::with_small_build(), Sandbox::new());
    let (file, built) = export(&one, "a.fia");
    let imported = two.run(&["cache", "import", text(&file), "--json"]).exits(0).json();
    assert_eq!(imported["imported"][0]["key"], built["key"]);
    assert_eq!(imported["imported"][0]["new"], true);
    let (again, hit) = export(&two, "b.fia");
    assert_eq!((&hit["cache"], &hit["key"], &hit["sha256"]), (&json!("hit"), &built["key"], &built["sha256"]));
    assert!(fs::read(file).unwrap() == fs::read(again).unwrap());
    two.run(&["cache", "verify"]).exits(0);
    let again = two.run(&["cache", "import", text(&two.path("b.fia")), "--json"]).exits(0).json();
    assert_eq!(again["imported"][0]["new"], false);
}

/// The command in namespaces of its own: no mount and no network of the machine.
fn unshared() -> Command {
    let ways = [["unshare", "--mount", "--net"].as_slice(), &["unshare", "--mount", "--net", "--map-root-user"]];
    let works = |way: &&&[&str]| Command::new(way[0]).args(&way[1..]).arg("true").status().is_ok_and(|status| status.success());
    let way = ways.iter().find(works).expect("this test needs namespaces: run it as root, or where users may make them");
    let mut command = Command::new(way[0]);
    command.args(&way[1..]);
    command
}

#[test]
fn taking_in_needs_no_nvcc_no_pip_no_network_and_no_system_but_the_c_library() {
    let sandbox = Sandbox::with_small_build();
    let (file, built) = export(&sandbox, "a.fia");
    let root = sandbox.path("root");
    let program = Path::new(env!("CARGO_BIN_EXE_fi-arch"));
    let put = |from: &Path, to: &str| {
        let to = root.join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    };
    put(program, "/fi-arch");
    put(&file, "/a.fia");
    let libraries = Command::new("ldd").arg(program).output().unwrap();
    for path in String::from_utf8(libraries.stdout).unwrap().split_whitespace().filter(|word| word.starts_with('/')) {
        put(Path::new(path), path);
    }
    let mut command = unshared();
    command.arg("chroot").arg(&root).args(["/fi-arch", "cache", "import", "--json", "/a.fia"]);
    let imported =
        Ran::of(command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("FI_ARCH_HOME", "/home")).exits(0);
    assert_eq!(imported.json()["imported"][0]["key"], built["key"]);
    let artifact = root.join(imported.json()["imported"][0]["artifact"].as_str().unwrap().trim_start_matches('/'));
    assert_eq!(Digest::of_file(&artifact).unwrap().to_string(), built["sha256"].as_str().unwrap());
}

#[test]
fn an_export_on_a_full_disk_leaves_the_old_file_and_nothing_else() {
    let sandbox = Sandbox::with_small_build();
    let disk = sandbox.path("disk");
    fs::create_dir(&disk).unwrap();
    let mut command = unshared();
    let script = "mount -t tmpfs -o size=64k none \"$0\" && echo old > \"$0/a.fia\" && \"$@\" >&2; \
                  echo \"$? $(ls -A \"$0\") $(cat \"$0/a.fia\")\"";
    command.args(["sh", "-c", script, text(&disk), env!("CARGO_BIN_EXE_fi-arch"), "build", "--offline", "--export"]);
    command.arg(disk.join("a.fia")).args(SMALL).env("FI_ARCH_HOME", sandbox.home()).env("VIRTUAL_ENV", sandbox.path("venv"));
    let ran = Ran::of(&mut command).says("hint: free some disk space");
    assert_eq!(ran.stdout.trim(), "3 a.fia old", "{}", ran.stderr);
}

#[test]
fn a_file_that_cannot_be_written_is_told_before_anything_is_compiled() {
    let sandbox = Sandbox::new();
    let nowhere = sandbox.path("no/such/folder/a.fia");
    sandbox.run(&[&["build", "--export", text(&nowhere)], SMALL].concat()).exits(3);
    sandbox.run(&[&["build", "--export", text(&sandbox.home())], SMALL].concat()).exits(2).says("is a folder");
    let args = ["build", "--sm", "90 120", "--module", "vllm_comm", "--export", "a.fia"];
    sandbox.run(&args).exits(2).says("one artifact");
    assert!(!sandbox.home().join("store").exists());
}

// --- forged and damaged ones ---------------------------------------------------------------------------------------

/// A bundle taken apart, to be put together otherwise.
struct Parts {
    files: Vec<(String, Vec<u8>)>,
}

impl Parts {
    fn of(file: &Path) -> Self {
        let mut archive = tar::Archive::new(zstd::Decoder::new(fs::File::open(file).unwrap()).unwrap());
        let mut files = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.push((entry.path().unwrap().to_str().unwrap().to_owned(), content));
        }
        Self { files }
    }

    fn json(&self, name: &str) -> Value {
        let (_, content) = self.files.iter().find(|(known, _)| known == name).unwrap();
        serde_json::from_slice(content).unwrap()
    }

    fn set(&mut self, name: &str, content: impl Into<Vec<u8>>) {
        self.files.iter_mut().find(|(known, _)| known == name).unwrap().1 = content.into();
    }

    fn edit(&mut self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = self.json(name);
        change(&mut value);
        self.set(name, seal_manifest(value));
    }

    /// Makes every hash and size right again: a forger can do that, too.
    fn reseal(&mut self) {
        let files = self.files[1..]
            .iter()
            .map(|(name, content)| json!({ "file": name, "sha256": Digest::of(content), "bytes": content.len() }));
        let files = files.collect();
        self.edit("bundle.json", |index| index["files"] = files);
    }

    /// Puts it together; `change` may alter each header of the archive.
    fn pack(&self, to: &Path, change: impl Fn(&str, &mut tar::Header)) {
        let mut archive = tar::Builder::new(zstd::Encoder::new(fs::File::create(to).unwrap(), 1).unwrap());
        for (name, content) in &self.files {
            let mut header = tar::Header::new_ustar();
            // Not `set_path`, which has scruples.
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            header.set_mtime(0);
            header.set_uid(0);
            header.set_gid(0);
            header.set_entry_type(tar::EntryType::Regular);
            change(name, &mut header);
            header.set_cksum();
            archive.append(&header, content.as_slice()).unwrap();
        }
        archive.into_inner().unwrap().finish().unwrap();
    }
}

/// Checks that a file is refused with that exit code, and that nothing at all came of it.
#[track_caller]
fn refused(file: &Path, exit: u8, what: &str) -> String {
    let home = tempfile::tempdir().unwrap();
    let error = match pipeline::import(&[file], &home.path().join("home")) {
        Ok(_) => panic!("{what}: it was taken in"),
        Err(error) => error,
    };
    assert_eq!(error.exit() as u8, exit, "{what}: {error}");
    assert!(!error.hints().is_empty(), "{what}: {error}");
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0, "{what}");
    error.to_string()
}

#[test]
fn a_flipped_bit_or_a_missing_end_is_noticed_wherever_it_is() {
    let sandbox = Sandbox::with_small_build();
    let (file, _) = export(&sandbox, "a.fia");
    let good = fs::read(&file).unwrap();
    let bad = sandbox.path("bad.fia");
    for step in 0..48 {
        let at = step * (good.len() - 1) / 47;
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        fs::write(&bad, &bytes).unwrap();
        // A flip in the frame's header may ask for a dictionary or a larger window; all of it is damage.
        refused(&bad, 5, &format!("byte {at} flipped"));
        fs::write(&bad, &good[..at]).unwrap();
        refused(&bad, 5, &format!("cut at {at}"));
    }
    for (what, more) in [("a byte", vec![0]), ("another bundle", good.clone())] {
        fs::write(&bad, [good.clone(), more].concat()).unwrap();
        refused(&bad, 5, what);
    }
    for (what, content) in [("nothing", vec![]), ("text", b"hello".repeat(999)), ("an ELF file", good[..0].to_vec())] {
        fs::write(&bad, content).unwrap();
        refused(&bad, 5, what);
    }
    let home = sandbox.path("elsewhere");
    assert_eq!(pipeline::import(&[Path::new("/no/such/file")], &home).unwrap_err().exit() as u8, 3);
    assert_eq!(pipeline::import(&[sandbox.home().as_path()], &home).unwrap_err().exit() as u8, 2);
    // One bad among good ones: none is taken in.
    assert!(pipeline::import(&[&file, &bad], &home).is_err());
    assert!(!home.exists());
}

#[test]
fn nothing_but_the_plain_files_of_a_bundle_is_taken_from_an_archive() {
    let sandbox = Sandbox::with_small_build();
    let (file, _) = export(&sandbox, "a.fia");
    let bad = sandbox.path("bad.fia");
    let artifact = "artifact/vllm_comm.so";

    // Put together unchanged, it is taken: what is refused below is refused for what was changed.
    Parts::of(&file).pack(&bad, |_, _| ());
    assert!(pipeline::open_bundle(&bad).is_ok());

    let kinds = [
        tar::EntryType::Symlink,
        tar::EntryType::Link,
        tar::EntryType::Char,
        tar::EntryType::Block,
        tar::EntryType::Fifo,
        tar::EntryType::Directory,
        tar::EntryType::GNULongName,
        tar::EntryType::XHeader,
        tar::EntryType::GNUSparse,
    ];
    for kind in kinds {
        for target in [artifact, "NOTICE", "bundle.json"] {
            Parts::of(&file).pack(&bad, |name, header| {
                if name == target {
                    header.set_entry_type(kind);
                    header.set_link_name("/etc/passwd").unwrap();
                }
            });
            refused(&bad, 5, &format!("{target} as {kind:?}"));
        }
    }
    type Change = fn(&mut tar::Header);
    let changes: [(&str, Change); 4] = [
        ("setuid", |header| header.set_mode(0o4755)),
        ("an owner", |header| header.set_uid(1000)),
        ("a time", |header| header.set_mtime(1)),
        ("a huge size", |header| header.set_size(1 << 40)),
    ];
    for (what, change) in changes {
        for target in ["bundle.json", artifact] {
            Parts::of(&file).pack(&bad, |name, header| {
                if name == target {
                    change(header)
                }
            });
            refused(&bad, 5, what);
        }
    }

    let extra = |name: &str, at: usize, sealed: bool| {
        let mut parts = Parts::of(&file);
        parts.files.insert(at, (name.to_owned(), b"x".to_vec()));
        if sealed {
            parts.reseal();
        }
        parts.pack(&bad, |_, _| ());
        refused(&bad, 5, &format!("{name} at {at}, sealed: {sealed}"))
    };
    let last = Parts::of(&file).files.len();
    for sealed in [false, true] {
        for name in
            ["../evil", "/etc/evil", "a/../../evil", "tables/../../evil", "evil", "overlay/evil", "artifact/evil.so", "NOTICE"]
        {
            for at in [1, 6, last - 1, last] {
                extra(name, at, sealed);
            }
        }
    }
    assert!(extra("../evil", last, true).contains("no path inside"));
    assert!(!sandbox.path("evil").exists() && !Path::new("/etc/evil").exists());

    for missing in 0..last {
        for sealed in [false, true] {
            let mut parts = Parts::of(&file);
            let (name, _) = parts.files.remove(missing);
            // The tables are for people: a bundle that is sealed without one is whole.
            if sealed && (missing == 0 || name.starts_with("tables/")) {
                continue;
            }
            if sealed {
                parts.reseal();
            }
            parts.pack(&bad, |_, _| ());
            refused(&bad, 5, &format!("without file {missing}, sealed: {sealed}"));
        }
    }
}

#[test]
fn a_small_file_that_would_unpack_to_a_huge_one_is_refused_before_it_is_unpacked() {
    let sandbox = Sandbox::with_small_build();
    let (file, _) = export(&sandbox, "a.fia");
    let bad = sandbox.path("bad.fia");
    for (name, bytes) in [("artifact/vllm_comm.so", 1_u64 << 40), ("NOTICE", 1 << 40), ("NOTICE", u64::MAX)] {
        let mut parts = Parts::of(&file);
        parts.edit("bundle.json", |index| {
            let files = index["files"].as_array_mut().unwrap();
            files.iter_mut().find(|record| record["file"] == name).unwrap()["bytes"] = bytes.into();
        });
        parts.pack(&bad, |known, header| {
            if known == name {
                header.set_size(bytes)
            }
        });
        assert!(refused(&bad, 5, name).contains("no bundle does"));
    }
    // The index itself: sixteen gigabytes of zeros in a megabyte.
    let mut header = tar::Header::new_ustar();
    header.set_path("bundle.json").unwrap();
    header.set_size(16 << 30);
    header.set_mode(0o644);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_cksum();
    let mut encoder = zstd::Encoder::new(fs::File::create(&bad).unwrap(), 1).unwrap();
    encoder.write_all(header.as_bytes()).unwrap();
    for _ in 0..64 {
        encoder.write_all(&vec![0; 1 << 20]).unwrap();
    }
    encoder.finish().unwrap();
    assert!(refused(&bad, 5, "the index").contains("would have"));
}

/// A bundle with another manifest and other inputs, with every hash, size and key right again.
fn forged(file: &Path, to: &Path, manifest: impl Fn(&mut Value), inputs: impl Fn(&mut Value)) {
    let mut parts = Parts::of(file);
    let mut value = parts.json("inputs.json");
    inputs(&mut value);
    let inputs: fi_arch::store::Inputs = serde_json::from_value(value).unwrap();
    let text = inputs.to_text();
    parts.set("inputs.json", text.as_bytes());
    parts.edit("manifest.json", |value| {
        value["inputs"]["sha256"] = Digest::of(text.as_bytes()).to_string().into();
        value["inputs"]["bytes"] = text.len().into();
        value["key"] = inputs.key().to_string().into();
        value["request"] = inputs.request.key().to_string().into();
        manifest(value);
    });
    let key = parts.json("manifest.json")["key"].clone();
    parts.reseal();
    parts.edit("bundle.json", |index| index["key"] = key);
    parts.pack(to, |_, _| ());
}

#[test]
fn a_manifest_that_does_not_describe_its_artifact_is_refused_though_every_hash_is_right() {
    let sandbox = Sandbox::with_small_build();
    let (file, _) = export(&sandbox, "a.fia");
    let bad = sandbox.path("bad.fia");
    forged(&file, &bad, |_| (), |_| ());
    assert!(pipeline::open_bundle(&bad).is_ok());

    type Forge = fn(&mut Value);
    let field = |inputs: &mut Value, name: &str, text: &str| {
        let fields = inputs["request"]["fields"].as_array_mut().unwrap();
        fields.iter_mut().find(|field| field["name"] == name).unwrap()["text"] = text.into();
    };
    let manifests: [(&str, Forge, u8); 12] = [
        ("one kernel more", |m| m["verdict"]["kernels"] = 25.into(), 5),
        ("a hollow kernel", |m| m["verdict"]["hollow"] = 1.into(), 5),
        ("marks", |m| m["verdict"]["with_dependency_marks"] = 24.into(), 5),
        ("a verdict", |m| m["verdict"]["verdict"] = "splendid".into(), 5),
        ("exports", |m| m["verdict"]["exports"] = json!(["__tvm_ffi_nothing"]), 5),
        ("fewer exports", |m| m["verdict"]["exports"] = json!([]), 5),
        ("needed libraries", |m| m["verdict"]["needed"] = json!([]), 5),
        ("an older C library", |m| m["verdict"]["glibc_floor"] = "2.2".into(), 5),
        ("a target", |m| m["target"] = "sm_90a".into(), 5),
        ("another key", |m| m["key"] = "0".repeat(64).into(), 5),
        ("made by a test", |m| m["test_only"] = true.into(), 5),
        ("a format of tomorrow", |m| m["format"] = 2.into(), 4),
    ];
    for (what, forge, exit) in manifests {
        forged(&file, &bad, forge, |_| ());
        refused(&bad, exit, what);
    }
    forged(&file, &bad, |m| m["target"] = "sm_90a".into(), |i| field(i, "target", "sm_90a"));
    assert!(refused(&bad, 5, "another target, everywhere").contains("wrong-target"));
    // This module's kernels have no dependency marks, and that one's must.
    forged(&file, &bad, |m| m["module"] = "trtllm_comm".into(), |i| field(i, "module", "trtllm_comm"));
    assert!(refused(&bad, 5, "another module").contains("missing-marks"));
    forged(&file, &bad, |m| m["module"] = "of_tomorrow".into(), |i| field(i, "module", "of_tomorrow"));
    refused(&bad, 4, "a module that is not known");
    for path in ["../../../dev/zero", "/dev/zero"] {
        forged(&file, &bad, |_| (), |i| i["files"][0]["path"] = path.into());
        assert!(refused(&bad, 5, path).contains("no place of an input"));
    }

    // Another file in the artifact's place, with its size and hash in the manifest.
    let other = fs::read(env!("CARGO_BIN_EXE_fi-arch")).unwrap();
    let mut parts = Parts::of(&file);
    parts.edit("manifest.json", |m| {
        m["artifact"]["sha256"] = Digest::of(&other).to_string().into();
        m["artifact"]["bytes"] = other.len().into();
    });
    parts.set("artifact/vllm_comm.so", other);
    parts.reseal();
    parts.pack(&bad, |_, _| ());
    assert!(refused(&bad, 5, "another file").contains("no-code"));

    let mut parts = Parts::of(&file);
    parts.edit("bundle.json", |index| index["format"] = 2.into());
    parts.pack(&bad, |_, _| ());
    assert!(refused(&bad, 4, "a newer format").contains("another release"));
}

// --- the overlay ---------------------------------------------------------------------------------------------------

#[test]
fn the_overlay_comes_out_as_it_went_in_and_only_the_one_that_the_artifact_was_built_with() {
    let sandbox = Sandbox::with_small_build();
    let (file, _) = export(&sandbox, "a.fia");
    let mut bundle = Bundle::open(&file).unwrap();
    assert_eq!(bundle.overlay, []);
    let python = OverlayFile {
        path: "flashinfer/jit/comm.py".into(),
        pre: Some(Digest::of(b"before")),
        post: b"after".to_vec(),
        edits: vec!["gate".into()],
    };
    bundle.overlay = vec![python.clone()];
    let with_python = sandbox.path("python.fia");
    bundle.write(&with_python).unwrap();
    let read = pipeline::open_bundle(&with_python).unwrap();
    assert!(read == bundle, "all that was written is read");
    assert_eq!(read.overlay, [python]);

    // An edited header and an added one, as inputs of the artifact.
    let mut whole = bundle.clone();
    let cuda = |path: &str, pre: Option<Digest>| OverlayFile {
        path: format!("flashinfer/data/include/{path}"),
        pre,
        post: path.as_bytes().to_vec(),
        edits: vec!["hollow-kernels".into()],
    };
    whole.overlay =
        vec![cuda("fi_arch/x.cuh", None), cuda("flashinfer/comm/y.cuh", Some(Digest::of(b"y"))), whole.overlay.remove(0)];
    for file in &whole.overlay[..2] {
        let name = format!("overlay {}", file.path.strip_prefix("flashinfer/data/").unwrap());
        whole.inputs.request.digest(&name, Digest::of(&file.post));
    }
    let inputs = whole.inputs.to_text();
    whole.manifest.key = whole.inputs.key();
    whole.manifest.request = whole.inputs.request.key();
    let record = whole.manifest.inputs.as_mut().unwrap();
    (record.sha256, record.bytes) = (Digest::of(inputs.as_bytes()), inputs.len() as u64);
    let with_headers = sandbox.path("headers.fia");
    whole.write(&with_headers).unwrap();
    assert!(pipeline::open_bundle(&with_headers).unwrap() == whole);

    // CUDA files decide the artifact: its inputs name each of them.
    bundle.overlay[0].path = "flashinfer/data/include/flashinfer/comm/x.cuh".into();
    let bad = sandbox.path("bad.fia");
    bundle.write(&bad).unwrap();
    assert!(refused(&bad, 5, "an edited header that the artifact does not know").contains("overlay"));

    // What overlay.json says is compared with what is there.
    let mut parts = Parts::of(&with_python);
    parts.set("overlay/flashinfer/jit/comm.py", "other");
    parts.reseal();
    parts.pack(&bad, |_, _| ());
    refused(&bad, 5, "another post-image");
}
