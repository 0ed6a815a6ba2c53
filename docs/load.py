"""Loads an artifact into a process that has imported torch; says which functions and which CUDA runtimes it sees there."""

import subprocess
import sys

import torch
import tvm_ffi


def cudarts():
    files = {line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line}
    return sorted(file.split("/site-packages/")[-1] for file in files)


path = sys.argv[1]
before = cudarts()
module = tvm_ffi.load_module(path)
symbols = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout.split()
prefix = "__tvm_ffi_"
names = sorted(s[len(prefix) :] for s in symbols if s.startswith(prefix) and not s.startswith(prefix + "_"))
for name in names:
    assert module.get_function(name) is not None, name
print(f"torch {torch.__version__}, tvm_ffi {tvm_ffi.__version__}")
print(f"{len(names)} functions: {', '.join(names)}")
print(f"libcudart before: {before}, after: {cudarts()}")
