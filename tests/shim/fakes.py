"""A small environment with fakes of FlashInfer, SGLang, torch and tvm-ffi, and the shim of the work tree over them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap

SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "src", "activate", "shim")

COMM = '''"""FlashInfer's communication modules."""

from .core import JitSpec, current_compilation_context


class Before:
    """A class whose lines the overlay moves."""

    answer = 1


def gate():
    return [9, 10]


def fails():
    raise ValueError("on purpose")


def gen_trtllm_comm_module():
    """Makes the spec."""
    current_compilation_context.flags(gate())
    return JitSpec("trtllm_comm", current_compilation_context.flags(gate()))


if __name__ == "__main__":
    print("main", gate(), __file__)
'''

CORE = '''import pathlib

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"


class Context:
    def __init__(self):
        import os
        words = os.environ.get("FLASHINFER_CUDA_ARCH_LIST", "").split()
        self.TARGET_CUDA_ARCHS = {(int(word.split(".")[0]), word.split(".")[1]) for word in words}

    def flags(self, majors):
        found = [target for target in self.TARGET_CUDA_ARCHS if target[0] in majors]
        if not found:
            raise RuntimeError("No supported CUDA architectures found for major versions %s." % majors)
        return ["-gencode=arch=compute_%d%s" % target for target in sorted(found)]


current_compilation_context = Context()


class JitSpec:
    def __init__(self, name, flags):
        self.name = name
        self.sources = [DATA / "csrc" / "one.cu", DATA / "csrc" / "two.cu"]
        self.extra_cuda_cflags = flags
        self.extra_include_dirs = None

    is_ninja_generated = property(lambda self: True)
    is_aot = property(lambda self: False)
    aot_path = property(lambda self: pathlib.Path("aot", self.name))
    jit_library_path = property(lambda self: pathlib.Path("jit", self.name))

    def get_library_path(self):
        return self.jit_library_path

    def build(self, verbose=False):
        raise AssertionError("FlashInfer compiled")

    def build_and_load(self):
        return "FlashInfer's own %s" % self.name
'''

TORCH = '''import os


class cuda:
    @staticmethod
    def is_available():
        return "FAKE_GPU" in os.environ

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def get_device_capability(device=None):
        return tuple(int(part) for part in os.environ["FAKE_GPU"].split("."))
'''

ORIGINALS = {
    "flashinfer/__init__.py": "__version__ = '0.6.3'\nfrom . import jit\n",
    "flashinfer/jit/__init__.py": "from .comm import gen_trtllm_comm_module\n",
    "flashinfer/jit/comm.py": COMM,
    "flashinfer/jit/core.py": CORE,
    "flashinfer/res/__init__.py": "WHO = 'original'\n",
    "flashinfer/res/text.txt": "a resource\n",
    "flashinfer/data/include/flashinfer/comm/a.cuh": "// guarded\n",
    "flashinfer/data/include/flashinfer/comm/watched.cuh": "// right as it is\n",
    "flashinfer/data/csrc/one.cu": "// stride\n",
    "flashinfer/data/csrc/two.cu": "// two\n",
    "sglang/__init__.py": "from . import gate\n",
    "sglang/gate.py": "OPEN = False\n",
    "torch/__init__.py": TORCH,
    "tvm_ffi/__init__.py": "def load_module(path):\n    return 'loaded ' + open(path).read()\n",
}

SERVE = '''

try:
    from fi_arch_shim import serve as _fi_arch_serve
except ImportError:
    pass
else:
    gen_trtllm_comm_module = _fi_arch_serve("trtllm_comm", gen_trtllm_comm_module)
