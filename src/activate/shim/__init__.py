"""Serves the overlay of fi-arch to Python, and its proven artifact to FlashInfer.

Every interpreter of the environment imports this file when it starts, so it imports nothing; the rest of the package is
read at the first import below one of `ROOTS`. A fault of our own ends in one warning, never in a broken interpreter.
"""

import sys

# The packages that an overlay may have files of.
ROOTS = ("flashinfer", "sglang", "vllm")


class _Finder:
    """Hands out the overlay's modules; says nothing of all others."""

    fi_arch = True

    def find_spec(self, name, path=None, target=None):
        # The root itself is never edited, and looking for it is how programs ask whether it is installed.
        if "." not in name or name.partition(".")[0] not in ROOTS:
            return None
        try:
            from . import _imports

            return _imports.find_spec(self, name, path, target)
        except Exception as error:
            damaged(error)
            return None


def start():
    """Puts the finder before all others, once. Does nothing with `FI_ARCH_DISABLE=1`."""
    if not any(getattr(finder, "fi_arch", False) for finder in sys.meta_path):
        # With both variables set the finder is there to refuse.
        if not is_set("FI_ARCH_DISABLE") or is_set("FI_ARCH_REQUIRE"):
            sys.meta_path.insert(0, _Finder())


def started():
    """Whether the finder is among the interpreter's."""
    return any(getattr(finder, "fi_arch", False) for finder in sys.meta_path)


def serve(module_name, generator):
    """FlashInfer's `generator` of a JIT spec, made to hand out our artifact. Edited FlashInfer files call this."""
    try:
        from . import _specs
    except Exception as error:
        said = damaged(error)

        def broken(*args, **kwargs):
            raise RuntimeError(said)

        return broken
    return _specs.serve(module_name, generator)


def in_force():
    """Whether FlashInfer's side of the overlay is what this process has, and an artifact fits its GPU."""
    return _ask("in_force", False)


# What `admits` and `oneshot` answer from, for they are asked in every layer: limits by number of ranks. None before the first
# answer of a GPU. A number of ranks that is not there is not admitted, or has no limit of its own.
_most_tokens = None
_most_tokens_of_any = 0
_oneshot_tokens = {}


def admits(tokens=None, ranks=None):
    """Whether the fused path may be used on this GPU (major 12) by so many ranks, with so many tokens. None: not asked."""
    most = _most_tokens
    if most is None:
        most = _learn_limits()
    limit = _most_tokens_of_any if ranks is None else most.get(ranks, 0)
    return limit > 0 and (tokens is None or tokens <= limit)


def oneshot(tokens, ranks, default):
    """Whether the policy wants one-shot; `default` where it is silent or not in force."""
    if _most_tokens is None:
        _learn_limits()
    limit = _oneshot_tokens.get(ranks)
    return default if limit is None else tokens <= limit


def workspace_tokens(default):
    """The policy's number of tokens for an engine's workspace; `default` where it is silent or not in force."""
    return _ask("workspace_tokens", default, default)


def is_set(name):
    """Whether an environment variable is set to anything but nothing and `0`."""
    import os  # Python's own start-up has imported it.

    return os.environ.get(name, "") not in ("", "0")


def _ask(question, otherwise, *args):
    try:
        from . import _limits

        return getattr(_limits, question)(*args)
    except Exception as error:
        damaged(error)
        return otherwise


def _learn_limits():
    global _most_tokens, _most_tokens_of_any, _oneshot_tokens
    most, _oneshot_tokens, final = _ask("by_ranks", ({}, {}, True))
    _most_tokens_of_any = max(most.values(), default=0)
    if final:
        _most_tokens = most
    return most


_said = None


def damaged(error):
    """Says once, in one line on stderr, that this package is damaged; ends the process with `FI_ARCH_REQUIRE=1`."""
    global _said
    here = __file__.rpartition("/")[0] or "."
    file = getattr(error, "filename", None) or getattr(error, "path", None) or here
    what = "%s: %s" % (type(error).__name__, " ".join(str(error).split()))
    said = "fi-arch: %s is damaged (%s), so nothing of fi-arch is in force; repair it with `fi-arch install`" % (file, what)
    if is_set("FI_ARCH_REQUIRE"):
        refuse(said)
    if _said is None:
        _said = said
        say(said)
    return said


def say(line):
    """Writes one line on stderr, if there is a stderr."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except Exception:
        pass


def refuse(reason):
    """Ends the process where `FI_ARCH_REQUIRE=1` wants more than there is. No `except` of an engine can swallow it."""
    import os

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    try:
        os.write(2, ("%s (FI_ARCH_REQUIRE is set: the process ends)\n" % reason).encode("utf-8", "replace"))
    finally:
        os._exit(3)
