#!/bin/sh
# Runs the fused all-reduce of an artifact on one GPU and compares every number with a float64 reference.
#
#   ci/gpu-smoke.sh ARTIFACT... [--cases quick|full] [--json FILE] [--deadline SECONDS]
#
# PYTHON names the interpreter (else python3). It needs torch with CUDA and tvm_ffi; FlashInfer is not needed.
# Ends with 0 when every case passed, 1 when one failed, 2 on a wrong command line, 3 when the machine lacks something.
set -eu

python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "error: no $python; set PYTHON" >&2; exit 3; }
for package in torch tvm_ffi; do
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)" || {
        echo "error: $python has no package $package" >&2
        exit 3
    }
done
# Whether torch can use a GPU is asked in the process that uses it: importing torch a second time takes seconds.
exec "$python" "$(dirname "$0")/gpu_smoke.py" "$@"
