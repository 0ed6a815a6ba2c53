"""FlashInfer's JIT spec of a module, made to load our artifact, or to compile the repaired sources."""

import functools
import hashlib
import os
from pathlib import Path

from . import _artifacts, _gpu, _overlay, is_set

# The GPUs that FlashInfer's own code was made for, and the one whose kernels are hollow in it.
JIT_MAJORS = (9, 10)
OURS_ONLY = 12


def serve(module, generator):
    """`generator`, whose specs hand out the artifact of `module`."""
    overlay = _overlay.judged()
    if is_set("FI_ARCH_REQUIRE"):
        # In place nothing of ours is in the way of an import before this one.
        from . import _require

        _require.enforce()

    @functools.wraps(generator)
    def served(*args, **kwargs):
        return _spec(overlay, module, functools.partial(generator, *args, **kwargs), generator)

    return served


def _spec(overlay, module, generate, generator):
    context = getattr(generator, "__globals__", {}).get("current_compilation_context")
    capabilities, real = _gpu.of_process(context)
    concerned = [capability for capability in capabilities if capability[0] in JIT_MAJORS + (OURS_ONLY,)]
    if not concerned:
        return generate()
    if is_set("FI_ARCH_DISABLE"):
        return _disabled(module, capabilities, generate)
    if not overlay.ok:
        raise _artifacts.failure(overlay, module, concerned[0], "nothing is in force: %s" % overlay.wrong[0])

    found = _artifacts.fitting(overlay, module, concerned)
    if found is not None:
        return _from_artifact(overlay, module, generate, found[1], lambda: found[0])
    jit = [capability for capability in concerned if capability[0] in JIT_MAJORS]
    if jit:
        if is_set("FI_ARCH_REQUIRE"):
            raise _artifacts.missing(overlay, module, jit[0])
        return _repaired(overlay, module, generate())
    if overlay.state["on_miss"] != "build":
        raise _artifacts.missing(overlay, module, concerned[0])
    return _from_artifact(overlay, module, generate, concerned[0], functools.lru_cache(None)(
        lambda: _artifacts.build(overlay, module, concerned[0])
    ))


def _disabled(module, capabilities, generate):
    """In place the gate is open on disk: for SM 12.x it is closed here, as it is without us."""
    if all(major == OURS_ONLY for major, _ in capabilities):
        raise RuntimeError("fi-arch: FI_ARCH_DISABLE is set, and FlashInfer by itself has no %s for SM 12.x" % module)
    return generate()


def _from_artifact(overlay, module, generate, capability, artifact):
    """FlashInfer's own spec, that loads an artifact and compiles nothing."""
    try:
        spec = generate()
    except Exception:
        # Without an nvcc that knows SM 12.x, FlashInfer has no targets and makes no spec. Ours needs no nvcc.
        spec = _Bare(module)

    class FromArtifact(type(spec)):
        """A spec whose module is there already."""

        def build_and_load(self):
            return _artifacts.load(overlay, artifact(), capability)

        def try_load(self):
            return self.build_and_load()

        def load(self, so_path=None):
            return self.build_and_load()

        def build(self, *args, **kwargs):
            artifact()

        def write_ninja(self):
            raise RuntimeError("fi-arch: %s is loaded from fi-arch's artifact, and not compiled here" % module)

        def get_library_path(self):
            return self.aot_path

        @property
        def aot_path(self):
            return Path(_overlay.artifact_path(artifact()))

        @property
        def jit_library_path(self):
            return self.aot_path

        @property
        def is_aot(self):
            return True

        @property
        def is_compiled(self):
            return self.aot_path.exists()

    spec.__class__ = FromArtifact
    return spec


class _Bare:
    """What stands in for FlashInfer's spec where FlashInfer makes none."""

    extra_cflags = extra_cuda_cflags = extra_ldflags = extra_include_dirs = None
    is_class = needs_device_linking = False

    def __init__(self, name):
        self.name = name
        self.sources = []


def _repaired(overlay, module, spec):
    """FlashInfer's own spec, that compiles the overlay's sources against the overlay's headers."""
    edited = {file.record["path"]: file for file in overlay.files if file.edited and file.record["path"].startswith("flashinfer/")}
    # A name of its own, so that nothing that was compiled from other sources is taken.
    posts = "".join("%s %s\n" % (path, edited[path].record["post"]) for path in sorted(edited))
    spec.name = "%s_fi_arch_%s" % (spec.name, hashlib.sha256(posts.encode()).hexdigest()[:8])
    # SM 12.x has its artifact or nothing. Beside another GPU it is not compiled along.
    spec.extra_cuda_cflags = [flag for flag in spec.extra_cuda_cflags if not _is_for_12(flag)]
    if overlay.mode != "in-place":
        data = os.path.join(_overlay.HERE, "overlay", "flashinfer", "data")
        by_path = {os.path.realpath(file.path): file.overlay for file in edited.values()}
        spec.sources = [Path(by_path.get(os.path.realpath(source), source)) for source in spec.sources]
        root = next(file.path[: -len(path)] for path, file in edited.items())
        comm = os.path.join(root, "flashinfer", "data", "include", "flashinfer", "comm")
        # The headers say `#include "../x.h"`: from the overlay's folder that reaches the original only by way of the second.
        spec.extra_include_dirs = [Path(data, "include"), Path(comm)] + list(spec.extra_include_dirs or [])

    class Repaired(type(spec)):
        """A spec that writes its build file anew: one of the same name may be another environment's."""

        @property
        def is_ninja_generated(self):
            return False

    spec.__class__ = Repaired
    return spec


def _is_for_12(flag):
    return flag.startswith("-gencode=") and "compute_12" in flag
