//! The store: what it promises to many builders at once, to killed ones, and on disks that fail.
//!
//! Where a promise is about processes, the tests start real ones: this test binary again, in the role of a builder
//! ([`a_builder_of_its_own`]). Where it is about a disk, they mount one in a namespace of their own; they fail where the
//! machine allows no such namespace, and never skip.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::Barrier;
use std::time::{Duration, SystemTime};

use fi_arch::digest::Digest;
use fi_arch::error::Result;
use fi_arch::memo::Memo;
use fi_arch::store::{
    EditRecord, Entry, FileRecord, Key, KeyBuilder, MANIFEST_FORMAT, Manifest, Store, VerdictRecord, seal_manifest, timestamp,
};
use serde_json::Value;

const CONTENT: &[u8] = b"\x7fELF, or so";

fn key(name: &str) -> Key {
    let mut builder = KeyBuilder::new("test 1");
    builder.text("name", name);
    builder.finish()
}

fn manifest(key: Key, content: &[u8]) -> Manifest {
    let file = "trtllm_comm.so".to_owned();
    Manifest {
        format: MANIFEST_FORMAT,
        key,
        request: self::key("request"),
        module: "trtllm_comm".into(),
        target: "sm_120f".into(),
        flashinfer: "0.6.14".into(),
        tvm_ffi: "0.1.9".into(),
        artifact: FileRecord { file, sha256: Digest::of(content), bytes: content.len() as u64 },
        nvcc: "release 13.0, V13.0.88".into(),
        host_compiler: "g++ 13.3.0".into(),
        flags: vec!["-O3".into()],
        units: Some(3),
        edits: vec![EditRecord {
            id: "open-gate".into(),
            path: "flashinfer/jit/comm.py".into(),
            reason: "the gate lists 9 and 10".into(),
            sites: 1,
            pre: None,
            post: Digest::of(b"post"),
        }],
        verdict: VerdictRecord {
            verdict: "pass".into(),
            kernels: 3,
            hollow: 0,
            with_dependency_marks: 2,
            need_no_marks: 1,
            needed: vec!["libcudart.so.13".into()],
            exports: Vec::new(),
            glibc_floor: None,
            libstdcxx_floor: None,
        },
        inputs: None,
        cudart: "shared".into(),
        min_driver: None,
        created: timestamp(),
        fi_arch: "0.1.0".into(),
        elapsed_s: 0.25,
        run_on: None,
        test_only: true,
    }
}

fn publish(store: &Store, key: Key, content: &[u8]) -> Result<Entry> {
    let staging = store.staging()?;
    let artifact = staging.path().join("built.so");
    fs::write(&artifact, content).unwrap();
    store.publish(&key, &artifact, &manifest(key, content), None)
}

/// A store in a folder of its own, with one entry, `key("a")`.
struct Fixture {
    home: tempfile::TempDir,
    store: Store,
    entry: Entry,
}

fn fixture() -> Fixture {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let entry = publish(&store, key("a"), CONTENT).unwrap();
    Fixture { home, store, entry }
}

