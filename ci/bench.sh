#!/usr/bin/env bash
# Times what people wait for, each beside its peer in the same run, and prints ratios. Nothing here is a test.
#
#   ci/bench.sh [RUNS]           default 20
#
#   warm build   `fi-arch build --sm 120` answered from the store, as a whole process; beside the cold build that filled it (the
#                time that its manifest records) and beside the start of a bare Python
#   inspect      `fi-arch inspect` of the finished artifact, as a whole process; beside `cuobjdump -sass` of the same file,
#                which runs once, since it takes many seconds; the kernel counts must be equal
#   verify       `fi-arch verify` of the environment in FI_ARCH_BENCH_ENV (with `fi-arch install` in it), as a whole process, with what
#                it remembers and with nothing remembered; beside `import flashinfer` by that environment's Python, which runs
#                once. Left out, and said so, where the variable is unset
#
# Uses the store in FI_ARCH_HOME and builds there first (minutes) when it is empty. cuobjdump comes from CUOBJDUMP, PATH, or wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${1:-20}
cargo build --release --quiet
fi_arch=target/release/fi-arch
"$fi_arch" build --sm 120 >/dev/null

cuobjdump=${CUOBJDUMP:-$(command -v cuobjdump || true)}
if [ -z "$cuobjdump" ]; then
    tools=target/bench-tools
    [ -x "$tools/nvidia/cu13/bin/cuobjdump" ] || python3 -m pip install --quiet --disable-pip-version-check --no-deps \
        --root-user-action=ignore --target "$tools" nvidia-cuda-cuobjdump==13.2.78 nvidia-cuda-nvdisasm==13.2.78
    cuobjdump=$PWD/$tools/nvidia/cu13/bin/cuobjdump
fi
# It calls nvdisasm by its bare name.
PATH=$(dirname "$cuobjdump"):$PATH
export PATH

exec python3 - "$fi_arch" "$cuobjdump" "$runs" <<'PYTHON'
import json, os, shutil, statistics, subprocess, sys, tempfile, time

fi_arch, cuobjdump, runs = sys.argv[1], sys.argv[2], int(sys.argv[3])


def timed(command, env=None):
    start = time.perf_counter()
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    return time.perf_counter() - start, result


def must(command):
    _, result = timed(command)
    if result.returncode:
        sys.exit(result.stderr.decode())
    return result.stdout


def ms(times):
    low, mid, high = min(times), statistics.median(times), max(times)
    return f"median {mid * 1e3:.1f} ms, least {low * 1e3:.1f}, most {high * 1e3:.1f} ({len(times)} runs)"


build = [fi_arch, "build", "--sm", "120", "--json"]
# The first answers let the memory of digests settle: a file younger than two seconds is not remembered.
for _ in range(3):
    built = json.loads(must(build))
    time.sleep(1)
if built["cache"] != "hit":
    sys.exit("error: the build is not answered from the store")
with open(os.path.join(os.path.dirname(built["artifact"]), "manifest.json")) as file:
    cold = json.load(file)["elapsed_s"]
# In turn, so that a change of the machine's load meets both.
warm, bare = [], []
for _ in range(runs):
    warm.append(timed(build)[0])
    bare.append(timed([sys.executable, "-I", "-S", "-c", "pass"])[0])
print(f"cores            {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")
print(f"warm build       {ms(warm)}")
print(f"  bare Python    {ms(bare)}; ratio {statistics.median(warm) / statistics.median(bare):.2f}")
print(f"  cold build     {cold:.1f} s (recorded); ratio {cold / statistics.median(warm):.0f}")

inspect = [fi_arch, "inspect", "--json", built["artifact"]]
images = json.loads(must(inspect))["files"][0]["images"]
ours = sum(image["kernels"] for image in images if image["kind"] == "sass")
times = [timed(inspect)[0] for _ in range(runs)]
theirs_s, result = timed([cuobjdump, "-sass", built["artifact"]])
if result.returncode:
    sys.exit(result.stderr.decode())
theirs = result.stdout.count(b"Function : ")
print(f"inspect          {ms(times)}, of {os.path.getsize(built['artifact']) / 1e6:.1f} MB")
print(f"  cuobjdump      {theirs_s:.2f} s; ratio {theirs_s / statistics.median(times):.0f}; kernels {ours} and {theirs}")
if ours != theirs:
    sys.exit("error: the two do not see the same kernels")

env = os.environ.get("FI_ARCH_BENCH_ENV")
if env is None:
    print("verify           not timed: FI_ARCH_BENCH_ENV names no environment")
else:
    verify = [fi_arch, "verify", "--sm", "120", "--json", "--env", env]
    for _ in range(3):
        proof = json.loads(must(verify))
        time.sleep(1)
    warm = [timed(verify)[0] for _ in range(runs)]
    with tempfile.TemporaryDirectory() as home:
        fresh = dict(os.environ, FI_ARCH_HOME=os.path.join(home, "none"))
        cold = []
        for _ in range(runs):
            shutil.rmtree(fresh["FI_ARCH_HOME"], ignore_errors=True)
            cold.append(timed(verify, fresh)[0])
    imported, result = timed([os.path.join(env, "bin", "python"), "-c", "import flashinfer"])
    if result.returncode:
        sys.exit(result.stderr.decode())
    print(f"verify           {ms(warm)}; {proof['verdict']}, mode {proof['mode']}, {len(proof['files'])} files")
    print(f"  no memory      {ms(cold)}")
    print(f"  the import     {imported:.2f} s; ratio {imported / statistics.median(warm):.0f}")
PYTHON
