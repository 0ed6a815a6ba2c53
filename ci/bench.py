"""The rows of ci/bench.sh.

  cold      `fi-arch build` of trtllm_comm with an empty store, everything fetched; beside FlashInfer's own three nvcc commands
            and its link through ninja, from the same files: wall and CPU time, peak memory, and whether the kernels are the same
  ranks     16 builders of an empty store at once: how many compile, how long after the first the last is done; beside 16 processes
            that call FlashInfer's own JIT, with its file lock
  warm      `fi-arch build` answered from the store, a whole process; beside a bare Python, and beside the three rows below
  ccache    the same commands through ccache (direct mode) and their link, everything in its cache
  sccache   the same through sccache
  import    `import flashinfer`, then ninja with nothing to do: what FlashInfer itself needs to load a built module
  inspect   `fi-arch inspect` of the artifact, a whole process; beside `cuobjdump -sass` of it, once
  verify    `fi-arch verify` of an environment, with what it remembers and without; beside `import flashinfer` there, once

Variables: FI_ARCH (the binary), FI_ARCH_BENCH_RUNS (20; of the quick rows), FI_ARCH_BENCH_TURNS (1; of the rows that compile),
FI_ARCH_BENCH_RELEASE (0.7.4: no edit, so that both sides compile the same text), FI_ARCH_BENCH_SM (120), FI_ARCH_BENCH_ARGS (more
arguments of `build`, such as --toolkit; with --env the release is the one there), FI_ARCH_BENCH_ENV (an environment with FlashInfer,
torch and `fi-arch install` in it; without it `import`, `verify` and the JIT of `ranks` are left out), CUOBJDUMP.
"""

import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

FI_ARCH = os.environ["FI_ARCH"]


def count(name, default):
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        sys.exit(f"error: {name}={text} is no number of runs: 1 or more")
    return int(text)


RUNS = count("FI_ARCH_BENCH_RUNS", 20)
TURNS = count("FI_ARCH_BENCH_TURNS", 1)
RELEASE = os.environ.get("FI_ARCH_BENCH_RELEASE", "0.7.4")
ENV = os.environ.get("FI_ARCH_BENCH_ENV")
SM = os.environ.get("FI_ARCH_BENCH_SM", "120")
ARGS = shlex.split(os.environ.get("FI_ARCH_BENCH_ARGS", ""))
BUILD = [FI_ARCH, "build", "--sm", SM, "--json"] + ARGS + ([] if "--env" in ARGS else ["--flashinfer", RELEASE])
OFFLINE = [] if "--offline" in ARGS else ["--offline"]
ROWS = ["cold", "ranks", "warm", "ccache", "sccache", "import", "inspect", "verify"]


def timed(command, env=None, cwd=None):
    """Seconds, and the finished process."""
    start = time.perf_counter()
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=cwd)
    return time.perf_counter() - start, result


def must(command, env=None, cwd=None):
    seconds, result = timed(command, env, cwd)
    if result.returncode:
        sys.exit(f"error: {shlex.join(map(str, command))[:300]}\n{(result.stderr or result.stdout).decode()[-3000:]}")
    return seconds, result.stdout


def ms(times):
    return f"median {statistics.median(times) * 1e3:.1f} ms, least {min(times) * 1e3:.1f}, most {max(times) * 1e3:.1f} ({len(times)} runs)"


def say(name, text):
    print(f"{name:<16} {text}", flush=True)


def not_run(name, why):
    say(name, f"not run: {why}")


def ratio(theirs, ours):
    return f"{statistics.median(theirs) / statistics.median(ours):.1f} x ours"


# --- what FlashInfer itself would run ---------------------------------------------------------------------------------------