impl Fixture {
    fn lookup(&self) -> Option<Entry> {
        self.store.lookup(&key("a"), &Memo::load(self.home.path()))
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let Ok(listing) = fs::read_dir(self.store.root().join(folder)) else { return Vec::new() };
        listing.map(|item| item.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// The binary, with this store.
    fn cache(&self, args: &[&str]) -> Output {
        fi_arch(self.home.path(), args)
    }
}

fn fi_arch(home: &Path, args: &[&str]) -> Output {
    let binary = env!("CARGO_BIN_EXE_fi-arch");
    Command::new(binary).arg("cache").args(args).env("FI_ARCH_HOME", home).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"))
}

fn overwrite(file: &Path, content: &[u8]) {
    fs::set_permissions(file, Permissions::from_mode(0o644)).unwrap();
    fs::write(file, content).unwrap();
}

// --- entries -------------------------------------------------------------------------------------------------------

#[test]
fn what_was_published_is_handed_out_read_only_and_nothing_else_is_left() {
    let it = fixture();
    let entry = it.lookup().expect("it was published");
    assert_eq!(fs::read(&entry.artifact).unwrap(), CONTENT);
    assert_eq!(entry.manifest, it.entry.manifest);
    for file in [&entry.artifact, &entry.dir.join("manifest.json")] {
        assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o444);
    }
    assert_eq!(it.names("staging"), [""; 0]);
    assert!(it.store.lookup(&key("b"), &Memo::load(it.home.path())).is_none());
}

#[test]
fn an_altered_artifact_is_never_handed_out_though_its_size_stays_and_its_mtime_is_set_back() {
    let it = fixture();
    let memo = Memo::load(it.home.path());
    // Until the memory really holds the digest: it takes no file that is too young.
    std::thread::sleep(Duration::from_millis(2200));
    it.store.lookup(&key("a"), &memo).unwrap();
    memo.save();
    assert!(fs::read_to_string(it.home.path().join("memo.json")).unwrap().contains("trtllm_comm.so"));

    let mtime = fs::metadata(&it.entry.artifact).unwrap().modified().unwrap();
    let mut altered = CONTENT.to_vec();
    altered[5] ^= 1;
    overwrite(&it.entry.artifact, &altered);
    File::options().write(true).open(&it.entry.artifact).unwrap().set_modified(mtime).unwrap();

    assert!(it.store.lookup(&key("a"), &memo).is_none());
    assert_eq!(it.names("artifacts"), [""; 0], "moved aside");
    assert_eq!(it.names("quarantine"), [format!("{}-1", key("a"))]);
    publish(&it.store, key("a"), CONTENT).unwrap();
    assert!(it.lookup().is_some());
}

#[test]
fn an_entry_with_anything_amiss_is_never_handed_out() {
    type Harm = fn(&Entry);
    fn edit(entry: &Entry, change: impl FnOnce(&mut Value)) {
        let file = entry.dir.join("manifest.json");
        let mut value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        change(&mut value);
        overwrite(&file, seal_manifest(value).as_bytes());
    }
    let harms: [(&str, Harm); 14] = [
        ("truncated manifest", |e| {
            let file = e.dir.join("manifest.json");
            let text = fs::read(&file).unwrap();
            overwrite(&file, &text[..text.len() / 2]);
        }),
        ("a flipped figure in the manifest", |e| {
            let file = e.dir.join("manifest.json");
            let text = fs::read_to_string(&file).unwrap().replace("\"hollow\": 0", "\"hollow\": 1");
            overwrite(&file, text.as_bytes());
        }),
        ("empty manifest", |e| overwrite(&e.dir.join("manifest.json"), b"")),
        ("no manifest", |e| fs::remove_file(e.dir.join("manifest.json")).unwrap()),
        ("huge manifest", |e| overwrite(&e.dir.join("manifest.json"), &vec![b' '; 5 << 20])),
        ("extra file", |e| fs::write(e.dir.join("extra.so"), "x").unwrap()),
        ("no artifact", |e| fs::remove_file(&e.artifact).unwrap()),
        ("truncated artifact", |e| overwrite(&e.artifact, &CONTENT[1..])),
        ("artifact that is a link", |e| {
            let elsewhere = e.dir.parent().unwrap().parent().unwrap().join("elsewhere.so");
            fs::rename(&e.artifact, &elsewhere).unwrap();
            symlink(elsewhere, &e.artifact).unwrap();
        }),
        ("artifact elsewhere", |e| {
            fs::rename(&e.artifact, e.dir.join("../../elsewhere.so")).unwrap();
            edit(e, |m| m["artifact"]["file"] = "../../elsewhere.so".into());
        }),
        ("artifact at an absolute path", |e| {
            let elsewhere = e.dir.parent().unwrap().parent().unwrap().join("elsewhere.so");
            fs::rename(&e.artifact, &elsewhere).unwrap();
            edit(e, |m| m["artifact"]["file"] = elsewhere.to_str().unwrap().into());
        }),
        ("manifest of another entry", |e| edit(e, |m| m["key"] = key("b").to_string().into())),
        ("unknown format", |e| edit(e, |m| m["format"] = 2.into())),
        ("no folder", |e| {
            fs::remove_dir_all(&e.dir).unwrap();
            fs::write(&e.dir, "x").unwrap();
        }),
    ];
    for (name, harm) in harms {
        let it = fixture();
        harm(&it.entry);
        let broken = it.store.entries().unwrap();
        assert!(broken.len() == 1 && broken[0].entry.is_err(), "{name}: it is listed, as broken");
        assert_eq!(it.cache(&["verify"]).status.code(), Some(1), "{name}");
        assert!(it.lookup().is_none(), "{name}");
        assert_eq!((it.names("artifacts").len(), it.names("quarantine").len()), (0, 1), "{name}: moved aside");
        // Publishing over a broken entry mends it, too.
        let again = fixture();
        harm(&again.entry);
        publish(&again.store, key("a"), CONTENT).unwrap();
        assert!(again.lookup().is_some(), "{name}");
    }
}

#[test]
fn fields_that_a_newer_release_added_are_skipped() {
    let it = fixture();
    let file = it.entry.dir.join("manifest.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    value["of_tomorrow"] = serde_json::json!([1]);
    overwrite(&file, seal_manifest(value).as_bytes());
    assert!(it.lookup().is_some());
}

#[test]
fn an_artifact_that_changed_after_it_was_judged_is_not_published() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let staging = store.staging().unwrap();
    let artifact = staging.path().join("built.so");
    fs::write(&artifact, "changed").unwrap();
    let error = store.publish(&key("a"), &artifact, &manifest(key("a"), CONTENT), None).unwrap_err();
    assert_eq!(error.exit() as u8, 5);
    assert!(store.entries().unwrap().is_empty());
}

// --- many builders, and killed ones --------------------------------------------------------------------------------

#[test]
fn sixteen_threads_and_eight_processes_that_publish_one_key_end_with_one_entry() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let mut builders: Vec<Builder> = (0..8).map(|_| Builder::start("publish-on-word", home.path())).collect();
    builders.iter_mut().for_each(|builder| builder.wait_for("ready"));
    let together = Barrier::new(17);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|_| {
                scope.spawn(|| {
                    together.wait();
                    publish(&store, key("a"), CONTENT).unwrap()
                })
            })
            .collect();
        together.wait();
        builders.iter_mut().for_each(|builder| builder.say("go"));
        for thread in threads {
            let entry = thread.join().unwrap();
            assert_eq!(entry.dir, store.root().join("artifacts").join(key("a").to_string()));
        }
    });
    builders.iter_mut().for_each(|builder| builder.wait_for("published"));
    builders.into_iter().for_each(Builder::ends_well);
    assert_eq!(store.entries().unwrap().len(), 1);
    assert_eq!(store.check(&key("a")).unwrap().manifest.artifact.sha256, Digest::of(CONTENT));
    assert_eq!(fs::read_dir(store.root().join("staging")).unwrap().count(), 0);
}

