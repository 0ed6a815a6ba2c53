"""Serves the overlay's modules to Python's import system."""

import sys
from _thread import get_ident
from importlib.machinery import SourceFileLoader

from . import _overlay, is_set, refuse

# Names that are being asked for, by thread; True once a nested question was answered with our module.
_asked = {}


def find_spec(finder, name, path, target):
    """The spec of a module of the overlay; None for all others, and where nothing is served."""
    overlay = _overlay.recorded()
    if name.partition(".")[0] not in overlay.names:
        return None
    if is_set("FI_ARCH_REQUIRE"):
        from . import _require

        _require.enforce()
    if is_set("FI_ARCH_DISABLE"):
        return None
    overlay = _overlay.judged()
    file = overlay.modules.get(name)
    if file is None or not overlay.ok:
        return None
    return _serve(overlay, file, name, path, target)


def _serve(overlay, file, name, path, target):
    key = (get_ident(), name)
    outer = key not in _asked
    _asked.setdefault(key, False)
    try:
        spec = ask_others(name, path, target)
        if outer and _asked[key]:
            # A finder that wraps others has asked all of them again, us too: the module is ours already.
            return spec
    except Exception:
        # It is that finder's to say: Python will ask it next.
        return None
    finally:
        if outer:
            del _asked[key]
    if spec is None:
        return None
    if not _is(spec.origin, file.path):
        overlay.wrong.append(
            _overlay.Wrong(str(spec.origin), "is imported as %s instead of %s" % (name, file.path), "`fi-arch verify` says why")
        )
        if is_set("FI_ARCH_REQUIRE"):
            refuse("fi-arch: %s" % overlay.wrong[0])
        overlay.warn()
        return None
    # All else stays the original's: the module's `__file__`, where its resources are, and its submodules.
    spec.loader = Loader(name, file.overlay, spec.loader, spec.origin)
    overlay.served.add(name)
    if not outer:
        _asked[key] = True
    return spec


def ask_others(name, path, target):
    """The spec of the module as it is without us. Editable installs have finders of their own, so all are asked."""
    for finder in list(sys.meta_path):
        find = None if getattr(finder, "fi_arch", False) else getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


def _is(origin, path):
    import os

    try:
        return origin == path or os.path.samefile(origin, path)
    except (OSError, TypeError):
        return False


class Loader(SourceFileLoader):
    """Loads a module from the overlay's file: its code bears that file's name, as a traceback should show it, and its byte
    code lies beside that file, or nowhere where that folder cannot be written."""

    def __init__(self, name, path, original, original_path):
        super().__init__(name, path)
        self.original = original
        self.original_path = original_path

    def exec_module(self, module):
        # By file name, modules and classes are looked up under the original's, functions under the overlay's.
        self._show_source()
        super().exec_module(module)

    def _show_source(self):
        import linecache

        source = self.get_source(self.name)
        lines = source.splitlines(True)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        # Without a time stamp it is not compared with the file.
        linecache.cache[self.original_path] = (len(source), None, lines, self.original_path)

    def get_resource_reader(self, name):
        # The package's other files lie where they lay.
        reader = getattr(self.original, "get_resource_reader", None)
        return None if reader is None else reader(name)
