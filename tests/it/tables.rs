//! `fi-arch tables`: what is listed, the lint against real wheels, and the draft of a new release.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use crate::support::sandbox::{Ran, Sandbox, copy_dir};
use crate::support::wheels;

/// What a released wheel holds, as far as the tables follow it: packed again, as `NAME-VERSION.whl` in `dir`.
/// `change` sees each file before it is packed.
fn pack(dir: &Path, version: &str, as_version: &str, change: impl Fn(&str, String) -> String) -> PathBuf {
    let from = wheels::unpacked("flashinfer-python", version);
    let listed = Sandbox::new().run(&["tables", "ls", "--json"]).exits(0).json();
    let files = listed["releases"][0]["files"].as_object().unwrap().clone();
    let metadata = format!("flashinfer_python-{version}.dist-info/METADATA");
    let path = dir.join(format!("flashinfer_python-{as_version}-py3-none-any.whl"));
    let mut zip = ZipWriter::new(fs::File::create(&path).unwrap());
    for file in files.keys().map(String::as_str).chain([metadata.as_str()]) {
        let text = fs::read_to_string(from.join(file)).unwrap();
        let text = change(file, text).replace(&format!("\nVersion: {version}\n"), &format!("\nVersion: {as_version}\n"));
        zip.start_file(file, SimpleFileOptions::default()).unwrap();
        zip.write_all(text.as_bytes()).unwrap();
    }
    zip.finish().unwrap();
    path
}

fn same(_: &str, text: String) -> String {
    text
}

/// A copy of this checkout's tables.
fn tables_copy(sandbox: &Sandbox) -> PathBuf {
    let to = sandbox.path("arch-tables");
    copy_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("arch-tables"), &to);
    to
}

fn release<'a>(listed: &'a Value, version: &str) -> &'a Value {
    listed["releases"].as_array().unwrap().iter().find(|release| release["release"] == version).unwrap()
}

#[test]
fn ls_names_every_release_with_its_defects_and_what_remains() {
    let sandbox = Sandbox::new();
    let listed = sandbox.run(&["tables", "ls", "--json"]).exits(0).json();
    assert_eq!(release(&listed, "0.6.3")["defects"]["trtllm_comm"].as_array().unwrap().len(), 9);
    assert_eq!(release(&listed, "0.6.17")["defects"]["trtllm_comm"].as_array().unwrap().len(), 0);
    assert_eq!(release(&listed, "0.7.4")["remains"], serde_json::json!(["ragged-hidden", "moe-dispatch-return"]));
    assert_eq!(release(&listed, "0.4.1")["fetchable"], false);
    let engine = |at: usize| &listed["engines"][at];
    assert_eq!((&engine(0)["engine"], &engine(1)["engine"]), (&"sglang".into(), &"vllm".into()));
    assert_eq!(engine(0)["gates"][0]["id"], "predicate");
    assert_eq!(engine(1)["gates"].as_array().unwrap().len(), 0);
    let text = sandbox.run(&["tables", "ls"]).exits(0).stdout;
    assert!(text.contains("0.6.0 … 0.6.3"), "{text}");
    assert!(text.contains("multicast-check: "), "{text}");
    assert!(text.contains("SGLang (0.5.3.post3 to 0.5.23 read): gates of its own") && text.contains("vLLM"), "{text}");
}

#[test]
fn a_wheel_of_other_content_is_a_fault() {
    // Packed again, its own hash differs; everything in it is as released.
    let sandbox = Sandbox::new();
    pack(&sandbox.path(""), "0.6.9", "0.6.9", same);
    let here = sandbox.path("");
    let here = here.to_str().unwrap();
    let report = sandbox.run(&["tables", "check", "--release", "0.6.9", "--wheels", here, "--json"]).exits(1).json();
    let faults = report["releases"][0]["faults"].as_array().unwrap();
    assert!(faults.len() == 1 && faults[0].as_str().unwrap().contains("wheels.toml says"), "{report}");
    assert_eq!(report["releases"][0]["defects"]["trtllm_comm"].as_array().unwrap().len(), 7);

    // A file that differs, so that an anchor is gone.
    pack(&sandbox.path(""), "0.6.9", "0.6.9", |path, text| match path.ends_with("mnnvl.py") {
        true => text.replace("multicast_supported == 0", "not multicast_supported"),
        false => text,
    });
    let report = sandbox.run(&["tables", "check", "--release", "0.6.9", "--wheels", here]).exits(1).stdout;
    assert!(report.contains("mnnvl.py has SHA-256"), "{report}");
    assert!(report.contains("expected 1 × `multicast_supported == 0` in SymmDeviceMemory.__init__, found 0"), "{report}");
}

