#!/usr/bin/env bash
# All checks that need no GPU: format, lints, tests. Ends in one line that counts the tests.
# Needs the network (wheels from PyPI through pip) where the wheels are not there yet.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 70

cargo fmt --check || { echo "error: run cargo fmt" >&2; exit 1; }
cargo clippy --release --locked --all-targets -- -D warnings || exit 1

# The workflow for GPU runners is not run here; that it is YAML at all can be seen.
if python3 -c 'import yaml' 2>/dev/null; then
  python3 -c 'import sys, yaml; [yaml.safe_load(open(file)) for file in sys.argv[1:]]' ci/*.yml || exit 1
else
  echo "note: ci/*.yml were not parsed: this Python has no PyYAML" >&2
fi

mkdir -p target
log=target/test.log
cargo test --release --locked --no-fail-fast 2>&1 | tee "$log"
status=${PIPESTATUS[0]}

# cargo prints one line a test binary; the sum is what a reader wants.
read -r passed failed ignored < <(
  awk '/^test result:/ { for (i = 1; i <= NF; i++) {
         if ($i ~ /^passed;/) p += $(i - 1); if ($i ~ /^failed;/) f += $(i - 1); if ($i ~ /^ignored;/) s += $(i - 1) } }
       END { print p + 0, f + 0, s + 0 }' "$log"
)
# A run that was cut short, or that tested nothing, is no success.
[ "$status" -eq 0 ] && [ "$passed" -eq 0 ] && status=1
[ "$status" -ne 0 ] && [ "$failed" -eq 0 ] && failed=1
echo "$passed passed, $failed failed, $ignored skipped"
exit "$status"
