#!/bin/sh
# Proves an artifact on this machine's GPUs: the steps of ci/blackwell.yml, one by one or all of them, on any machine with a GPU.
#
#   ci/gpu-smoke.sh all                   build, install, verify, smoke, bench
#   ci/gpu-smoke.sh STEP                  one of these
#   ci/gpu-smoke.sh ARTIFACT [options of `fi-arch smoke`, such as --quick, --transport inproc, --junit FILE]
#                                         that file alone, wherever it comes from
#
# FI_ARCH        the binary [default: target/release/fi-arch]
# GPU_ENV        a Python environment with FlashInfer and torch; `install` changes it [default: the active one, VIRTUAL_ENV]
# GPU_TARGET     the target, such as 120 [default: that of the first GPU, as nvidia-smi tells it]
# GPU_OUT        where results go: junit.xml, smoke.json, bench.json, bench.html, policy.toml [default: target/gpu]
# GPU_BASELINES  where bench keeps one baseline for each GPU, driver and topology [default: GPU_OUT/baselines]
# GPU_TOLERANCE  by how much a figure may exceed its baseline, in percent [default: 10]
#
# The third form needs neither Python nor torch: a GPU, its driver, and libtvm_ffi.so (from --tvm-ffi, --env, the active environment
# or an earlier build).
# Ends with 0 when all is right, 1 when a number is wrong or a figure fell behind its baseline, 2 on a wrong command line, 3 when the
# machine lacks something; other codes are those of fi-arch (README).
set -eu

root=$(CDPATH='' cd -- "$(dirname "$0")/.." && pwd)
binary=${FI_ARCH:-$root/target/release/fi-arch}
out=${GPU_OUT:-$root/target/gpu}
baselines=${GPU_BASELINES:-$out/baselines}

lacks() {
    echo "error: $1" >&2
    exit 3
}

[ $# -gt 0 ] || {
    echo "error: name a step (all, build, install, verify, smoke, bench) or an artifact" >&2
    exit 2
}
[ -x "$binary" ] || lacks "no $binary; build it (cargo build --release) or name one with FI_ARCH"

environment() {
    env=${GPU_ENV:-${VIRTUAL_ENV:-}}
    [ -n "$env" ] || lacks "no Python environment; activate one or name it with GPU_ENV"
}

target() {
    [ -n "${GPU_TARGET:-}" ] && return
    GPU_TARGET=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
    [ -n "$GPU_TARGET" ] || lacks "nvidia-smi tells no GPU; name the target with GPU_TARGET"
}

step_build() {
    environment && target
    "$binary" build --sm "$GPU_TARGET" --env "$env"
}

step_install() {
    environment && target
    "$binary" install --sm "$GPU_TARGET" --env "$env"
}

step_verify() {
    environment && target
    "$binary" verify --sm "$GPU_TARGET" --env "$env"
}

step_smoke() {
    environment
    mkdir -p "$out"
    "$binary" smoke --env "$env" --junit "$out/junit.xml" --json >"$out/smoke.json"
}

step_bench() {
    environment
    gpus=$(nvidia-smi --list-gpus | wc -l)
    if [ "$gpus" -lt 2 ]; then
        echo "bench: left out: it takes a GPU for each of at least 2 ranks, and there is $gpus" >&2
        return
    fi
    mkdir -p "$out" "$baselines"
    "$binary" bench --env "$env" --html "$out/bench.html" --write-policy "$out/policy.toml" \
        --baseline "$baselines" --tolerance "${GPU_TOLERANCE:-10}" --json >"$out/bench.json"
}

case $1 in
all)
    for step in build install verify smoke bench; do
        echo "== $step" >&2
        "step_$step"
    done
    ;;
build | install | verify | smoke | bench) "step_$1" ;;
*) exec "$binary" smoke "$@" ;;
esac