#[test]
fn a_builder_killed_in_the_middle_leaves_nothing_visible_and_its_staging_is_swept_but_no_living_ones() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let [mut dying, mut living] = ["a", "b"].map(|_| Builder::start("stop-in-the-middle", home.path()));
    dying.wait_for("half");
    living.wait_for("half");
    let staged = |builder: &Builder| PathBuf::from(builder.said.last().unwrap().clone());
    let (dead, alive) = (staged(&dying), staged(&living));
    dying.kill();
    assert!(dead.join("entry/manifest.json").is_file(), "nobody has swept yet");

    assert!(store.entries().unwrap().is_empty());
    assert!(store.lookup(&key("a"), &Memo::default()).is_none());
    let own = store.staging().unwrap();
    assert!(!dead.exists() && !dead.with_extension("lock").exists());
    assert!(alive.join("entry/manifest.json").is_file() && own.path().is_dir());
    living.kill();
}

#[test]
fn whenever_a_builder_is_killed_every_visible_entry_is_whole() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    for round in 0..20 {
        let mut builder = Builder::start("publish-for-ever", home.path());
        builder.wait_for("ready");
        std::thread::sleep(Duration::from_millis(3 * round));
        builder.kill();
        for summary in store.entries().unwrap() {
            let entry = summary.entry.unwrap_or_else(|reason| panic!("{}: {reason}", summary.name));
            store.check(&entry.key).unwrap();
        }
    }
    assert!(!store.entries().unwrap().is_empty(), "the builders did publish");
    drop(store.staging().unwrap());
    assert_eq!(fs::read_dir(store.root().join("staging")).unwrap().count(), 0);
}

#[test]
fn a_lock_is_free_as_soon_as_its_holder_is_killed() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let mut holder = Builder::start("hold-lock", home.path());
    holder.wait_for("locked");
    let pid = holder.child.id();
    let mut waited_for = None;
    let lock = store.lock("work", &mut |seen| {
        waited_for = seen;
        holder.kill();
        Ok(())
    });
    assert!(lock.is_ok());
    assert_eq!(waited_for, Some(pid), "the waiter was told whom it waits for");
    assert!(store.root().join("locks/work.lock").is_file(), "the file is never removed");
}

// --- disks that fail -----------------------------------------------------------------------------------------------

#[test]
fn a_read_only_store_still_serves_hits_and_its_first_write_says_why_it_fails() {
    let it = fixture();
    // As an older release may have left it: a folder that cannot be made is missing.
    fs::remove_dir_all(it.store.root().join("locks")).unwrap();
    let home = it.home.path().display();
    let said =
        Builder::within("read-only", it.home.path(), &format!("mount --bind {home} {home} && mount -o remount,bind,ro {home}"));
    assert_eq!(said, ["hit", "3", "hint"]);

    // A broken entry that cannot be moved is not handed out either.
    overwrite(&it.entry.artifact, b"\x7fELF, or no");
    let said =
        Builder::within("read-only", it.home.path(), &format!("mount --bind {home} {home} && mount -o remount,bind,ro {home}"));
    assert_eq!(said, ["miss", "3", "hint"]);
    assert_eq!(it.names("artifacts").len(), 1);
}

