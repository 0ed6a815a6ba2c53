#!/usr/bin/env bash
# Compares fi-arch's commands with those of FlashInfer's own generator, token by token, for the releases that are named.
#
#   PYTHON=venv/bin/python CUDA_HOME=/usr/local/cuda ci/check-recipes.sh 0.5.3 0.6.4 0.7.4
#
# PYTHON: a Python with torch and what FlashInfer imports (`pip install torch flashinfer-python`); no GPU is needed, and its own
# FlashInfer is not used. CUDA_HOME: a toolkit. FI_ARCH: the program [target/release/fi-arch]. PIP_FIND_LINKS, PIP_NO_INDEX as
# pip reads them. Not a part of ci/test.sh: torch is larger than all the rest together. Exit code 1: a recipe is wrong.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:?a Python with torch}" "${CUDA_HOME:?a CUDA toolkit}"
fi_arch=$(realpath "${FI_ARCH:-target/release/fi-arch}")
[ $# -gt 0 ] || { echo "usage: ci/check-recipes.sh VERSION..." >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

status=0
for version in "$@"; do
  site=$work/$version
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$site" \
    "flashinfer-python==$version"
  "$fi_arch" build --sm 120 --jobs 2 --dry-run --json --flashinfer "$site" --toolkit "$CUDA_HOME" > "$work/ours.json"
  FLASHINFER_CUDA_ARCH_LIST=12.0f FLASHINFER_WORKSPACE_BASE=$work/jit FLASHINFER_DISABLE_VERSION_CHECK=1 \
    PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1 \
    "$PYTHON" - "$version" "$site" "$work/ours.json" <<'PY' || status=1
import difflib, json, os, re, shlex, sys, sysconfig
from pathlib import Path

version, site, ours = sys.argv[1], Path(sys.argv[2]).resolve(), json.load(open(sys.argv[3]))["commands"]
import tvm_ffi
import flashinfer
from flashinfer.compilation_context import CompilationContext
from flashinfer.jit import comm

assert Path(flashinfer.__file__).resolve().is_relative_to(site), flashinfer.__file__
# The gate, opened for this process.
plain = CompilationContext.get_nvcc_flags_list
CompilationContext.get_nvcc_flags_list = lambda self, supported_major_versions=None, **more: plain(
    self, supported_major_versions and sorted({*supported_major_versions, 12}), **more
)
spec = comm.gen_trtllm_comm_module()
spec.write_ninja()

# Every command of the ninja file, with its variables filled in.
variables, rules, builds = {}, {}, []
for line in Path(spec.ninja_path).read_text().replace("$\n", " ").splitlines():
    if match := re.match(r"(\w+) = (.*)", line):
        variables[match[1]] = match[2]
    elif match := re.match(r"rule (\w+)", line):
        rule = match[1]
    elif match := re.match(r"  command = (.*)", line):
        rules[rule] = match[1]
    elif match := re.match(r"build (\S+): (\w+) (.*)", line):
        builds.append(match.groups())


def filled(text, more):
    while "$" in text:
        text = re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda m: {**variables, **more}.get(m[1] or m[2], ""), text)
    return shlex.split(text)


theirs = [filled(rules[rule], {"in": sources, "out": out}) for out, rule, sources in builds]

tvm_ffi_root = Path(tvm_ffi.__file__).resolve().parent
roots = [(site / "flashinfer/data", "data"), (tvm_ffi_root, "tvm_ffi"), (Path(os.environ["CUDA_HOME"]), "cuda")]
differences = {}


def intended(why):
    differences[why] = differences.get(why, 0) + 1


def pairs(words):
    """A flag and the word that belongs to it, as one."""
    words, out = list(words), []
    while words:
        word = words.pop(0)
        takes = word in ("-isystem", "-ccbin", "--keep-dir", "--dependency-output", "-MF", "-c", "-o", "-include")
        out.append(f"{word} {words.pop(0)}" if takes else word)
    return out


def normal_theirs(words):
    out = []
    for word in pairs(words):
        for root, name in roots:
            word = re.sub(rf"(?<![\w/]){re.escape(str(root))}(?=/|$)", name, word.replace("-I", "-I ", 1)).replace("-I ", "-I", 1)
        if word == f"-isystem {sysconfig.get_path('include')}":
            intended("theirs adds Python's headers: no source includes them")
            continue
        word = re.sub(r"^(-MF|-o) .*/", r"\1 ", word)
        if word.startswith("-MF"):
            intended("theirs says -MF, the short name of --dependency-output")
            word = "--dependency-output" + word[3:]
        word = re.sub(r"^(--dependency-output|-o) .*", r"\1 FILE", word)
        out.append(word)
    return out


def normal_ours(words):
    out, seen = [], 0
    for word in pairs(words):
        if word in ("-isystem overlay/include", "-isystem data/include/flashinfer/comm"):
            intended("ours puts the overlay, and the folder of the originals, before all")
            continue
        if word.startswith("-include ours/"):
            intended("ours has a header that stands in for FlashInfer's logging.h")
            continue
        if word == "-O1":
            intended("ours passes -O1 to the host compiler in place of -O3")
            word = "-O3"
        if word.startswith("-ccbin "):
            intended("ours names the host compiler: one for compiling and linking")
            continue
        if word.startswith("--keep"):
            intended("ours keeps intermediate files under fixed names: the same bytes on every machine")
            continue
        if word.startswith("-I") and word[2:].strip():
            word = "-I" + word[2:].strip()
        if word.startswith("-c overlay/"):
            intended("ours compiles the overlay's source where it is edited")
            word = word.replace("overlay/", "data/")
        word = re.sub(r"^(--dependency-output|-o) .*", r"\1 FILE", word)
        out.append(word)
    # `-I` and its folder are two words in ours where the recipe says so.
    return [f"-I{out.pop(i + 1)}" if w == "-I" else w for i, w in enumerate(out) if i < len(out)]


compiles = [c for c in theirs if "-c" in c]
links = [c for c in theirs if "-c" not in c]
faults = 0
for our, their in zip(ours, compiles, strict=False):
    a, b = normal_theirs(their), normal_ours(our)
    if a != b:
        faults += 1
        print("\n".join(difflib.unified_diff(a, b, "FlashInfer", "fi-arch", lineterm="", n=1)))
    else:
        count = len(b)
faults += len(compiles) != len(ours) - 1
print(f"{version}: {len(compiles)} compile commands, " + (f"{faults} differ" if faults else f"equal in all {count} words, but for:"))
for why, times in differences.items():
    print(f"  {times} x {why}")
print("  link, theirs:", " ".join(w for w in links[0] if not w.endswith((".o", ".so"))).replace(os.environ["CUDA_HOME"], "cuda"))
print("  link, ours:  ", " ".join(w for w in ours[-1] if not w.endswith((".o", ".so"))))
sys.exit(faults > 0)
PY
  rm -rf "$site" "$work/jit"
done
exit $status
