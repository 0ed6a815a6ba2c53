#!/usr/bin/env bash
# Times what people wait for, each beside its peer in the same run and in turn, and prints ratios with their spread. Nothing here is a
# test. What this machine cannot run is named.
#
#   ci/bench.sh [ROW…]           all rows without an argument; what each row is: ci/bench.py
#
# FI_ARCH names the binary (else a release build is made). Uses FI_ARCH_HOME and builds there first (minutes) when its store is empty.
# More variables: ci/bench.py.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${FI_ARCH:-}" ]; then
    cargo build --release --quiet
    FI_ARCH=$PWD/target/release/fi-arch
fi
export FI_ARCH
exec python3 ci/bench.py "$@"
