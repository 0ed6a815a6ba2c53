#!/bin/sh
# Runs every function of an artifact on this machine's GPUs and compares every number with a float64 reference.
#
#   ci/gpu-smoke.sh ARTIFACT [options of `fi-arch smoke`, such as --quick, --transport inproc, --junit FILE]
#
# FI_ARCH names the binary (else target/release/fi-arch). Needs neither Python nor torch: a GPU, its driver, and libtvm_ffi.so
# (from --tvm-ffi, --env, the active environment or an earlier build).
# Ends with 0 when the artifact is right, 1 when it is not, 2 on a wrong command line, 3 when the machine lacks something.
set -eu

root=$(CDPATH='' cd -- "$(dirname "$0")/.." && pwd)
binary=${FI_ARCH:-$root/target/release/fi-arch}
[ -x "$binary" ] || {
    echo "error: no $binary; build it (cargo build --release) or name one with FI_ARCH" >&2
    exit 3
}
exec "$binary" smoke "$@"