'''

POSTS = {
    "flashinfer/jit/comm.py": COMM.replace("\n\nclass Before", "\n# One line more.\n\n\nclass Before").replace("[9, 10]", "[9, 10, 12]")
    + SERVE,
    "flashinfer/res/__init__.py": "WHO = 'overlay'\n",
    "flashinfer/data/include/flashinfer/comm/a.cuh": "// no guard\n",
    "flashinfer/data/include/fi_arch/added.cuh": "// ours\n",
    "flashinfer/data/csrc/one.cu": "// right stride\n",
    "sglang/gate.py": "import fi_arch_shim\n\nOPEN = fi_arch_shim.admits()\n",
}
WATCHED = ["flashinfer/data/include/flashinfer/comm/watched.cuh", "flashinfer/jit/core.py"]
ARTIFACT = "artifact/sm_120f/trtllm_comm.so"
POLICY = {"format": 1, "workspace_tokens": 2048, "ranks": [
    {"count": 2, "reason": "reported — é"},
    {"count": 4, "max_tokens": 64, "oneshot_tokens": 16, "reason": "measured"},
]}


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def seal(state):
    """As `store::seal_manifest` does it."""
    state = {key: value for key, value in state.items() if key != "checksum"}
    state["checksum"] = sha256(json.dumps(state, indent=2, ensure_ascii=False))
    return json.dumps(state, indent=2, ensure_ascii=False) + "\n"


class Site:
    """A virtual environment in a folder of its own."""

    def __init__(self, mode="shim", **state):
        self.dir = os.path.realpath(tempfile.mkdtemp(prefix="fi-arch-shim-"))
        version = "python%d.%d" % sys.version_info[:2]
        self.site = os.path.join(self.dir, "lib", version, "site-packages")
        self.python = os.path.join(self.dir, "bin", "python")
        os.makedirs(self.site)
        os.makedirs(os.path.dirname(self.python))
        os.symlink(getattr(sys, "_base_executable", sys.executable), self.python)
        home = os.environ.get("SHIM_TEST_HOME", os.path.dirname(os.path.realpath(getattr(sys, "_base_executable", sys.executable))))
        with open(os.path.join(self.dir, "pyvenv.cfg"), "w") as file:
            file.write("home = %s\ninclude-system-site-packages = false\n" % home)
        for path, text in ORIGINALS.items():
            self.write(path, text)
        self.mode = mode
        # The folder that holds our package.
        self.ours = os.path.join(self.dir, "run") if mode == "run" else self.site
        self.package = os.path.join(self.ours, "fi_arch_shim")
        os.makedirs(self.package)
        for name in os.listdir(SHIM):
            if name.endswith(".py") and name != "sitecustomize.py":
                shutil.copy(os.path.join(SHIM, name), self.package)
        if mode == "run":
            shutil.copy(os.path.join(SHIM, "sitecustomize.py"), self.ours)
        elif mode == "shim":
            shutil.copy(os.path.join(SHIM, "fi_arch_shim.pth"), self.site)
        for path, text in POSTS.items():
            self.write(path, text, os.path.join(self.package, "overlay"))
            if mode == "in-place":
                self.write(path, text)
        self.write(ARTIFACT, "the artifact", self.package)
        self.state = {
            "format": 1, "fi_arch": "0", "created": "2026-01-01T00:00:00Z", "mode": mode, "on_miss": "error",
            "packages": [self.record("flashinfer", "flashinfer-python"), self.record("sglang", "sglang")],
            "artifacts": [{
                "module": "trtllm_comm", "target": "sm_120f", "runs_on": [[12, 0], [12, 1]], "file": ARTIFACT,
                "sha256": sha256("the artifact"), "bytes": len("the artifact"), "key": "k", "cudart": "static", "tvm_ffi": "0",
            }],
            "policy": POLICY,
        }
        self.state.update(state)
        self.seal()

    @staticmethod
    def record(name, distribution):
        files = [
            {"path": path, "module": module_of(path), "pre": sha256(ORIGINALS[path]) if path in ORIGINALS else None,
             "post": sha256(text), "edits": ["gate" if path == "flashinfer/jit/comm.py" else "cure"]}
            for path, text in POSTS.items() if path.startswith(name + "/")
        ]
        files += [
            {"path": path, "module": module_of(path), "pre": sha256(ORIGINALS[path]), "post": sha256(ORIGINALS[path]), "edits": []}
            for path in WATCHED if path.startswith(name + "/")
        ]
        for file in files:
            if file["module"] is None:
                del file["module"]
        return {"name": name, "distribution": distribution, "version": "0.6.3", "files": files, "edits": []}

    def seal(self):
        self.write("state.json", seal(self.state), self.package)

    def write(self, path, text, root=None):
        path = os.path.join(root or self.site, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def close(self):
        shutil.rmtree(self.dir, ignore_errors=True)

    def environment(self, env):
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("FI_ARCH", "FLASHINFER", "PYTHON", "CUDA", "FAKE"))}
        if self.mode == "run":
            kept["PYTHONPATH"] = self.ours
        kept.update(env)
        return kept

    def run(self, *args, **env):
        """Runs the environment's Python."""
        done = subprocess.run([self.python] + list(args), env=self.environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              stdin=subprocess.DEVNULL, cwd=self.dir, timeout=120)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def code(self, code, **env):
        """Runs code that must end well and say nothing on stderr; what it printed."""
        status, out, err = self.run("-c", textwrap.dedent(code), **env)
        assert status == 0 and not err, "%d\n%s\n%s" % (status, out, err)
        return out.strip()


def module_of(path):
    if not path.endswith(".py"):
        return None
    stem = path[:-3]
    return (stem[: -len("/__init__")] if stem.endswith("/__init__") else stem).replace("/", ".")
