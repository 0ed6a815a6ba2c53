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
    if is_set("FI_ARCH_REQUIRE"):
        # In place nothing of ours is in the way of an import before this one.
        from . import _require

        _require.enforce()
    overlay = _overlay.judged()

    @functools.wraps(generator)
    def served(*args, **kwargs):
        return _spec(overlay, module, functools.partial(generator, *args, **kwargs), generator)

    return served


def _spec(overlay, module, generate, generator):
    context = getattr(generator, "__globals__", {}).get("current_compilation_context")
    capabilities, _ = _gpu.of_process(context)
    concerned = [capability for capability in capabilities if capability[0] in JIT_MAJORS + (OURS_ONLY,)]
    if not concerned or is_set("FI_ARCH_DISABLE"):
        return _behind_the_gate(context, generate)
    if not overlay.ok:
        wrong = overlay.wrong[0]
        raise _artifacts.failure(overlay, module, concerned[0], "%s %s" % (wrong.path, wrong.what), wrong.cure)

    found = _artifacts.fitting(overlay, module, concerned)
    if found is not None:
        return _from_artifact(generate, _Source(overlay, module, found[1], found[0]))
    jit = [capability for capability in concerned if capability[0] in JIT_MAJORS]
    if jit:
        if is_set("FI_ARCH_REQUIRE"):
            raise _artifacts.missing(overlay, module, jit[0])
        return _repaired(overlay, _behind_the_gate(context, generate))
    if overlay.state["on_miss"] != "build":
        raise _artifacts.missing(overlay, module, concerned[0])
    return _from_artifact(generate, _Source(overlay, module, concerned[0], None))


def _behind_the_gate(context, generate):
    """What the generator makes where its gate is as it was: SM 12.x is no target of it."""
    targets = getattr(context, "TARGET_CUDA_ARCHS", None)
    if targets is None:
        return generate()
    context.TARGET_CUDA_ARCHS = {target for target in targets if int(target[0]) != OURS_ONLY}
    try:
        return generate()
    finally:
        context.TARGET_CUDA_ARCHS = targets


class _Source:
    """Where a module comes from: an artifact that is there, or one that is built when it is first wanted."""

    def __init__(self, overlay, module, capability, artifact):
        self.overlay = overlay
        self.module = module
        self.capability = capability
        self.artifact = artifact

    def make(self):
        if self.artifact is None:
            self.artifact = _artifacts.build(self.overlay, self.module, self.capability)
        return self.artifact

    def load(self):
        return _artifacts.load(self.overlay, self.make(), self.capability)

    def path(self):
        """None where it is not there yet."""
        return None if self.artifact is None else Path(_overlay.artifact_path(self.artifact))


def _from_artifact(generate, source):
    """FlashInfer's own spec, that loads an artifact and compiles nothing."""
    try:
        spec = generate()
    except Exception:
        # Without an nvcc that knows SM 12.x, FlashInfer has no targets and makes no spec. Ours needs no nvcc.
        spec = _Bare(source.module)

    class FromArtifact(type(spec)):
        """A spec whose module is there already: whatever would load one or look for one gets ours."""

        def build_and_load(self):
            return source.load()

        def try_load(self):
            return source.load()

        def load(self, so_path=None):
            return source.load()

        def build(self, *args, **kwargs):
            source.make()

        def write_ninja(self):
            said = "fi-arch: %s is loaded from fi-arch's artifact, and not compiled here; FI_ARCH_DISABLE=1 gives FlashInfer's own"
            raise RuntimeError(said % source.module)

        def get_library_path(self):
            return source.path() or super().get_library_path()

        @property
        def aot_path(self):
            return source.path() or super().aot_path

        @property
        def jit_library_path(self):
            return source.path() or super().jit_library_path

        @property
        def is_aot(self):
            return source.path() is not None

        @property
        def is_compiled(self):
            return source.path() is not None

    spec.__class__ = FromArtifact
    return spec


class _Bare:
    """What stands in for FlashInfer's spec where FlashInfer makes none."""

    extra_cflags = extra_cuda_cflags = extra_ldflags = extra_include_dirs = None
    is_class = needs_device_linking = False

    def __init__(self, name):
        self.name = name
        self.sources = []

    def get_library_path(self):
        return self.aot_path

    @property
    def aot_path(self):
        return Path(self.name + ".so")

    jit_library_path = aot_path


def _repaired(overlay, spec):
    """FlashInfer's own spec, that compiles the overlay's sources against the overlay's headers."""
    edited = {file.record["path"]: file for file in overlay.files if file.edited and file.record["path"].startswith("flashinfer/")}
    # A name of its own, so that nothing that was compiled from other sources is taken.
    posts = "".join("%s %s\n" % (path, edited[path].record["post"]) for path in sorted(edited))
    spec.name = "%s_fi_arch_%s" % (spec.name, hashlib.sha256(posts.encode()).hexdigest()[:8])
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