class Peer:
    """A folder in which FlashInfer's commands for the release run; ci/check-recipes.sh holds these against its own generator."""

    def __init__(self, dir):
        self.dir = Path(dir)
        _, out = must(BUILD + ["--dry-run", "--jobs", "1"])
        dry = json.loads(out)
        if not dry["commands"]:
            sys.exit("error: there is no toolkit yet: run `fi-arch build` first")
        for name, to in dry["folders"].items():
            (self.dir / name).symlink_to(to)
        (self.dir / "obj").mkdir()
        *compile, link = [self.theirs(words) for words in dry["commands"]]
        self.compile, self.link, self.edits = compile, link, dry["edits"]

    @staticmethod
    def theirs(words):
        words, out = iter(words), []
        for word in words:
            if word in ("-include", "--keep-dir", "-Xcudafe"):
                next(words)
            elif word == "-isystem":
                dir = next(words)
                if not dir.startswith("overlay/") and dir != "data/include/flashinfer/comm":
                    out += [word, dir]
            elif word == "-O1":
                out.append("-O3")
            elif word == "@host":
                out.append(shutil.which(os.environ.get("CXX", "c++")))
            elif word != "--keep":
                out.append(word.replace("overlay/csrc", "data/csrc"))
        return out

    def ninja(self, rules=""):
        """Writes the ninja file, `rules` in each of its rules, and returns the command."""
        text, objects = "", []
        for at, words in enumerate(self.compile):
            out = words[words.index("-o") + 1]
            objects.append(out)
            text += f"rule c{at}\n  command = {shlex.join(words)}\n{rules}build {out}: c{at}\n"
        text += f"rule link\n  command = {shlex.join(self.link)}\n{rules}build {self.link[-1]}: link {' '.join(objects)}\n"
        (self.dir / "build.ninja").write_text(text)
        return ["ninja", "-C", str(self.dir)]

    def clean(self):
        shutil.rmtree(self.dir / "obj")
        (self.dir / "obj").mkdir()
        for file in (self.dir / self.link[-1], self.dir / ".ninja_log", self.dir / ".ninja_deps"):
            file.unlink(missing_ok=True)


