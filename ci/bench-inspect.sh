#!/bin/sh
# Times `fi-arch inspect` as a whole process beside `cuobjdump -sass` on the same file, and prints both and their ratio.
#
#   ci/bench-inspect.sh FILE [RUNS]
#
# CUOBJDUMP names the disassembler (else it is looked for on PATH), FI_ARCH the binary (else target/release/fi-arch, built first).
# Both read a file that is in the page cache; fi-arch runs RUNS times (default 20), cuobjdump once, since it takes many seconds.
set -eu

file=${1:?"usage: ci/bench-inspect.sh FILE [RUNS]"}
runs=${2:-20}
cuobjdump=${CUOBJDUMP:-cuobjdump}
command -v "$cuobjdump" >/dev/null || { echo "error: no cuobjdump; set CUOBJDUMP" >&2; exit 3; }
# It calls nvdisasm by its bare name.
PATH=$(dirname "$(command -v "$cuobjdump")"):$PATH
export PATH

if [ -z "${FI_ARCH:-}" ]; then
    cargo build --release --quiet
    FI_ARCH=target/release/fi-arch
fi

exec python3 - "$FI_ARCH" "$cuobjdump" "$file" "$runs" <<'PYTHON'
import json, statistics, subprocess, sys, time

fi_arch, cuobjdump, path, runs = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])


def timed(command):
    start = time.perf_counter()
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return time.perf_counter() - start, result


_, first = timed([fi_arch, "inspect", "--json", path])
if first.returncode not in (0, 1):
    sys.exit(first.stderr.decode())
images = json.loads(first.stdout)["files"][0]["images"]
ours = sum(image["kernels"] for image in images if image["kind"] == "sass")

times = sorted(timed([fi_arch, "inspect", "--json", path])[0] for _ in range(runs))
theirs_s, result = timed([cuobjdump, "-sass", path])
if result.returncode:
    sys.exit(result.stderr.decode())
theirs = result.stdout.count(b"Function : ")

median = statistics.median(times)
print(f"fi-arch inspect   median {median * 1000:.1f} ms, least {times[0] * 1000:.1f} ms, most {times[-1] * 1000:.1f} ms ({runs} runs)")
print(f"cuobjdump -sass   {theirs_s:.2f} s")
print(f"ratio             {theirs_s / median:.0f}")
print(f"kernels           {ours} and {theirs}")
if ours != theirs:
    sys.exit("error: the two do not see the same kernels")
PYTHON