#[test]
fn a_read_only_folder_without_a_store_is_refused_with_a_hint() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().display();
    let said = Builder::within("open", home.path(), &format!("mount --bind {path} {path} && mount -o remount,bind,ro {path}"));
    assert_eq!(said, ["3", "hint"]);
}

#[test]
fn a_full_disk_publishes_nothing_and_says_so() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().display();
    // Room for the artifact, and for nothing more: the builder fills the rest up.
    let said = Builder::within("fill-disk", home.path(), &format!("mount -t tmpfs -o size=1m none {path}"));
    assert_eq!(said, ["3", "hint", "0 entries", "published after room was made"]);
}

#[test]
fn a_builder_that_can_neither_use_nor_move_the_winners_entry_uses_its_own() {
    let it = fixture();
    overwrite(&it.entry.artifact, b"broken");
    let dir = it.entry.dir.display();
    // A mount point cannot be renamed, by nobody.
    let said = Builder::within("publish", it.home.path(), &format!("mount --bind {dir} {dir}"));
    assert_eq!(said, ["published"]);
    let spare = it.names("spare");
    assert_eq!(spare.len(), 1);
    assert_eq!(fs::read(it.store.root().join("spare").join(&spare[0]).join("trtllm_comm.so")).unwrap(), CONTENT);
}

// --- making room ---------------------------------------------------------------------------------------------------

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Sets back the time at which a file or folder was last modified, which for an entry is when it was last used.
fn age(path: &Path, by: Duration) {
    File::open(path).unwrap().set_modified(SystemTime::now() - by).unwrap();
}

impl Fixture {
    /// An entry of its own request that was last used so long ago.
    fn used_before(&self, name: &str, unused: Duration) -> Entry {
        let entry = publish(&self.store, key(name), CONTENT).unwrap();
        age(&entry.dir, unused);
        entry
    }

    fn gc(&self, args: &[&str]) -> Value {
        let output = self.cache(&[&["gc", "--json"], args].concat());
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        json(&output)
    }

    /// The whole store: every path in it.
    fn everything(&self) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> =
            walkdir::WalkDir::new(self.store.root()).into_iter().map(|item| item.unwrap().into_path()).collect();
        paths.sort();
        paths
    }
}

