"""The overlay of this environment: what was recorded, and whether everything is still so. One set, right or wrong as a whole."""

import hashlib
import json
import os
import sys
from _thread import RLock

from . import ROOTS

HERE = os.path.dirname(os.path.abspath(__file__))
FORMAT = 1
STATE = os.path.join(HERE, "state.json")


class Wrong(Exception):
    """Why nothing is in force: the file, what is wrong with it, and what to do."""

    def __init__(self, path, what, cure):
        super().__init__("%s %s; %s" % (path, what, cure))
        self.path = path
        self.what = what
        self.cure = cure


class File:
    """A file of the set."""

    def __init__(self, package, record, root):
        self.record = record
        self.module = record.get("module")
        self.edited = record["pre"] != record["post"]
        self.path = os.path.join(root, record["path"])
        self.overlay = os.path.join(HERE, "overlay", record["path"])
        self.package = package
        # `original`, `ours`, `drifted` or `missing`.
        self.state = self._state()

    def _state(self):
        try:
            digest = sha256_of(self.path)
        except FileNotFoundError:
            return "original" if self.record["pre"] is None else "missing"
        except OSError:
            return "missing"
        if digest == self.record["pre"]:
            return "original"
        return "ours" if digest == self.record["post"] else "drifted"

    def check(self, mode):
        """Raises `Wrong` where the file isn't as the mode wants it, on disk and in our own package."""
        wanted = "ours" if self.edited and mode == "in-place" else "original"
        if self.state != wanted:
            whose = "%s %s" % (self.package["distribution"], self.package["version"])
            what = {
                "original": "is without its patch again (was %s installed anew?)",
                "ours": "is patched on disk already, though it was recorded as it comes with %s",
                "drifted": "is not the file that was recorded for %s (upgraded, or edited?)",
                "missing": "is gone; it was recorded for %s",
            }[self.state]
            raise Wrong(self.path, what % whose, "`fi-arch verify` shows all, %s" % anew(mode))
        if self.edited and mode != "in-place":
            try:
                digest = sha256_of(self.overlay)
            except OSError as error:
                raise Wrong(self.overlay, "cannot be read (%s)" % error.strerror, anew(mode))
            if digest != self.record["post"]:
                raise Wrong(self.overlay, "was altered", anew(mode))


class Overlay:
    """What was recorded, held against what is there."""

    def __init__(self):
        self.state = None
        # All faults, the first one first.
        self.wrong = []
        self.files = []
        # Packages of the set that are not installed.
        self.absent = []
        # What the finder serves: full module name → file.
        self.modules = {}
        # The names that it has served.
        self.served = set()
        # Faults of artifacts, by their file.
        self.bad_artifacts = {}
        # What was found wrong later: an artifact that does not load.
        self.closed = None
        try:
            self.state = read_state()
            self.mode = self.state["mode"]
            self.names = [package["name"] for package in self.state["packages"]]
        except Wrong as wrong:
            self.mode = "shim"
            self.names = list(ROOTS)
            self.wrong.append(wrong)

    def judge(self):
        for package in self.state["packages"]:
            self._judge_package(package)
        for artifact in self.state["artifacts"]:
            try:
                check_artifact(artifact, self.mode)
            except Wrong as wrong:
                self.bad_artifacts[artifact["file"]] = str(wrong)
                self.wrong.append(wrong)
        if self.mode != "in-place":
            self.modules = {file.module: file for file in self.files if file.edited and file.module}
            for name in self.modules:
                if name in sys.modules:
                    self.wrong.append(Wrong(name, "was imported before fi-arch's shim had started", "`fi-arch verify` says why"))
        return self

    def _judge_package(self, package):
        root = _root_of(package["name"])
        if root is None:
            self.absent.append(package["name"])
            # An engine that is not there has no gate. Without FlashInfer there is nothing behind an engine's gate.
            if package["name"] == "flashinfer":
                what = "is not installed any more (%s %s was)" % (package["distribution"], package["version"])
                self.wrong.append(Wrong("flashinfer", what, "install it again, or take fi-arch back with `fi-arch uninstall`"))
            return
        for record in package["files"]:
            file = File(package, record, root)
            self.files.append(file)
            try:
                file.check(self.mode)
            except Wrong as wrong:
                self.wrong.append(wrong)

    @property
    def ok(self):
        return not self.wrong

    @property
    def needs_artifact(self):
        """Whether FlashInfer loads from us: one that is right as it is has no gate that we open."""
        return any(
            "gate" in record["edits"]
            for package in self.state["packages"]
            if package["name"] == "flashinfer"
            for record in package["files"]
        )

    def version(self, name):
        return next((package["version"] for package in self.state["packages"] if package["name"] == name), None)

    def warn(self):
        """The one warning of a process in which nothing is served."""
        from . import say

        more = len(self.wrong) - 1
        say("fi-arch: nothing of it is in force: %s%s" % (self.wrong[0], " (and %d more)" % more if more else ""))


