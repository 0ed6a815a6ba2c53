"""What an edited engine asks: whether all of it is in force, and the limits of the policy."""

import sys

import fi_arch_shim

from . import _artifacts, _gpu, _overlay, is_set

MODULE = "trtllm_comm"


class _Answer:
    """The answer of a process, kept as soon as it comes from a GPU."""

    def __init__(self, in_force, major_12, final):
        self.in_force = in_force
        self.major_12 = major_12
        self.final = final


_kept = None


def forget():
    """Closes every gate of this process: what they open on has failed."""
    global _kept
    _kept = _Answer(False, False, True)
    fi_arch_shim._most_tokens = {}
    fi_arch_shim._most_tokens_of_any = 0
    fi_arch_shim._oneshot_tokens = {}


def _answer():
    global _kept
    if _kept is None:
        answer = _find_out()
        if not answer.final:
            return answer
        _kept = answer
    return _kept


def _find_out():
    if is_set("FI_ARCH_DISABLE"):
        return _Answer(False, False, True)
    overlay = _overlay.judged()
    if not overlay.ok or overlay.closed:
        return _Answer(False, False, True)
    if overlay.mode != "in-place" and not _is_served(overlay):
        return _Answer(False, False, True)
    try:
        capabilities, real = _gpu.of_process()
    except RuntimeError:
        # CUDA does not work here; whoever uses it will hear of it.
        return _Answer(False, False, False)
    major_12 = any(major == 12 for major, _ in capabilities)
    return _Answer(_has_artifact(overlay, capabilities), major_12, real)


def _is_served(overlay):
    """Whether the finder is there, and every module of the overlay that was imported came from it."""
    return fi_arch_shim.started() and all(name in overlay.served for name in overlay.modules if name in sys.modules)


def _has_artifact(overlay, capabilities):
    if not overlay.needs_artifact:
        return True
    found = _artifacts.fitting(overlay, MODULE, capabilities)
    if found is not None:
        return _artifacts.unfit(found[0]) is None
    # It is built when it is first asked for; if that fails, `forget` closes what this opens.
    wanted = any(major == 12 for major, _ in capabilities)
    return wanted and overlay.state["on_miss"] == "build" and _artifacts.program() is not None


def in_force():
    return _answer().in_force


def _policy():
    """The policy, where it says anything about this process; else None."""
    answer = _answer()
    return _overlay.judged().state["policy"] if answer.in_force and answer.major_12 else None


def by_ranks():
    """The most tokens and the most one-shot tokens by number of ranks, and whether that is the last word."""
    policy = _policy()
    ranks = policy["ranks"] if policy else []
    most = {limits["count"]: limits.get("max_tokens", sys.maxsize) for limits in ranks}
    oneshot = {limits["count"]: limits["oneshot_tokens"] for limits in ranks if "oneshot_tokens" in limits}
    return most, oneshot, _kept is not None


def workspace_tokens(default):
    policy = _policy()
    return policy.get("workspace_tokens", default) if policy else default