/// The names of what gc removed, of that kind.
fn removed(report: &Value, kind: &str) -> Vec<String> {
    let removed = report["removed"].as_array().unwrap().iter().filter(|removed| removed["kind"] == kind);
    removed.map(|removed| removed["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn gc_removes_what_was_not_used_for_long_and_a_hit_counts_as_use() {
    let it = fixture();
    it.used_before("old", 40 * DAY);
    it.used_before("used again", 40 * DAY);
    it.used_before("new", 2 * DAY);
    assert!(it.store.lookup(&key("used again"), &Memo::load(it.home.path())).is_some());
    let before = it.everything();
    assert_eq!(removed(&it.gc(&["--dry-run"]), "entry"), [key("old").to_string()]);
    assert_eq!(it.everything(), before, "a dry run changes nothing");

    let report = it.gc(&[]);
    assert_eq!(removed(&report, "entry"), [key("old").to_string()]);
    assert_eq!((&report["left"], &report["kept"]), (&3.into(), &serde_json::json!([])));
    assert!(report["freed_bytes"].as_u64().unwrap() > CONTENT.len() as u64);
    assert_eq!((it.names("artifacts").len(), it.names("staging").len()), (3, 0));
    assert_eq!(removed(&it.gc(&["--older-than", "36h"]), "entry"), [key("new").to_string()]);
    let output = it.cache(&["gc", "--older-than", "1d"]);
    assert!(stdout(&output).contains("0 B freed; 2 artifacts are left"), "{output:?}");
    for wrong in ["30", "d", "x", "-1d"] {
        assert_eq!(it.cache(&["gc", "--older-than", wrong]).status.code(), Some(2), "{wrong}");
        assert_eq!(it.cache(&["gc", "--max-size", wrong]).status.code(), Some(if wrong == "30" { 0 } else { 2 }), "{wrong}");
    }
}

#[test]
fn gc_by_size_removes_the_longest_unused_first_and_no_more_than_it_must() {
    let it = fixture();
    fs::remove_dir_all(&it.entry.dir).unwrap();
    let names = ["a day", "a week", "a month", "an hour"];
    let entries: Vec<Entry> =
        names.iter().zip([DAY, 7 * DAY, 30 * DAY, HOUR + HOUR / 2]).map(|(name, unused)| it.used_before(name, unused)).collect();
    let size: u64 = fs::read_dir(&entries[0].dir).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    let report = it.gc(&["--max-size", &(2 * size + size / 2).to_string()]);
    assert_eq!(removed(&report, "entry"), [key("a month").to_string(), key("a week").to_string()]);
    assert_eq!(report["left"], 2);
    assert_eq!(removed(&it.gc(&["--max-size", "1M"]), "entry"), [""; 0]);
}

#[test]
fn gc_takes_nothing_that_was_used_within_the_last_hour_whatever_the_limits_say() {
    let it = fixture();
    it.used_before("fresh", HOUR - Duration::from_secs(60));
    let to_come = publish(&it.store, key("to come"), CONTENT).unwrap();
    File::open(&to_come.dir).unwrap().set_modified(SystemTime::now() + 9 * DAY).unwrap();
    let report = it.gc(&["--older-than", "0s", "--max-size", "0"]);
    assert_eq!(removed(&report, "entry"), [""; 0]);
    assert_eq!(report["kept"].as_array().unwrap().len(), 3);
    assert!(report["kept"][0]["why"].as_str().unwrap().contains("within the last hour"));
}

#[test]
fn gc_takes_nothing_that_a_process_has_open_or_mapped() {
    let it = fixture();
    let open = it.used_before("open", DAY);
    let _held = File::open(&open.artifact).unwrap();
    // A program that the loader has mapped, and of which no descriptor is open: as a server maps a library.
    let program = fs::read("/bin/sleep").unwrap();
    let mapped = publish(&it.store, key("mapped"), &program).unwrap();
    age(&mapped.dir, DAY);
    let loader = fs::read_dir("/lib64").unwrap().map(|item| item.unwrap().path());
    let loader = loader.into_iter().find(|path| path.to_str().unwrap().contains("ld-linux")).unwrap();
    let mut server = Command::new(loader).arg(&mapped.artifact).arg("60").spawn().unwrap();
    let maps = format!("/proc/{}/maps", server.id());
    while !fs::read_to_string(&maps).unwrap().contains(&key("mapped").to_string()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let report = it.gc(&["--older-than", "1h"]);
    assert_eq!(removed(&report, "entry"), [""; 0]);
    let kept = report["kept"].as_array().unwrap();
    assert!(kept.len() == 2 && kept.iter().all(|kept| kept["why"] == "a process has it open"), "{report}");
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(removed(&it.gc(&["--older-than", "1h"]), "entry"), [key("mapped").to_string()]);
}

#[test]
fn gc_takes_nothing_that_a_builder_works_on() {
    let it = fixture();
    age(&it.entry.dir, DAY);
    let held = it.store.lock(&key("request").to_string(), &mut |_| panic!("it is free")).unwrap();
    assert_eq!(it.gc(&["--older-than", "1h"])["kept"][0]["why"], "a builder is at work on it");
    drop(held);
    assert_eq!(removed(&it.gc(&["--older-than", "1h"]), "entry").len(), 1);
}

#[test]
fn gc_sweeps_the_leavings_of_past_work_and_nothing_that_is_not_ours() {
    let it = fixture();
    let root = it.store.root().to_owned();
    let name = key("x").to_string();
    for (folder, old) in [("quarantine", true), ("spare", true), ("quarantine", false)] {
        let dir = root.join(folder).join(format!("{name}-{}", u8::from(old)));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("a.so"), "x").unwrap();
        age(&dir, if old { 2 * HOUR } else { HOUR / 2 });
    }
    let closure = fi_arch::store::Closure { files: Vec::new() };
    for request in ["request", "orphan", "young orphan"] {
        it.store.remember_closure(&key(request), &closure).unwrap();
        drop(it.store.lock(&key(request).to_string(), &mut |_| Ok(())).unwrap());
        let old = if request == "young orphan" { HOUR / 2 } else { DAY };
        age(&root.join(format!("closures/{}.json", key(request))), old);
        age(&root.join(format!("locks/{}.lock", key(request))), old);
    }
    let held = it.store.lock(&name, &mut |_| Ok(())).unwrap();
    age(&root.join(format!("locks/{name}.lock")), DAY);
    for stray in ["artifacts/notes.txt", "quarantine/notes.txt", "closures/notes.txt", "locks/notes.txt"] {
        fs::write(root.join(stray), "x").unwrap();
        age(&root.join(stray), 99 * DAY);
    }

    let report = it.gc(&[]);
    assert_eq!(removed(&report, "quarantine"), [format!("{name}-1")]);
    assert_eq!(removed(&report, "spare"), [format!("{name}-1")]);
    assert_eq!(removed(&report, "closure"), [key("orphan").to_string()], "that of a stored artifact stays");
    let mut locks = removed(&report, "lock");
    locks.sort();
    let mut expected = [key("request").to_string(), key("orphan").to_string()];
    expected.sort();
    assert_eq!(locks, expected);
    assert_eq!(it.names("quarantine").len(), 2);
    for folder in ["artifacts", "closures", "locks"] {
        assert!(it.names(folder).contains(&"notes.txt".to_owned()), "{folder}");
    }
    drop(held);
}

#[test]
fn no_builder_loses_what_it_was_just_handed_while_gc_runs() {
    let it = fixture();
    let names: Vec<String> = (0..200).map(|n| format!("entry {n}")).collect();
    names.iter().for_each(|name| drop(it.used_before(name, 40 * DAY)));
    let together = Barrier::new(5);
    let handed: usize = std::thread::scope(|scope| {
        let builder = |reverse: bool| {
            let (names, store, together) = (&names, &it.store, &together);
            move || {
                let memo = Memo::default();
                together.wait();
                let mut handed = Vec::new();
                for n in 0..names.len() {
                    let name = &names[if reverse { names.len() - 1 - n } else { n }];
                    if let Some(entry) = store.lookup(&key(name), &memo) {
                        assert_eq!(fs::read(&entry.artifact).unwrap(), CONTENT);
                        handed.push(entry);
                    }
                }
                std::thread::sleep(Duration::from_millis(100));
                assert!(handed.iter().all(|entry| entry.artifact.is_file()), "an entry that was handed out is gone");
                handed.len()
            }
        };
        let builders = [false, true, true].map(|reverse| scope.spawn(builder(reverse)));
        for _ in 0..2 {
            scope.spawn(|| {
                together.wait();
                let limits = fi_arch::store::Limits { older_than: Some(DAY), ..Default::default() };
                it.store.gc(&limits, &fi_arch::store::Held::default()).unwrap();
            });
        }
        builders.into_iter().map(|builder| builder.join().unwrap()).sum()
    });
    assert!(handed > 0, "the builders met some entry");
    it.store.entries().unwrap().iter().for_each(|summary| assert!(summary.entry.is_ok()));
}

#[test]
fn gc_of_no_store_frees_nothing_and_creates_nothing_and_one_that_cannot_be_written_says_so() {
    let home = tempfile::tempdir().unwrap();
    let output = fi_arch(home.path(), &["gc", "--wheels"]);
    assert!(output.status.success() && stdout(&output).contains("0 B freed"), "{output:?}");
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);

    let it = fixture();
    age(&it.entry.dir, 40 * DAY);
    let home = it.home.path().display();
    let said = Builder::within("gc", it.home.path(), &format!("mount --bind {home} {home} && mount -o remount,bind,ro {home}"));
    assert_eq!(said, ["3", "hint"]);
    assert_eq!(it.names("artifacts").len(), 1);
}

#[test]
fn gc_of_wheels_keeps_what_is_needed_or_in_use() {
    let it = fixture();
    let wheels = it.home.path().join("wheels");
    for (name, old) in [("flashinfer-python-0.5.3-aaaaaaaaaaaa", true), ("flashinfer-python-0.6.1-bbbbbbbbbbbb", false)] {
        fs::create_dir_all(wheels.join(name)).unwrap();
        fs::write(wheels.join(name).join("fi-arch.json"), "{}").unwrap();
        age(&wheels.join(name).join("fi-arch.json"), if old { DAY } else { HOUR / 2 });
    }
    fs::create_dir_all(wheels.join("mine")).unwrap();
    let old = "flashinfer-python-0.5.3-aaaaaaaaaaaa";
    assert_eq!(removed(&it.gc(&[]), "wheels"), [""; 0], "not unless it is asked for");
    let held = File::open(wheels.join(old).join("fi-arch.json")).unwrap();
    assert_eq!(removed(&it.gc(&["--wheels"]), "wheels"), [""; 0], "open");
    drop(held);
    assert_eq!(removed(&it.gc(&["--wheels", "--dry-run"]), "wheels"), [old]);
    let lock = it.store.lock(&key("request").to_string(), &mut |_| Ok(())).unwrap();
    assert!(it.gc(&["--wheels"])["wheels_kept"].is_string(), "a build is running");
    drop(lock);
    assert_eq!(removed(&it.gc(&["--wheels"]), "wheels"), [old]);
    let mut left: Vec<_> = fs::read_dir(&wheels).unwrap().map(|item| item.unwrap().file_name()).collect();
    left.retain(|name| !name.to_str().unwrap().ends_with(".lock"));
    left.sort();
    assert_eq!(left, ["flashinfer-python-0.6.1-bbbbbbbbbbbb", "mine"]);
}

// --- the command line ----------------------------------------------------------------------------------------------

#[test]
fn an_empty_store_is_right_and_says_so_and_looking_creates_nothing() {
    let home = tempfile::tempdir().unwrap();
    for verb in ["ls", "verify"] {
        let output = fi_arch(home.path(), &[verb]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(stdout(&output).contains("empty"), "{output:?}");
    }
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn ls_lists_entries_newest_first_and_does_not_hide_broken_ones() {
    let it = fixture();
    let second = publish(&it.store, key("b"), CONTENT).unwrap();
    let file = second.dir.join("manifest.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    value["created"] = "2001-01-01T00:00:00Z".into();
    overwrite(&file, seal_manifest(value).as_bytes());
    fs::create_dir(it.store.root().join("artifacts/stray")).unwrap();
    let output = it.cache(&["ls"]);
    assert_eq!(output.status.code(), Some(0));
    let text = stdout(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("KEY"), "{text}");
    assert!(lines[1].starts_with(&key("a").short()) && lines[1].contains("sm_120f"), "{text}");
    assert!(lines[2].starts_with(&key("b").short()) && lines[2].contains("2001-01-01 00:00"), "{text}");
    assert!(lines[3].starts_with("stray") && lines[3].contains("BROKEN"), "{text}");

    let listed = json(&it.cache(&["--json", "ls"]));
    assert_eq!(listed["entries"][0]["key"], key("a").to_string());
    assert_eq!(listed["entries"][0]["kernels"], 3);
    assert!(listed["entries"][2]["broken"].is_string());
}

#[test]
fn show_takes_the_head_of_one_key_and_names_the_candidates_of_any_other() {
    let it = fixture();
    let whole = key("a").to_string();
    let output = it.cache(&["show", &whole[..6].to_uppercase()]);
    assert_eq!(output.status.code(), Some(0));
    let text = stdout(&output);
    assert!(text.starts_with(&whole) && text.contains("open-gate") && text.contains("libcudart.so.13"), "{text}");
    let shown = json(&it.cache(&["show", &whole, "--json"]));
    assert_eq!(serde_json::from_value::<Manifest>(shown["manifest"].clone()).unwrap(), it.entry.manifest);

    publish(&it.store, key("b"), CONTENT).unwrap();
    for prefix in ["", "zz", "../"] {
        let output = it.cache(&["show", prefix]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains(&whole) && text.contains(&key("b").to_string()), "{text}");
    }
}

#[test]
fn verify_reads_every_artifact_anew_and_tells_which_is_broken() {
    let it = fixture();
    publish(&it.store, key("b"), CONTENT).unwrap();
    assert_eq!(it.cache(&["verify"]).status.code(), Some(0));
    overwrite(&it.entry.artifact, b"\x7fELF, or no");
    let output = it.cache(&["verify"]);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert!(text.contains(&format!("BROKEN  {}", key("a"))) && text.contains(&format!("pass    {}", key("b"))), "{text}");
    assert_eq!(it.cache(&["verify", &key("b").short()]).status.code(), Some(0));
    assert_eq!(it.cache(&["verify", "zz"]).status.code(), Some(2));
    let report = json(&it.cache(&["--json", "verify", &key("a").to_string()]));
    assert_eq!(report["verdict"], "fail");
    assert_eq!(report["problems"][0]["code"], "store-entry-broken");
    assert!(it.entry.dir.is_dir(), "verify looks, and moves nothing");
}

// --- builders as processes -----------------------------------------------------------------------------------------

const ROLE: &str = "FI_ARCH_TEST_ROLE";
const HOME: &str = "FI_ARCH_TEST_HOME";

/// A process of its own, which is this test binary in one of the roles below.
struct Builder {
    child: Child,
    stdin: ChildStdin,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    /// What stood behind the awaited words.
    said: Vec<String>,
}

fn in_role(mut command: Command, role: &str, home: &Path) -> Command {
    command.env(ROLE, role).env(HOME, home).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// The arguments that make this test binary a builder.
const AS_BUILDER: [&str; 4] = ["store::a_builder_of_its_own", "--exact", "--ignored", "--nocapture"];

impl Builder {
    fn start(role: &str, home: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(AS_BUILDER);
        let mut child = in_role(command, role, home).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { stdin: child.stdin.take().unwrap(), child, lines, said: Vec::new() }
    }

    fn wait_for(&mut self, word: &str) {
        for line in &mut self.lines {
            if let Some(rest) = line.unwrap().strip_prefix(&format!("> {word}")) {
                self.said.push(rest.trim().to_owned());
                return;
            }
        }
        panic!("the builder ended before it said {word}");
    }

    fn say(&mut self, word: &str) {
        writeln!(self.stdin, "{word}").unwrap();
    }

    /// SIGKILL: no destructor, no handler.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn ends_well(mut self) {
        drop(self.stdin);
        self.lines.for_each(drop);
        assert!(self.child.wait().unwrap().success());
    }

    /// Runs a builder to its end in a mount namespace of its own, after the shell commands `mounts`. Returns what it said.
    fn within(role: &str, home: &Path, mounts: &str) -> Vec<String> {
        let ways = [["unshare", "--mount"].as_slice(), &["unshare", "--mount", "--map-root-user"]];
        let works = |way: &&&[&str]| {
            let mut command = Command::new(way[0]);
            command.args(&way[1..]).args(["sh", "-c", "mount -t tmpfs none /mnt"]).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        let way = ways.iter().find(works).expect(
            "this test needs a mount namespace: run it as root, or where users may make namespaces (unshare --mount --map-root-user)",
        );
        let mut command = Command::new(way[0]);
        command.args(&way[1..]).args(["sh", "-c", &format!("{mounts} && exec \"$0\" \"$@\"")]);
        command.arg(std::env::current_exe().unwrap()).args(AS_BUILDER);
        let output = in_role(command, role, home).stderr(Stdio::piped()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        stdout(&output).lines().filter_map(|line| line.strip_prefix("> ")).map(str::to_owned).collect()
    }
}

#[test]
#[ignore = "no test: the process that other tests start"]
fn a_builder_of_its_own() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let home = PathBuf::from(std::env::var(HOME).unwrap());
    // The test runner has begun a line of its own.
    println!();
    let say = |words: &str| println!("> {words}");
    let say_error = |error: fi_arch::error::Error| {
        say(&(error.exit() as u8).to_string());
        say(if error.hints().is_empty() { "no hint" } else { "hint" });
    };
    let wait = || {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
    };
    let store = match Store::open(&home) {
        Ok(store) => store,
        Err(error) => return say_error(error),
    };
    match role.as_str() {
        "open" => say("opened"),
        "publish" => {
            let entry = publish(&store, key("a"), CONTENT).unwrap();
            assert_eq!(fs::read(entry.artifact).unwrap(), CONTENT);
            say("published");
        }
        "publish-on-word" => {
            say("ready");
            wait();
            publish(&store, key("a"), CONTENT).unwrap();
            say("published");
        }
        "publish-for-ever" => {
            say("ready");
            // It is killed long before; but should its test fail first, it ends by itself.
            for n in 0..5000 {
                let name = format!("{} {n}", std::process::id());
                // Large enough that a kill often falls into a write.
                publish(&store, key(&name), name.repeat(20_000).as_bytes()).unwrap();
            }
        }
        "stop-in-the-middle" => {
            let staging = store.staging().unwrap();
            let entry = staging.path().join("entry");
            fs::create_dir(&entry).unwrap();
            fs::write(entry.join("manifest.json"), &serde_json::to_vec(&manifest(key("a"), CONTENT)).unwrap()[..99]).unwrap();
            fs::write(entry.join("trtllm_comm.so"), &CONTENT[..4]).unwrap();
            say(&format!("half {}", staging.path().display()));
            wait();
        }
        "hold-lock" => {
            let _lock = store.lock("work", &mut |_| Ok(())).unwrap();
            say("locked");
            wait();
        }
        "read-only" => {
            say(if store.lookup(&key("a"), &Memo::load(&home)).is_some() { "hit" } else { "miss" });
            say_error(publish(&store, key("b"), CONTENT).unwrap_err());
        }
        "gc" => {
            let limits = fi_arch::store::Limits { older_than: Some(DAY), ..Default::default() };
            say_error(store.gc(&limits, &Default::default()).unwrap_err());
        }
        "fill-disk" => {
            let staging = store.staging().unwrap();
            let artifact = staging.path().join("built.so");
            fs::write(&artifact, CONTENT).unwrap();
            let filler = home.join("filler");
            let mut file = File::create(&filler).unwrap();
            while file.write_all(&[0; 4096]).is_ok() {}
            drop(file);
            say_error(store.publish(&key("a"), &artifact, &manifest(key("a"), CONTENT), None).unwrap_err());
            say(&format!("{} entries", store.entries().unwrap().len()));
            assert_eq!(fs::read_dir(staging.path()).unwrap().count(), 1, "no half entry takes room, and the artifact stays");
            fs::remove_file(filler).unwrap();
            store.publish(&key("a"), &artifact, &manifest(key("a"), CONTENT), None).unwrap();
            say("published after room was made");
        }
        other => panic!("no role {other}"),
    }
}
