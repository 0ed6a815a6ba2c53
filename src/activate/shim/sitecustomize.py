"""Starts fi-arch's shim in a process tree of `fi-arch run`, then runs the `sitecustomize` that Python would have run."""

import sys


def _start():
    try:
        import fi_arch_shim

        fi_arch_shim.start()
    except Exception as error:
        what = "%s: %s" % (type(error).__name__, " ".join(str(error).split()))
        sys.stderr.write("fi-arch: the package fi_arch_shim is damaged (%s); start again with `fi-arch run`\n" % what)


def _next():
    """Runs the next `sitecustomize` of the search path in this one's place. Its errors are Python's to report, as ever."""
    import os
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    here = os.path.realpath(os.path.dirname(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.realpath(path or ".") != here])
    if spec is None:
        # As if there were none: Python passes over this error, and forgets this module.
        raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")
    module = module_from_spec(spec)
    # Whatever stands here when we end is the `sitecustomize` of this process.
    sys.modules["sitecustomize"] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)


_start()
_next()
