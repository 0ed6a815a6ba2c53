//! `fi-arch scan`: a folder of libraries that the real nvcc made.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use crate::support::probes::Probes;
use crate::support::sandbox::{Ran, Sandbox};

struct Folder {
    sandbox: Sandbox,
}

impl Folder {
    fn with(files: &[(&str, &str)]) -> Self {
        let folder = Self { sandbox: Sandbox::bare() };
        fs::create_dir_all(folder.sandbox.path("lib")).unwrap();
        for (name, probe) in files {
            Probes::get().copy(probe, &folder.sandbox.path("lib").join(name));
        }
        folder
    }

    fn dir(&self) -> std::path::PathBuf {
        self.sandbox.path("lib")
    }

    fn scan(&self, args: &[&str]) -> Ran {
        let dir = self.dir();
        let mut all = vec!["scan", dir.to_str().unwrap(), "--json", "--all"];
        all.extend(args);
        self.sandbox.run(&all)
    }
}

fn of<'a>(report: &'a Value, name: &str) -> &'a Value {
    let ends = |file: &&Value| Path::new(file["path"].as_str().unwrap()).ends_with(name);
    report["files"].as_array().unwrap().iter().find(ends).unwrap_or_else(|| panic!("{name} is not in {report:#}"))
}

#[test]
fn a_folder_in_which_everything_runs_is_right() {
    let folder = Folder::with(&[("a/good.so", "good"), ("ptx.so.1.2", "ptx")]);
    let report = folder.scan(&["--sm", "120"]).exits(0).json();
    assert_eq!(report["verdict"], "right");
    assert_eq!(of(&report, "good.so")["usable"]["sm_120"], "sass");
    assert_eq!((&of(&report, "good.so")["kernels"], &of(&report, "good.so")["hollow"]), (&2.into(), &0.into()));
    assert_eq!(of(&report, "ptx.so.1.2")["usable"]["sm_120"], "ptx");
    // The same files on a GPU that is older than all of them.
    let report = folder.scan(&["--sm", "120 121"]).exits(0).json();
    assert_eq!(of(&report, "good.so")["usable"]["sm_121"], "sass");
}

#[test]
fn a_library_without_code_for_the_target_is_a_fault() {
    let folder = Folder::with(&[("good.so", "good"), ("old.so", "old"), ("k.cubin", "cubin")]);
    let report = folder.scan(&["--sm", "120"]).exits(1).json();
    assert_eq!(of(&report, "old.so")["usable"]["sm_120"], "none");
    assert_eq!(of(&report, "old.so")["targets"]["sm_90a"], 1);
    assert_eq!(report["without_usable_code"], 1);
    let report = folder.scan(&["--sm", "121"]).exits(1).json();
    assert_eq!(of(&report, "k.cubin")["usable"]["sm_121"], "none", "sm_120a runs on its own chip alone");
    assert_eq!(report["without_usable_code"], 2);
}

#[test]
fn a_kernel_that_is_hollow_for_this_target_alone_is_a_fault() {
    let folder = Folder::with(&[("hollow.so", "hollow")]);
    let report = folder.scan(&["--sm", "120"]).exits(1).json();
    let file = of(&report, "hollow.so");
    assert_eq!((&file["kernels"], &file["hollow"], &file["hollow_everywhere"]), (&2.into(), &1.into(), &0.into()));
    assert!(file["hollow_kernels"][0].as_str().unwrap().contains("guarded"));
    folder.scan(&["--sm", "90"]).exits(0);
}

#[test]
fn a_hollow_kernel_that_its_library_does_not_choose_is_shown_and_no_fault() {
    let folder = Folder::with(&[("libcusparseLt.so.0", "hollow")]);
    let report = folder.scan(&["--sm", "120"]).exits(0).json();
    assert_eq!(of(&report, "libcusparseLt.so.0")["hollow"], 1);
    assert_eq!((&report["with_hollow_kernels"], &report["with_hollow_kernels_not_chosen"]), (&0.into(), &1.into()));
}

#[test]
fn links_count_once_and_the_real_name_is_shown() {
    let folder = Folder::with(&[("z/good.so", "good")]);
    fs::hard_link(folder.dir().join("z/good.so"), folder.dir().join("z/hard.so")).unwrap();
    symlink("z/good.so", folder.dir().join("a.so")).unwrap();
    symlink(".", folder.dir().join("z/round")).unwrap();
    symlink("/nonexistent/b.so", folder.dir().join("b.so")).unwrap();
    let report = folder.scan(&["--sm", "120"]).exits(0).json();
    assert_eq!(report["looked_at"], 1);
    of(&report, "z/good.so");
}

#[test]
fn what_cannot_be_read_is_reported_and_hides_nothing() {
    let folder = Folder::with(&[("good.so", "good"), ("old.so", "old")]);
    let dir = folder.dir();
    fs::write(dir.join("script.so"), "GROUP ( libx.so.1 )").unwrap();
    fs::write(dir.join("empty.so"), "").unwrap();
    fs::write(dir.join("short.so"), &fs::read(dir.join("good.so")).unwrap()[..2000]).unwrap();
    let report = folder.scan(&["--sm", "120"]).exits(1).json();
    assert_eq!((&report["looked_at"], &report["unreadable"]), (&5.into(), &1.into()));
    assert!(of(&report, "short.so")["error"]["why"].as_array().is_some_and(|why| !why.is_empty()));
    assert_eq!(of(&report, "script.so")["usable"], serde_json::json!({}));
    of(&report, "old.so");
    fs::remove_file(dir.join("old.so")).unwrap();
    // Nothing says that there is GPU code in the short one.
    folder.scan(&["--sm", "120"]).exits(0);
}

#[test]
fn damaged_gpu_code_is_a_fault_and_no_crash() {
    let folder = Folder::with(&[("good.so", "good")]);
    let file = folder.dir().join("good.so");
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.windows(4).position(|window| window == [0x50, 0xed, 0x55, 0xba]).unwrap();
    bytes[at + 4] = 9;
    fs::write(&file, &bytes).unwrap();
    let report = folder.scan(&["--sm", "120"]).exits(1).json();
    assert_eq!(report["unreadable"], 1);
}

#[test]
fn outlines_say_the_same_as_reading_everything() {
    for name in ["good", "old", "hollow", "ptx", "cubin"] {
        let path = Probes::get().path(name);
        let skim = fi_arch::cubin::skim(&path).unwrap().unwrap();
        let whole = fi_arch::cubin::read(&path).unwrap();
        let skimmed: Vec<_> = skim.images.iter().map(|image| (image.target(), image.bytes, image.stored_bytes)).collect();
        let read: Vec<_> = whole.images.iter().map(|image| (image.target.clone(), image.bytes, image.stored_bytes)).collect();
        assert_eq!(skimmed, read, "{name}");
    }
}

#[test]
fn a_wrong_folder_or_target_is_a_mistake_on_the_command_line() {
    let folder = Folder::with(&[]);
    folder.sandbox.run(&["scan", "/nonexistent/folder", "--sm", "120"]).exits(2);
    folder.sandbox.run(&["scan", folder.dir().to_str().unwrap()]).exits(2);
    folder.scan(&["--sm", "75"]).exits(4);
    assert_eq!(folder.scan(&["--sm", "120"]).exits(0).json()["looked_at"], 0);
}
