"""`FI_ARCH_REQUIRE=1`: a process runs on the verified state, or not at all."""

from . import _artifacts, _gpu, _limits, _overlay, is_set, refuse

_enforced = False


def enforce():
    """Ends the process, with the reason, where not everything is right. Looks once."""
    global _enforced
    if _enforced:
        return
    _overlay.quiet()
    why = _why_not()
    if why is not None:
        refuse("fi-arch: %s" % why)
    _enforced = True


def _why_not():
    if is_set("FI_ARCH_DISABLE"):
        return "FI_ARCH_DISABLE and FI_ARCH_REQUIRE are both set: unset one of them"
    overlay = _overlay.judged()
    if not overlay.ok:
        return str(overlay.wrong[0])
    if not overlay.needs_artifact:
        return None
    # Of several GPUs, the one that this process will take is not known yet; that one is looked at when the module is loaded.
    gpus = _gpu.present()
    found = _artifacts.fitting(overlay, _limits.MODULE, gpus)
    if gpus and found is None:
        have = ", ".join(artifact["target"] for artifact in overlay.state["artifacts"]) or "none"
        shown = ", ".join("SM %d.%d" % gpu for gpu in sorted(set(gpus)))
        return "no artifact fits this machine's GPUs (%s; there is %s); %s" % (shown, have, _artifacts.cure(overlay, gpus[0]))
    why = None if found is None else _artifacts.unfit_driver(found[0])
    return None if why is None else "%s: %s" % (found[0]["file"], why)