_lock = RLock()
_recorded = None
_judged = None


def recorded():
    """The overlay as it is recorded, not held against anything yet."""
    global _recorded
    with _lock:
        if _recorded is None:
            _recorded = Overlay()
        return _recorded


def judged():
    """The overlay, judged once in a process. Says what is wrong with it, once."""
    global _judged
    with _lock:
        if _judged is None:
            overlay = recorded()
            if overlay.ok:
                overlay.judge()
            if not overlay.ok and not _quiet:
                overlay.warn()
            _judged = overlay
        return _judged


# For those who tell all that is wrong by themselves.
_quiet = False


def quiet():
    global _quiet
    _quiet = True


def anew(mode):
    """What puts everything right again."""
    if mode == "run":
        return "start again with `fi-arch run`"
    return "`fi-arch install%s` activates anew" % (" --in-place" if mode == "in-place" else "")


def read_state():
    """The contents of `state.json`, or `Wrong`."""
    cure = anew(None)
    try:
        with open(STATE, "rb") as file:
            state = json.loads(file.read().decode("utf-8"))
    except OSError as error:
        raise Wrong(STATE, "cannot be read (%s)" % error.strerror, cure)
    except ValueError:
        raise Wrong(STATE, "is damaged (no JSON)", cure)
    checksum = state.pop("checksum", None) if isinstance(state, dict) else None
    # The same text as the program's: no number in it has a fraction, and keys keep their order.
    text = json.dumps(state, indent=2, ensure_ascii=False)
    if checksum != hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest():
        raise Wrong(STATE, "is damaged (its checksum differs)", cure)
    if state.get("format") != FORMAT:
        what = "has format %s, and this shim knows %d" % (state.get("format"), FORMAT)
        raise Wrong(STATE, what, cure)
    return state


def check_artifact(artifact, mode):
    """Raises `Wrong` where an artifact is not the file that was recorded."""
    path = artifact_path(artifact)
    cure = anew(mode)
    try:
        size = os.stat(path).st_size
        if artifact.get("bytes") is not None and size != artifact["bytes"]:
            raise Wrong(path, "has %d bytes instead of %d" % (size, artifact["bytes"]), cure)
        if sha256_of(path) != artifact["sha256"]:
            raise Wrong(path, "was altered", cure)
    except OSError as error:
        raise Wrong(path, "cannot be read (%s)" % error.strerror, cure)


def artifact_path(artifact):
    return os.path.join(HERE, artifact["file"])


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while True:
            block = file.read(1 << 20)
            if not block:
                return digest.hexdigest()
            digest.update(block)


def _root_of(name):
    """The folder that holds the package `name`; None where it is not installed. Imports nothing."""
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if module is None:
        from ._imports import ask_others

        spec = ask_others(name, None, None)
        origin = None if spec is None else spec.origin
    # A folder that outlived its package is a namespace, which has no file.
    if not origin or os.path.basename(origin) != "__init__.py":
        return None
    return os.path.dirname(os.path.dirname(os.path.abspath(origin)))