class Watched:
    """Runs a command to its end: wall and CPU seconds, and the most memory that it and its children held at once, in MiB."""

    def __init__(self, command, env=None):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, start_new_session=True)
        self.peak_mib = 0
        done = threading.Event()
        watcher = threading.Thread(target=self.watch, args=(process.pid, done))
        watcher.start()
        self.out, err = process.communicate()
        self.wall = time.perf_counter() - start
        done.set()
        watcher.join()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if process.returncode:
            sys.exit(f"error: {shlex.join(command)[:300]}\n{(err or self.out).decode()[-3000:]}")

    def watch(self, leader, done):
        # By parent, not by session or group: fi-arch gives each compiler a group of its own.
        while not done.wait(0.1):
            parent, resident = {}, {}
            for entry in os.scandir("/proc"):
                if entry.name.isdigit():
                    try:
                        fields = Path(entry.path, "stat").read_text().rsplit(")", 1)[1].split()
                    except OSError:
                        continue
                    parent[int(entry.name)], resident[int(entry.name)] = int(fields[1]), int(fields[21])

            def ours(pid):
                while pid not in (0, leader):
                    pid = parent.get(pid, 0)
                return pid == leader

            pages = sum(size for pid, size in resident.items() if ours(pid))
            self.peak_mib = max(self.peak_mib, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    def text(self):
        return f"{self.wall:.1f} s wall, {self.cpu:.1f} s CPU, peak {self.peak_mib:.0f} MiB"


def empty_home(dir):
    """A home with all that is fetched, and nothing built."""
    home = Path(os.environ.get("FI_ARCH_HOME") or Path.home() / ".cache/fi-arch")
    Path(dir).mkdir()
    wheels = home / "wheels"
    if wheels.is_dir():
        (Path(dir) / "wheels").symlink_to(wheels.resolve())
    return dict(os.environ, FI_ARCH_HOME=str(dir))


def manifest_of(artifact):
    return json.loads(Path(artifact).with_name("manifest.json").read_text())


# --- the rows ---------------------------------------------------------------------------------------------------------------


def cold(scratch):
    if not shutil.which("ninja"):
        return not_run("cold build", "ninja is not on the PATH")
    peer = Peer(tempfile.mkdtemp(dir=scratch))
    ninja = peer.ninja()
    theirs, ours = [], []
    for turn in range(TURNS):
        peer.clean()
        theirs.append(Watched(ninja))
        say("cold, ninja", theirs[-1].text())
        home = empty_home(f"{scratch}/cold-{turn}")
        ours.append(Watched(BUILD + OFFLINE, home))
        built = json.loads(ours[-1].out)
        say("cold, fi-arch", f"{ours[-1].text()}; {manifest_of(built['artifact'])['units']} units, verdict {built['verdict']}")

    def share(what):
        """The median of the turns' ratios, and the least and the most of several."""
        shares = [getattr(our, what) / getattr(their, what) for our, their in zip(ours, theirs)]
        spread = f" ({min(shares):.2f} to {max(shares):.2f})" if TURNS > 1 else ""
        return f"{statistics.median(shares):.2f}{spread}"

    say("  ratio", f"wall {share('wall')}, CPU {share('cpu')}, peak memory {share('peak_mib')} x ninja's")
    if peer.edits:
        say("  note", f"{RELEASE} is edited: ninja compiles the sources as they are, which is less work where kernels are hollow")
    say("  kernels", kernels_beside(built["artifact"], peer.dir / peer.link[-1]))


def kernels_beside(ours, theirs):
    """How many kernels are the same in two artifacts, in words."""
    # Its exit code says whether anything differs; a plain build of sources that are edited does.
    _, result = timed([FI_ARCH, "inspect", "--json", str(ours), "--against", str(theirs)])
    if result.returncode not in (0, 1):
        sys.exit(f"error: the kernels cannot be compared\n{result.stderr.decode()[-3000:]}")
    against = json.loads(result.stdout)["files"][0]["against"]
    differs = {}
    for one in against["differences"]:
        differs.setdefault((one["target"], one["kernel"]), set()).add(one["what"])
    resources = sum(whats == {"resources"} for whats in differs.values())
    return f"{against['equal_kernels']} equal; {resources} with the same code and other resources; {len(differs) - resources} differ"


def sixteen(one):
    """Seconds until each of 16 that run at once is done, from the first on, and what each returned."""
    start, ends = time.perf_counter(), []

    def run():
        returned = one()
        ends.append((time.perf_counter() - start, returned))

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends.sort(key=lambda end: end[0])
    text = f"the first is done after {ends[0][0]:.2f} s, the last {ends[-1][0] - ends[0][0]:.3f} s later"
    return text, [returned for _, returned in ends]


def ranks(scratch):
    for turn in range(TURNS):
        env = empty_home(f"{scratch}/ranks-{turn}")
        text, results = sixteen(lambda: timed(BUILD + OFFLINE, env)[1])
        compiles = sum(json.loads(result.stdout or "{}").get("cache") == "miss" for result in results)
        failed = sum(result.returncode != 0 for result in results)
        say("16 builders", f"{compiles} compiles, {failed} failed; {text}")
        jits(f"{scratch}/jits-{turn}")


JIT = """
from flashinfer.jit.comm import gen_trtllm_comm_module
gen_trtllm_comm_module().build_and_load()
"""


def jits(scratch):
    """FlashInfer's own JIT in 16 processes with an empty cache."""
    if ENV is None:
        return not_run("  16 JITs", "FI_ARCH_BENCH_ENV names no environment")
    python = os.path.join(ENV, "bin", "python")
    version = must([python, "-c", "from importlib.metadata import version; print(version('flashinfer-python'))"])[1].decode().strip()
    if version != RELEASE:
        return not_run("  16 JITs", f"the environment has FlashInfer {version}")
    _, out = must(BUILD + ["--dry-run", "--jobs", "1"])
    dry = json.loads(out)
    if dry["edits"] and SM.startswith("12"):
        return not_run("  16 JITs", f"FlashInfer {RELEASE} refuses SM {SM}")
    # The folder that FlashInfer links with is named as a toolkit has it, not as wheels do.
    cuda, home = Path(dry["folders"]["cuda"]), Path(scratch, "cuda")
    (home / "lib64/stubs").mkdir(parents=True)
    for entry in cuda.iterdir():
        if entry.name != "lib64":
            (home / entry.name).symlink_to(entry)
    for library in (cuda / "lib").iterdir():
        (home / "lib64" / library.name).symlink_to(library)
        if library.name.startswith("libcudart.so."):
            (home / "lib64/libcudart.so").symlink_to(library)
    must(["c++", "-shared", "-o", str(home / "lib64/stubs/libcuda.so"), "-Wl,-soname,libcuda.so.1", "-x", "c++", "/dev/null"])
    arch = dry["target"].removeprefix("sm_")
    digits = arch.rstrip("af")
    env = dict(
        os.environ,
        CUDA_HOME=str(home),
        FLASHINFER_WORKSPACE_BASE=scratch,
        FLASHINFER_CUDA_ARCH_LIST=f"{digits[:-1]}.{digits[-1]}{arch[len(digits):]}",
    )
    text, results = sixteen(lambda: timed([python, "-c", JIT], env)[1])
    bad = [result.stderr for result in results if result.returncode]
    if len(bad) == len(results):
        return not_run("  16 JITs", f"it fails here: {bad[0].decode()[-300:]}")
    say("  16 JITs", f"{len(bad)} failed; {text}")


def settled():
    """An answer from the store, once the memory of digests has settled: a file younger than two seconds is not remembered."""
    for _ in range(3):
        _, out = must(BUILD)
        time.sleep(1)
    built = json.loads(out)
    if built["cache"] != "hit":
        sys.exit("error: the build is not answered from the store")
    return built


def warm(scratch):
    built = settled()
    warm, bare = [], []
    for _ in range(RUNS):
        warm.append(must(BUILD)[0])
        bare.append(must([sys.executable, "-I", "-S", "-c", "pass"])[0])
    say("warm build", ms(warm))
    say("  bare Python", f"{ms(bare)}; {statistics.median(warm) / statistics.median(bare):.2f} x as long")
    say("  its cold build", f"{manifest_of(built['artifact'])['elapsed_s']:.1f} s, as its manifest says")


def cached(name, env, scratch):
    """A compiler cache, everything in it: the three commands side by side, then the link."""
    if not shutil.which(name):
        return not_run(name, f"{name} is not on the PATH")
    peer = Peer(tempfile.mkdtemp(dir=scratch))
    env = dict(os.environ, **env)
    # As these caches know them: with the long names they run the compiler.
    short = {"--generate-dependencies-with-compile": "-MD", "--dependency-output": "-MF"}
    commands = [[name] + [short.get(word, word) for word in words] for words in peer.compile]

    def build():
        for file in (peer.dir / "obj").iterdir():
            file.unlink()
        start = time.perf_counter()
        running = [
            subprocess.Popen(words, cwd=peer.dir, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for words in commands
        ]
        outs = [(process.communicate()[0], process.returncode) for process in running]
        linked = subprocess.run(peer.link, cwd=peer.dir, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        seconds = time.perf_counter() - start
        bad = [out for out, code in outs + [(linked.stdout, linked.returncode)] if code]
        if bad:
            raise RuntimeError(bad[0].decode()[-300:])
        return seconds

    try:
        fill, first = build(), build()
        if first > fill / 4:
            return not_run(name, f"it caches none of these commands: {fill:.1f} s, and {first:.1f} s once more")
        times, beside = [], []
        for _ in range(RUNS):
            times.append(build())
            beside.append(must(BUILD)[0])
    except RuntimeError as error:
        return not_run(name, f"it does not take these commands: {error}")
    stats = subprocess.run([name, "-s"], env=env, capture_output=True, text=True).stdout
    hits = next((line.strip() for line in stats.splitlines() if "Direct" in line or "Cache hits  " in line), "")
    say(name, f"{ms(times)}; filled in {fill:.1f} s; {hits}")
    say("  ours, in turn", f"{ms(beside)}; {ratio(times, beside)}")


def ccache(scratch):
    settled()
    env = {"CCACHE_DIR": f"{scratch}/ccache", "CCACHE_DIRECT": "1", "CCACHE_MAXSIZE": "5G"}
    cached("ccache", env, scratch)


def sccache(scratch):
    settled()
    env = {"SCCACHE_DIR": f"{scratch}/sccache", "SCCACHE_SERVER_PORT": "14226", "SCCACHE_IDLE_TIMEOUT": "600"}
    cached("sccache", env, scratch)
    if shutil.which("sccache"):
        subprocess.run(["sccache", "--stop-server"], env=dict(os.environ, **env), capture_output=True)


def import_(scratch):
    if ENV is None:
        return not_run("import + ninja", "FI_ARCH_BENCH_ENV names no environment")
    peer = Peer(tempfile.mkdtemp(dir=scratch))
    # Without a log ninja takes what is there for out of date, but for what a "generator" made: there it goes by time stamps.
    for words in peer.compile:
        (peer.dir / words[words.index("-o") + 1]).touch()
    (peer.dir / peer.link[-1]).touch()
    ninja = peer.ninja("  generator = 1\n")
    _, said = must(ninja)
    if b"no work to do" not in said:
        sys.exit(f"error: ninja had something to do: {said.decode()[-300:]}")
    settled()
    times, beside = [], []
    for _ in range(min(RUNS, 5)):
        start = time.perf_counter()
        must([os.path.join(ENV, "bin", "python"), "-c", "import flashinfer"])
        must(ninja)
        times.append(time.perf_counter() - start)
        beside.append(must(BUILD)[0])
    say("import + ninja", f"{ms(times)}; {ratio(times, beside)}")


def inspect(scratch):
    built = settled()
    cuobjdump = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
    if not cuobjdump:
        tools = Path("target/bench-tools").resolve()
        cuobjdump = str(tools / "nvidia/cu13/bin/cuobjdump")
        if not os.path.exists(cuobjdump):
            packages = ["nvidia-cuda-cuobjdump==13.2.78", "nvidia-cuda-nvdisasm==13.2.78"]
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            must(pip + ["--root-user-action=ignore", "--target", str(tools)] + packages)
    command = [FI_ARCH, "inspect", "--json", built["artifact"]]
    images = json.loads(must(command)[1])["files"][0]["images"]
    ours = sum(image["kernels"] for image in images if image["kind"] == "sass")
    times = [must(command)[0] for _ in range(RUNS)]
    # It calls nvdisasm by its bare name.
    env = dict(os.environ, PATH=f"{os.path.dirname(cuobjdump)}:{os.environ['PATH']}")
    seconds, out = must([cuobjdump, "-sass", built["artifact"]], env)
    theirs = out.count(b"Function : ")
    say("inspect", f"{ms(times)}, of {os.path.getsize(built['artifact']) / 1e6:.1f} MB")
    say("  cuobjdump", f"{seconds:.2f} s; {ratio([seconds], times)}; kernels {ours} and {theirs}")
    if ours != theirs:
        sys.exit("error: the two do not see the same kernels")


def verify(scratch):
    if ENV is None:
        return not_run("verify", "FI_ARCH_BENCH_ENV names no environment")
    command = [FI_ARCH, "verify", "--sm", "120", "--json", "--env", ENV]
    for _ in range(3):
        _, result = timed(command)
        time.sleep(1)
    proof = json.loads(result.stdout)
    warm, cold = [], []
    for turn in range(RUNS):
        warm.append(timed(command)[0])
        cold.append(timed(command, dict(os.environ, FI_ARCH_HOME=f"{scratch}/verify-{turn}"))[0])
    seconds, _ = must([os.path.join(ENV, "bin", "python"), "-c", "import flashinfer"])
    say("verify", f"{ms(warm)}; {proof['verdict']}, mode {proof['mode']}, {len(proof['files'])} files")
    say("  no memory", ms(cold))
    say("  the import", f"{seconds:.2f} s; {ratio([seconds], warm)}")


def main():
    global RELEASE
    asked = sys.argv[1:] or ROWS
    unknown = [name for name in asked if name not in ROWS]
    if unknown:
        sys.exit(f"error: no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if ENV is not None and not os.access(os.path.join(ENV, "bin", "python"), os.X_OK):
        sys.exit(f"error: FI_ARCH_BENCH_ENV={ENV} is no environment: it has no bin/python")
    RELEASE = json.loads(must(BUILD + ["--dry-run"])[1])["flashinfer"]
    say("machine", f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; FlashInfer {RELEASE}, {BUILD[2]} {BUILD[3]}")
    rows = dict(zip(ROWS, (cold, ranks, warm, ccache, sccache, import_, inspect, verify)))
    with tempfile.TemporaryDirectory(prefix="fi-arch-bench-") as scratch:
        for name in asked:
            rows[name](scratch)


main()