#[test]
fn an_unpacked_source_tree_is_checked_like_a_wheel() {
    // The layout of a source distribution, made of a wheel: the data lies at the top, and there is no wheel to hash.
    let sandbox = Sandbox::new();
    let from = wheels::unpacked("flashinfer-python", "0.5.0");
    let tree = sandbox.path("flashinfer_python-0.5.0");
    fs::create_dir(&tree).unwrap();
    for (original, link) in
        [("flashinfer", "flashinfer"), ("flashinfer/data/csrc", "csrc"), ("flashinfer/data/include", "include")]
    {
        std::os::unix::fs::symlink(from.join(original), tree.join(link)).unwrap();
    }
    fs::copy(from.join("flashinfer_python-0.5.0.dist-info/METADATA"), tree.join("PKG-INFO")).unwrap();
    let here = sandbox.path("");
    let ran = sandbox.run(&["tables", "check", "--wheels", here.to_str().unwrap()]).exits(0);
    assert!(ran.stdout.contains("0.5.0: right: trtllm_comm has gate, hollow-kernels"), "{}", ran.stdout);
    assert!(ran.stdout.contains("0.7.4: skipped"), "{}", ran.stdout);
}

#[test]
fn a_release_that_is_not_listed_is_no_release_to_check() {
    Sandbox::new().run(&["tables", "check", "--release", "0.6.99"]).exits(4).says("tables add");
}

#[test]
fn the_rows_of_a_new_release_are_drafted_and_nothing_else_changes() {
    let sandbox = Sandbox::new();
    let tables = tables_copy(&sandbox);
    let releases = tables.join("flashinfer/releases.toml");
    let before = fs::read_to_string(&releases).unwrap();
    // The content of 0.7.4 but for one file, under the next number.
    let wheel = pack(&sandbox.path(""), "0.7.4", "0.7.5rc1", |path, text| match path.ends_with("trtllm_allreduce.cu") {
        true => format!("{text}// new\n"),
        false => text,
    });
    let args = ["tables", "add", wheel.to_str().unwrap(), "--tables", tables.to_str().unwrap()];
    let printed = sandbox.run(&args).exits(0).stdout;
    assert_eq!(fs::read_to_string(&releases).unwrap(), before, "without --write nothing is written");
    let added: Vec<&str> = printed.lines().filter(|line| line.starts_with('+') && !line.starts_with("+++")).collect();
    let removed: Vec<&str> = printed.lines().filter(|line| line.starts_with('-') && !line.starts_with("---")).collect();
    assert_eq!((added.len(), removed.len()), (3, 1), "{printed}");
    assert!(added[0].ends_with("\"0.7.4\", \"0.7.5rc1\",") && removed[0].ends_with("\"0.7.4\","), "{printed}");
    assert!(printed.contains("trtllm_comm: nothing to patch"), "{printed}");
    assert!(printed.contains("files with a new content: trtllm_allreduce.cu\n"), "{printed}");

    let mut write = args.to_vec();
    write.push("--write");
    sandbox.run(&write).exits(0);
    let after = fs::read_to_string(&releases).unwrap();
    assert!(after.lines().count() == before.lines().count() + 1 && after.contains("\"0.7.5rc1\" = \""), "{after}");
    assert!(fs::read_to_string(tables.join("wheels.toml")).unwrap().contains("\n\"0.7.5rc1\" = \""));
    // It is there now.
    sandbox.run(&args).exits(2).says("listed already");
}

#[test]
fn a_release_between_others_leaves_them_their_contents() {
    let sandbox = Sandbox::new();
    let tables = tables_copy(&sandbox);
    let wheel = pack(&sandbox.path(""), "0.6.9", "0.6.8.post2", |path, text| match path.ends_with("jit/comm.py") {
        true => format!("{text}# other\n"),
        false => text,
    });
    let args = ["tables", "add", wheel.to_str().unwrap(), "--tables", tables.to_str().unwrap()];
    let printed = sandbox.run(&args).exits(0).stdout;
    assert!(printed.contains("\n+\"0.6.8.post2\" = \"") && printed.contains("\n+\"0.6.9rc1\" = \"ed0f553c"), "{printed}");
    assert!(printed.contains("it has gate, hollow-kernels"), "{printed}");
}

#[test]
fn drafting_outside_of_a_checkout_says_so() {
    // The sandbox itself lies below this checkout.
    let outside = tempfile::tempdir().unwrap();
    let mut command = Sandbox::new().command(&["tables", "add", "0.7.5"]);
    Ran::of(command.current_dir(outside.path())).exits(2).says("lies in no source checkout").says("--tables");
}
