"""Chooses, checks, loads and (with `--on-miss build`) builds the artifact for a GPU."""

import json
import os
import re
import sys

from . import _gpu, _overlay, is_set, refuse, say


def fitting(overlay, module, capabilities):
    """The artifact of `module` for the first of the compute capabilities that one fits, and that capability; or None."""
    for capability in capabilities:
        fit = [
            artifact
            for artifact in overlay.state["artifacts"]
            if artifact["module"] == module and list(capability) in artifact["runs_on"]
        ]
        if fit:
            # The one made for the fewest GPUs.
            return min(fit, key=lambda artifact: len(artifact["runs_on"])), capability
    return None


def unfit(artifact):
    """Why this process cannot load a sound artifact; None where it can, as far as is known before it tries."""
    too_old = unfit_driver(artifact)
    if too_old is not None:
        return too_old
    needed = artifact.get("libcudart")
    if needed:
        loaded = _loaded_libcudart()
        if loaded and needed not in loaded:
            return "it needs %s, and torch has loaded %s in this process" % (needed, " and ".join(sorted(loaded)))
        if not loaded:
            import ctypes

            try:
                ctypes.CDLL(needed)
            except OSError as error:
                return "it needs %s, which cannot be loaded here (%s)" % (needed, error)
    return None


def unfit_driver(artifact):
    """Why this machine's driver cannot load an artifact; None where it can, or there is no driver."""
    floor, driver = artifact.get("min_driver"), _gpu.driver()
    if floor and driver and _gpu.older(driver, floor):
        return "it needs NVIDIA driver %s or newer, and this machine has %s" % (floor, driver)
    return None


def _loaded_libcudart():
    """The names of the CUDA runtimes in this process, such as `libcudart.so.13`."""
    try:
        with open("/proc/self/maps") as maps:
            return set(re.findall(r"/(libcudart\.so\.\d+)[^/\n]*$", maps.read(), re.M))
    except OSError:
        return set()


_sound = set()


def load(overlay, artifact, capability):
    """FlashInfer's module from an artifact. Raises a RuntimeError that says what, why and the cure."""
    module, path = artifact["module"], _overlay.artifact_path(artifact)
    try:
        if path not in _sound:
            _overlay.check_artifact(artifact, overlay.mode)
            _sound.add(path)
        why = unfit(artifact)
    except _overlay.Wrong as wrong:
        why = str(wrong)
    if why is not None:
        raise failure(overlay, module, capability, "%s is not loaded: %s" % (path, why))
    try:
        import tvm_ffi

        return tvm_ffi.load_module(path)
    except Exception as error:
        raise failure(overlay, module, capability, "%s does not load: %s" % (path, error))


def missing(overlay, module, capability):
    """The error of a GPU that no artifact fits."""
    have = [artifact["target"] for artifact in overlay.state["artifacts"] if artifact["module"] == module]
    return failure(overlay, module, capability, "no artifact fits (there is %s)" % (", ".join(have) or "none"))


def failure(overlay, module, capability, why, how=None):
    """The one error of a module that cannot be had. From here on nothing is in force."""
    from . import _limits

    to_cure = "To cure it: %s" % (how or cure(overlay, capability))
    said = "fi-arch: FlashInfer's %s for SM %d.%d: %s. %s" % (module, capability[0], capability[1], why, to_cure)
    overlay.closed = said
    _limits.forget()
    if is_set("FI_ARCH_REQUIRE"):
        refuse(said)
    return RuntimeError(said)


def cure(overlay, capability):
    """The command that activates anew, for a compute capability."""
    sm = "%d%d" % tuple(capability)
    if overlay.mode == "run":
        return "start again with `fi-arch run --sm %s -- COMMAND`" % sm
    return "`fi-arch install%s --sm %s --env %s`" % (" --in-place" if overlay.mode == "in-place" else "", sm, sys.prefix)


def program():
    """The path of the program `fi-arch`; None where it is not on PATH."""
    import shutil

    return shutil.which("fi-arch")


def build(overlay, module, capability):
    """Has the artifact built, and returns it. The program's own lock makes that one build, however many ranks ask."""
    import subprocess

    found = program()
    if found is None:
        raise failure(overlay, module, capability, "no artifact fits, and fi-arch, which would build it, is not on PATH")
    command = [found, "build", "--json", "--module", module, "--sm", "%d%d" % capability, "--env", sys.prefix]
    say("fi-arch: no artifact of %s fits SM %d.%d; building it (this can take minutes)" % ((module,) + capability))
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    shown = " ".join(command)
    try:
        if ran.returncode != 0:
            raise ValueError("it ended with %d" % ran.returncode)
        return _built(json.loads(ran.stdout.decode("utf-8")), overlay, module, capability)
    except (ValueError, KeyError, TypeError) as error:
        said = ran.stderr.decode("utf-8", "replace").strip()
        why = "`%s` did not make one: %s%s" % (shown, error, "\n" + said if said else "")
        raise failure(overlay, module, capability, why)


def _built(answer, overlay, module, capability):
    """The artifact that a build answered with, as a state records it. A ValueError where it is not what was asked for."""
    target = re.match(r"sm_(\d+)(\d)([af]?)$", str(answer["target"]))
    if answer["verdict"] != "pass" or answer["module"] != module or target is None:
        raise ValueError("it answered with %s of %s for %s" % (answer["verdict"], answer["module"], answer["target"]))
    built, suffix = (int(target.group(1)), int(target.group(2))), target.group(3)
    if built != capability and (suffix == "a" or built[0] != capability[0] or built > capability):
        raise ValueError("it answered with %s" % answer["target"])
    if answer["flashinfer"] != overlay.version("flashinfer"):
        raise ValueError("it built for FlashInfer %s, not %s" % (answer["flashinfer"], overlay.version("flashinfer")))
    return {
        "module": module,
        "target": answer["target"],
        "runs_on": [list(capability)],
        "file": os.path.abspath(answer["artifact"]),
        "sha256": answer["sha256"],
        "min_driver": answer.get("min_driver"),
    }
