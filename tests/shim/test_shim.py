"""What the shim promises, on small fakes. `python3 tests/shim/test_shim.py` runs them with the Python at hand."""

import json
import os
import shutil
import sys
import textwrap
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import fakes  # noqa: E402
from fakes import COMM, ORIGINALS, POSTS, Site  # noqa: E402

JIT = "flashinfer/jit/comm.py"
HEADER = "flashinfer/data/include/flashinfer/comm/a.cuh"
GPU = {"FAKE_GPU": "12.0", "FLASHINFER_CUDA_ARCH_LIST": "12.0f"}
LOAD = """
    import torch
    from flashinfer.jit.comm import gen_trtllm_comm_module
    try:
        print(gen_trtllm_comm_module().build_and_load())
    except RuntimeError as error:
        print(type(error).__name__, error)
"""
# Whether FlashInfer and SGLang are the overlay's.
STATE = """
    import torch, flashinfer.jit.comm as c, sglang.gate as g
    print(c.gate(), g.OPEN)
"""
OURS, THEIRS = "[9, 10, 12] True", "[9, 10] False"


def append(path):
    with open(path, "a") as file:
        file.write("\n")


class Case(unittest.TestCase):
    def site(self, *args, **kwargs):
        site = Site(*args, **kwargs)
        self.addCleanup(site.close)
        return site

    def assert_off(self, site, *words, **env):
        """Nothing is served, and one line of stderr says why, with `words`."""
        status, out, err = site.run("-c", textwrap.dedent(STATE), **dict(GPU, **env))
        self.assertEqual((status, out.strip()), (0, THEIRS), err)
        self.assertEqual(err.count("\n"), 1, err)
        self.assertTrue(err.startswith("fi-arch: "), err)
        for word in words:
            self.assertIn(word, err)


class Serving(Case):
    def test_the_overlay_is_served_and_nothing_is_said(self):
        self.assertEqual(self.site().code(STATE, **GPU), OURS)

    def test_code_bears_the_overlays_name_and_the_module_the_originals(self):
        site = self.site()
        out = site.code("""
            import flashinfer.jit.comm as c, flashinfer.res as r
            print(c.gate.__code__.co_filename, c.__file__, c.__spec__.origin, r.__path__[0], sep="\\n")
        """)
        original = os.path.join(site.site, JIT)
        overlay = os.path.join(site.package, "overlay", JIT)
        self.assertEqual(out.split("\n"), [overlay, original, original, os.path.join(site.site, "flashinfer/res")])

    def test_the_source_of_functions_classes_and_modules_is_the_overlays(self):
        out = self.site().code("""
            import inspect, flashinfer.jit.comm as c
            print(repr([inspect.getsource(c.gate), inspect.getsource(c.Before), inspect.getsource(c)]))
            print(repr(inspect.getsource(c.gen_trtllm_comm_module).splitlines()[0]))
        """)
        sources, generator = map(eval, out.split("\n"))
        self.assertEqual(sources[0], "def gate():\n    return [9, 10, 12]\n")
        self.assertEqual(sources[1], 'class Before:\n    """A class whose lines the overlay moves."""\n\n    answer = 1\n')
        self.assertEqual(sources[2], POSTS[JIT])
        self.assertEqual(generator, "def gen_trtllm_comm_module():")

    def test_a_traceback_shows_the_overlays_file_and_line(self):
        site = self.site()
        status, _, err = site.run("-c", "import flashinfer.jit.comm as c; c.fails()")
        self.assertEqual(status, 1)
        line = POSTS[JIT].split("\n").index('    raise ValueError("on purpose")') + 1
        self.assertIn('File "%s/overlay/%s", line %d, in fails' % (site.package, JIT, line), err)
        self.assertIn('raise ValueError("on purpose")', err)

    def test_a_reload_stays_served(self):
        self.assertEqual(self.site().code("""
            import importlib, inspect, flashinfer.jit.comm as c
            c = importlib.reload(c)
            print(c.gate(), "12" in inspect.getsource(c), c.gen_trtllm_comm_module.__module__)
        """), "[9, 10, 12] True flashinfer.jit.comm")

    def test_spawned_and_forked_processes_have_it_too(self):
        site = self.site()
        site.write("job.py", "def job(_):\n    import flashinfer.jit.comm as c\n    return c.gate()\n")
        script = site.write("main.py", textwrap.dedent("""
            import multiprocessing, sys
            from job import job
            if __name__ == "__main__":
                if sys.argv[2] == "after":
                    job(0)
                with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
                    print(pool.map(job, [0]))
        """))
        for method in ("spawn", "fork", "forkserver"):
            for when in ("before", "after"):
                status, out, err = site.run(script, method, when)
                self.assertEqual((status, out.strip()), (0, "[[9, 10, 12]]"), err)

    def test_it_is_served_as_a_program(self):
        site = self.site()
        status, out, err = site.run("-m", "flashinfer.jit.comm")
        self.assertEqual((status, out.strip()), (0, "main [9, 10, 12] %s" % os.path.join(site.site, JIT)), err)

    def test_resources_are_found_beside_the_original(self):
        self.assertEqual(self.site().code("""
            import importlib.resources, pkgutil, flashinfer.res as r
            print(r.WHO, (importlib.resources.files(r) / "text.txt").read_text().strip(),
                  pkgutil.get_data("flashinfer.res", "text.txt").decode().strip())
        """), "overlay a resource a resource")

    def test_byte_code_lies_beside_the_overlay_or_nowhere(self):
        site = self.site()
        cache = os.path.join(site.package, "overlay/flashinfer/jit/__pycache__")
        self.assertEqual(site.code(STATE, **GPU), OURS)
        self.assertEqual(len(os.listdir(cache)), 1)
        self.assertEqual(site.code(STATE, **GPU), OURS)
        self.assertNotIn("comm", " ".join(os.listdir(os.path.join(site.site, "flashinfer/jit/__pycache__"))))
        shutil.rmtree(cache)
        # Where it cannot be written. (To root every folder can be, but a file is no folder.)
        site.write("overlay/flashinfer/jit/__pycache__", "", site.package)
        self.assertEqual(site.code(STATE, **GPU), OURS)

    def test_an_editable_install_is_found_by_its_own_finder(self):
        site = self.site()
        tree = os.path.join(site.dir, "tree")
        os.rename(os.path.join(site.site, "flashinfer"), os.path.join(site.dir, "flashinfer"))
        os.mkdir(tree)
        os.rename(os.path.join(site.dir, "flashinfer"), os.path.join(tree, "flashinfer"))
        site.write("editable.py", textwrap.dedent("""
            import sys
            from importlib.util import spec_from_file_location
            class Finder:
                @classmethod
                def find_spec(cls, name, path=None, target=None):
                    if name == "flashinfer":
                        return spec_from_file_location(name, %r)
            def install():
                sys.meta_path.append(Finder)
        """) % os.path.join(tree, "flashinfer/__init__.py"))
        site.write("zz_editable.pth", "import editable; editable.install()\n")
        self.assertEqual(site.code(STATE, **GPU), OURS)

    def test_a_finder_that_wraps_all_others_keeps_its_hold(self):
        # As import hooks of tracers do it: they ask all finders again, this shim too, and wrap the loader.
        self.assertEqual(self.site().code("""
            import sys, importlib.util
            seen, busy = [], set()
            class Wrapped:
                def __init__(self, loader): self.loader = loader
                def create_module(self, spec): return self.loader.create_module(spec)
                def exec_module(self, module):
                    self.loader.exec_module(module)
                    seen.append(module.__name__)
            class Hook:
                def find_spec(self, name, path=None, target=None):
                    if name in busy: return None
                    busy.add(name)
                    try: spec = importlib.util.find_spec(name)
                    finally: busy.discard(name)
                    if spec is not None and spec.loader is not None: spec.loader = Wrapped(spec.loader)
                    return spec
            for place in (0, len(sys.meta_path)):
                for name in [name for name in sys.modules if name.startswith("flashinfer")]: del sys.modules[name]
                hook = Hook()
                sys.meta_path.insert(place, hook)
                if place: sys.meta_path.insert(1, sys.meta_path.pop())
                import flashinfer.jit.comm as c
                print(c.gate(), "flashinfer.jit.comm" in seen)
                sys.meta_path.remove(hook)
                seen.clear()
        """), "[9, 10, 12] True\n[9, 10, 12] True")

    def test_an_engine_that_is_not_installed_stops_nothing(self):
        site = self.site()
        shutil.rmtree(os.path.join(site.site, "sglang"))
        self.assertEqual(site.code("import flashinfer.jit.comm as c; print(c.gate())"), "[9, 10, 12]")

    def test_a_flashinfer_that_needs_nothing_leaves_the_engine_its_edits(self):
        site = self.site(artifacts=[])
        package = site.state["packages"][0]
        # Its gate is not ours to open. Other edits of it need no artifact.
        package["files"] = [file for file in package["files"] if "gate" not in file["edits"]]
        site.seal()
        self.assertEqual(site.code(STATE, **GPU), "[9, 10] True")
        self.assertEqual(site.code("import flashinfer.res as r; print(r.WHO)", FI_ARCH_REQUIRE="1"), "overlay")


class OneSet(Case):
    def test_any_wrong_file_keeps_all_from_being_served(self):
        for path in [JIT, HEADER, "flashinfer/data/include/flashinfer/comm/watched.cuh", "flashinfer/data/csrc/one.cu", "sglang/gate.py"]:
            site = self.site()
            append(os.path.join(site.site, path))
            self.assert_off(site, os.path.join(site.site, path), "`fi-arch verify`", "`fi-arch install`")

    def test_a_file_that_is_gone_or_came_up_keeps_all_from_being_served(self):
        site = self.site()
        os.remove(os.path.join(site.site, HEADER))
        self.assert_off(site, HEADER, "is gone")
        site = self.site()
        added = site.write("flashinfer/data/include/fi_arch/added.cuh", "// whose?\n")
        self.assert_off(site, added)

    def test_a_spoilt_overlay_or_artifact_keeps_all_from_being_served(self):
        for path in ["overlay/" + JIT, "overlay/" + HEADER, fakes.ARTIFACT]:
            for spoil in (append, os.remove):
                site = self.site()
                spoil(os.path.join(site.package, path))
                self.assert_off(site, path, "`fi-arch install`")
        site = self.site()
        # As long as it was.
        site.write(fakes.ARTIFACT, "The artifact", site.package)
        self.assert_off(site, fakes.ARTIFACT, "altered")

    def test_files_that_bear_the_patch_already_are_told_apart(self):
        site = self.site()
        site.write(JIT, POSTS[JIT])
        status, out, err = site.run("-c", "import flashinfer.res as r; print(r.WHO)", **GPU)
        self.assertEqual((status, out.strip()), (0, "original"), err)
        self.assertIn("is patched on disk already", err)

    def test_what_was_imported_before_the_shim_keeps_all_from_being_served(self):
        site = self.site()
        os.rename(os.path.join(site.site, "fi_arch_shim.pth"), os.path.join(site.site, "off"))
        status, out, err = site.run("-c", textwrap.dedent("""
            import flashinfer.jit.comm as c
            import fi_arch_shim
            fi_arch_shim.start()
            import flashinfer.res as r
            print(c.gate(), r.WHO, fi_arch_shim.in_force())
        """), **GPU)
        self.assertEqual((status, out.strip()), (0, "[9, 10] original False"), err)
        self.assertIn("flashinfer.jit.comm was imported before", err)

    def test_without_flashinfer_the_engines_gate_stays_closed(self):
        site = self.site()
        # What an uninstalled package leaves is a folder without its `__init__.py`.
        os.remove(os.path.join(site.site, "flashinfer/__init__.py"))
        status, out, err = site.run("-c", "import sglang.gate as g; print(g.OPEN)", **GPU)
        self.assertEqual((status, out.strip()), (0, "False"), err)
        self.assertIn("flashinfer-python 0.6.3 was", err)


class Faults(Case):
    def test_a_damaged_package_ends_in_one_line_and_a_sound_interpreter(self):
        def cut(site, name):
            site.write(name, "def (:\n", site.package)

        def remove(site, name):
            os.remove(os.path.join(site.package, name))

        for spoil, name in [
            (cut, "_overlay.py"), (cut, "_imports.py"), (cut, "_specs.py"), (remove, "_imports.py"), (remove, "_overlay.py"),
            (cut, "state.json"), (remove, "state.json"), (cut, "__init__.py"), (remove, "_gpu.py"),
        ]:
            site = self.site()
            spoil(site, name)
            status, out, err = site.run("-c", "import flashinfer.jit.comm as c; print(c.gate()[:2])")
            self.assertEqual((status, out.strip()), (0, "[9, 10]"), name + err)
            self.assertEqual(err.count("\n"), 1, name + err)
            self.assertNotIn("Traceback", err)
            self.assertIn("`fi-arch install`", err)
            self.assertIn("fi_arch_shim", err)
            if name != "__init__.py":
                self.assertEqual(site.code("print(1)"), "1", "who imports nothing of it hears nothing")

    def test_a_state_of_another_format_or_altered_is_refused(self):
        site = self.site()
        site.state["format"] = 2
        site.seal()
        self.assert_off(site, "state.json", "has format 2")
        site = self.site()
        site.write("state.json", fakes.seal(site.state).replace("0.6.3", "0.6.4"), site.package)
        self.assert_off(site, "state.json", "checksum")

    def test_a_sealed_state_without_its_parts_is_one_line_too(self):
        site = self.site()
        del site.state["packages"][0]["files"][0]["pre"]
        site.seal()
        self.assert_off(site, "fi_arch_shim", "damaged")

    def test_the_start_line_survives_the_package(self):
        site = self.site()
        shutil.rmtree(site.package)
        self.assertEqual(site.code("import flashinfer.jit.comm as c; print(c.gate())"), "[9, 10]")

    def test_an_interpreter_that_imports_none_of_it_loads_one_file(self):
        site = self.site()
        code = "import sys, json; print(*sorted(sys.modules))"
        loaded = set(site.code(code).split())
        site.write("state.json", "{", site.package)
        self.assertEqual(set(site.code(code).split()), loaded)
        self.assertEqual({name for name in loaded if "fi_arch" in name}, {"fi_arch_shim"})
        without = set(site.code(code, FI_ARCH_DISABLE="1").split())
        self.assertEqual(loaded - without, set())
        # What Python itself loads for such a file is its own.
        site.write("fi_arch_shim.pth", "\n")
        self.assertEqual(loaded - set(site.code(code).split()), {"fi_arch_shim"})

    def test_the_start_file_starts_it_from_python_3_15_on_and_harms_no_other(self):
        site = self.site()
        shutil.copy(os.path.join(fakes.SHIM, "fi_arch_shim.start"), site.site)
        self.assertEqual(site.code(STATE, **GPU), OURS)
        os.remove(os.path.join(site.site, "fi_arch_shim.pth"))
        self.assertEqual(site.code(STATE, **GPU), OURS if sys.version_info >= (3, 15) else THEIRS)

    def test_it_starts_once(self):
        self.assertEqual(self.site().code("""
            import sys, fi_arch_shim
            fi_arch_shim.start()
            print(sum(type(finder).__module__ == "fi_arch_shim" for finder in sys.meta_path))
        """), "1")


class Switches(Case):
    SWALLOW = """
        try:
            import flashinfer.jit.comm as c
            print(c.gate())
        except BaseException as error:
            print("swallowed", error)
    """

    def refused(self, site, *words, code=None, **env):
        status, out, err = site.run("-c", textwrap.dedent(code or self.SWALLOW), FI_ARCH_REQUIRE="1", **env)
        self.assertEqual((status, out), (3, ""), err)
        for word in words:
            self.assertIn(word, err)
        self.assertEqual(err.count("\n"), 1, err)

    def test_disabled_nothing_is_served(self):
        self.assertEqual(self.site().code(STATE, FI_ARCH_DISABLE="1", **GPU), THEIRS)
        self.assertEqual(self.site().code(STATE, FI_ARCH_DISABLE="0", **GPU), OURS)

    def test_required_and_right_a_process_runs(self):
        self.assertEqual(self.site().code(STATE, FI_ARCH_REQUIRE="1", **GPU), OURS)
        self.assertEqual(self.site().code(LOAD, FI_ARCH_REQUIRE="1", **GPU), "loaded the artifact")

    def test_required_and_wrong_a_process_ends_whatever_it_catches(self):
        site = self.site()
        os.remove(os.path.join(site.site, HEADER))
        self.refused(site, HEADER, "FI_ARCH_REQUIRE")
        self.assertEqual(site.code("print(1)", FI_ARCH_REQUIRE="1"), "1")

    def test_required_and_disabled_is_refused(self):
        self.refused(self.site(), "both set", FI_ARCH_DISABLE="1")

    def test_required_with_a_damaged_or_missing_package_is_refused(self):
        for name in ["__init__.py", "_overlay.py", "_require.py", "state.json"]:
            site = self.site()
            site.write(name, "def (:", site.package)
            self.refused(site, "`fi-arch install`")
            self.assertEqual(site.run("-c", "print(1)", FI_ARCH_REQUIRE="1")[:2], (0, "1\n"))
        site = self.site()
        shutil.rmtree(site.package)
        self.refused(site, "is gone")

    def test_required_without_an_artifact_for_the_gpu_is_refused(self):
        gpu = {"FAKE_GPU": "9.0", "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
        self.refused(self.site(), "SM 9.0", "no artifact fits", code=LOAD, **gpu)
        site = self.site()
        fake_nvml(site, "[(12, 0)]")
        self.assertEqual(site.code(STATE, FI_ARCH_REQUIRE="1", **GPU), OURS)
        fake_nvml(site, "[(9, 0)]")
        self.refused(site, "no artifact fits this machine's GPUs (SM 9.0; there is sm_120f)")

    def test_required_in_place_is_refused_at_flashinfers_import(self):
        site = self.site("in-place")
        self.assertEqual(site.code("import flashinfer.jit.comm as c; print(c.gate())", FI_ARCH_REQUIRE="1"), "[9, 10, 12]")
        site.write(HEADER, ORIGINALS[HEADER])
        self.refused(site, HEADER, "without its patch again")
        self.refused(self.site("in-place"), "both set", FI_ARCH_DISABLE="1")


def fake_nvml(site, gpus):
    """Lets the shim of a site see GPUs."""
    with open(os.path.join(fakes.SHIM, "_gpu.py")) as file:
        text = file.read()
    site.write("_gpu.py", text + "\n\ndef present():\n    return %s\n" % gpus, site.package)


class Generator(Case):
    def test_the_artifact_is_loaded_and_nothing_compiled(self):
        self.assertEqual(self.site().code(LOAD, **GPU), "loaded the artifact")
        # Without a GPU FlashInfer's own targets say what is wanted.
        self.assertEqual(self.site().code(LOAD, FLASHINFER_CUDA_ARCH_LIST="12.1a"), "loaded the artifact")

    def test_whatever_would_load_or_compile_gets_the_artifact(self):
        site = self.site()
        out = site.code("""
            import torch
            from flashinfer.jit.comm import gen_trtllm_comm_module
            spec = gen_trtllm_comm_module()
            print(spec.name, spec.is_aot, spec.is_compiled, spec.aot_path == spec.get_library_path() == spec.jit_library_path, spec.build(True))
            print(spec.try_load(), spec.load("elsewhere.so"), spec.get_library_path(), sep="|")
        """, **GPU)
        path = os.path.join(site.package, fakes.ARTIFACT)
        self.assertEqual(out, "trtllm_comm True True True None\nloaded the artifact|loaded the artifact|" + path)

    def test_a_flashinfer_without_targets_loads_it_too(self):
        self.assertEqual(self.site().code(LOAD, FAKE_GPU="12.1"), "loaded the artifact")

    def test_a_missing_artifact_is_one_error_that_names_its_cure(self):
        site = self.site(artifacts=[])
        out = site.code(LOAD, FAKE_GPU="12.1", FLASHINFER_CUDA_ARCH_LIST="12.1a")
        self.assertTrue(out.startswith("RuntimeError fi-arch: FlashInfer's trtllm_comm for SM 12.1: no artifact fits (there is none)"), out)
        self.assertTrue(out.endswith("`fi-arch install --sm 121 --env %s`" % site.dir), out)

    def test_an_artifact_that_changes_under_a_process_is_not_loaded(self):
        site = self.site()
        out = site.code("""
            import torch, flashinfer.jit.comm as c, fi_arch_shim
            print(fi_arch_shim.admits())
            with open(%r, "w") as file:
                file.write("another one")
            for _ in range(2):
                try:
                    print(c.gen_trtllm_comm_module().build_and_load())
                except RuntimeError as error:
                    print(error)
            print(fi_arch_shim.admits(), fi_arch_shim.admits(1, 2), fi_arch_shim.in_force())
        """ % os.path.join(site.package, fakes.ARTIFACT), **GPU)
        first, error, again, last = out.split("\n")
        self.assertEqual((first, last), ("True", "False False False"))
        self.assertEqual(error, again)
        self.assertIn("has 11 bytes instead of 12", error)
        self.assertIn("`fi-arch install --sm 120 --env %s`" % site.dir, error)

    def test_an_artifact_that_does_not_load_says_why(self):
        site = self.site()
        site.write("tvm_ffi/__init__.py", "def load_module(path):\n    raise OSError('undefined symbol: x')\n")
        out = site.code(LOAD, **GPU)
        self.assertIn("does not load: undefined symbol: x. To cure it: `fi-arch install --sm 120", out)

    def test_a_driver_below_the_floor_is_told(self):
        for driver, floor, loads in [
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025", "580", False),
            ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06", True),
            ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.05  Release Build", "580.65.06", False),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57  Thu Jan 23 2025", "580", False),
        ]:
            site = self.site()
            site.state["artifacts"][0]["min_driver"] = floor
            site.seal()
            proc = site.write("version", driver + "\n")
            with open(os.path.join(fakes.SHIM, "_gpu.py")) as file:
                site.write("_gpu.py", file.read() + "\nDRIVER = %r\n" % proc, site.package)
            out = site.code(LOAD, **GPU)
            if loads:
                self.assertEqual(out, "loaded the artifact")
            else:
                self.assertIn("it needs NVIDIA driver %s or newer" % floor, out)
                self.assertEqual(site.code("import torch, fi_arch_shim as f; print(f.in_force())", **GPU), "False")

    def test_a_libcudart_that_is_not_there_is_told(self):
        site = self.site()
        site.state["artifacts"][0]["libcudart"] = "libcudart.so.97"
        site.seal()
        self.assertIn("it needs libcudart.so.97, which cannot be loaded here", site.code(LOAD, **GPU))
        # A process that has another one gets no second.
        library = site.write("libcudart.so.12", "")
        code = "import mmap; f = open(%r, 'r+b'); f.write(b'x' * 4096); f.flush(); m = mmap.mmap(f.fileno(), 4096)\n" % library
        self.assertIn("it needs libcudart.so.97, and torch has loaded libcudart.so.12", site.code(code + textwrap.dedent(LOAD), **GPU))

    def test_majors_9_and_10_compile_the_repaired_sources_under_another_name(self):
        site = self.site()
        code = """
            import torch, json
            from flashinfer.jit.comm import gen_trtllm_comm_module
            spec = gen_trtllm_comm_module()
            print(json.dumps([spec.name, [str(s) for s in spec.sources], [str(s) for s in spec.extra_include_dirs],
                              spec.extra_cuda_cflags, spec.is_ninja_generated, spec.build_and_load()]))
        """
        overlay = os.path.join(site.package, "overlay/flashinfer/data")
        data = os.path.join(site.site, "flashinfer/data")
        for env in [
            {"FAKE_GPU": "9.0", "FLASHINFER_CUDA_ARCH_LIST": "9.0a"},
            # Beside another GPU, SM 12.x is not compiled along.
            {"FAKE_GPU": "9.0", "FLASHINFER_CUDA_ARCH_LIST": "9.0a 12.0f"},
            {"FLASHINFER_CUDA_ARCH_LIST": "9.0a"},
        ]:
            name, sources, includes, flags, is_written, module = json.loads(site.code(code, **env))
            self.assertRegex(name, "^trtllm_comm_fi_arch_[0-9a-f]{8}$")
            self.assertEqual(sources, [overlay + "/csrc/one.cu", data + "/csrc/two.cu"])
            self.assertEqual(includes, [overlay + "/include", data + "/include/flashinfer/comm"])
            self.assertEqual(flags, ["-gencode=arch=compute_90a"])
            self.assertEqual((is_written, module), (False, "FlashInfer's own " + name))

    def test_other_majors_get_what_flashinfer_gives(self):
        env = {"FAKE_GPU": "8.9", "FLASHINFER_CUDA_ARCH_LIST": "8.9 12.0f"}
        self.assertIn("No supported CUDA architectures found", self.site().code(LOAD, **env))
        self.assertIn("No supported CUDA architectures found", self.site().code(LOAD, FAKE_GPU="8.9"))

    def test_disabled_in_place_the_gate_is_closed_again(self):
        site = self.site("in-place")
        self.assertEqual(site.code(LOAD, **GPU), "loaded the artifact")
        self.assertIn("No supported CUDA architectures found", site.code(LOAD, FI_ARCH_DISABLE="1", **GPU))

    def test_in_place_a_lost_patch_is_an_error_and_no_compilation(self):
        site = self.site("in-place")
        site.write(HEADER, ORIGINALS[HEADER])
        status, out, err = site.run("-c", textwrap.dedent(LOAD), **GPU)
        self.assertEqual(status, 0, err)
        self.assertIn("RuntimeError fi-arch: FlashInfer's trtllm_comm for SM 12.0: %s is without" % os.path.join(site.site, HEADER), out)
        self.assertIn("`fi-arch install --in-place`", out)
        self.assertEqual(err.count("\n"), 1, err)

    def test_in_place_files_work_without_the_package(self):
        site = self.site("in-place")
        shutil.rmtree(site.package)
        self.assertEqual(site.code(LOAD, FAKE_GPU="9.0", FLASHINFER_CUDA_ARCH_LIST="9.0a"), "FlashInfer's own trtllm_comm")

    def test_the_cure_of_a_run_is_a_run(self):
        out = self.site("run", artifacts=[]).code(LOAD, **GPU)
        self.assertIn("start again with `fi-arch run --sm 120 -- COMMAND`", out)


class OnMiss(Case):
    ANSWER = {"verdict": "pass", "module": "trtllm_comm", "flashinfer": "0.6.3", "target": "sm_120f", "min_driver": None}

    def build_site(self, script=None, **answer):
        site = self.site(artifacts=[], on_miss="build")
        built = site.write("built.so", "the built one")
        said = dict(self.ANSWER, artifact=built, sha256=fakes.sha256("the built one"))
        said.update(answer)
        script = script or "echo \"$@\" >> %s/calls; echo '%s'" % (site.dir, json.dumps(said))
        os.chmod(site.write("bin/fi-arch", "#!/bin/sh\n%s\n" % script), 0o755)
        self.env = dict(GPU, PATH=os.path.join(site.site, "bin") + os.pathsep + os.environ["PATH"])
        return site

    def test_the_build_is_asked_for_when_the_module_is_wanted_and_loaded(self):
        site = self.build_site()
        status, out, err = site.run("-c", textwrap.dedent("""
            import torch, os, fi_arch_shim as f
            from flashinfer.jit.comm import gen_trtllm_comm_module
            spec = gen_trtllm_comm_module()
            print(f.admits(), spec.is_compiled, spec.get_library_path(), os.path.exists("calls"))
            print(spec.build_and_load(), spec.is_compiled)
            spec.build_and_load()
        """), **self.env)
        self.assertEqual((status, out), (0, "True False jit/trtllm_comm False\nloaded the built one True\n"), err)
        with open(os.path.join(site.dir, "calls")) as file:
            self.assertEqual(file.read(), "build --json --module trtllm_comm --sm 120 --env %s\n" % site.dir)

    def test_a_build_that_fails_is_one_error_and_closes_the_gates(self):
        site = self.build_site("echo 'error: no nvcc' >&2; exit 3")
        code = textwrap.dedent(LOAD) + "import fi_arch_shim as f; print(f.admits(), f.in_force())"
        status, out, err = site.run("-c", code, **self.env)
        self.assertEqual(status, 0, err)
        self.assertIn("it ended with 3\nerror: no nvcc", out)
        self.assertTrue(out.endswith("False False\n"), out)

    def test_an_answer_that_is_not_what_was_asked_for_is_not_loaded(self):
        for answer, why in [
            ({"verdict": "fail"}, "answered with fail"),
            ({"module": "vllm_comm"}, "answered with pass of vllm_comm"),
            ({"target": "sm_121a"}, "answered with sm_121a"),
            ({"target": "sm_100f"}, "answered with sm_100f"),
            ({"flashinfer": "0.6.4"}, "built for FlashInfer 0.6.4"),
            ({"sha256": "0" * 64}, "was altered"),
            ({"artifact": "/nowhere/x.so"}, "cannot be read"),
        ]:
            site = self.build_site(**answer)
            status, out, err = site.run("-c", textwrap.dedent(LOAD), **self.env)
            self.assertEqual(status, 0, err)
            self.assertTrue(out.startswith("RuntimeError"), out)
            self.assertIn(why, out)

    def test_without_the_program_it_is_an_error_and_no_gate_opens(self):
        site = self.site(artifacts=[], on_miss="build")
        code = "import torch, fi_arch_shim as f; print(f.admits())"
        self.assertEqual(site.code(code, **dict(GPU, PATH="/nowhere")), "False")
        self.assertIn("fi-arch, which would build it, is not on PATH", site.code(LOAD, **dict(GPU, PATH="/nowhere")))


class Limits(Case):
    ASK = """
        import torch, fi_arch_shim as f
        print(f.in_force(), f.admits(), [f.admits(ranks=n) for n in (1, 2, 4, 8)], f.admits(64, 4), f.admits(65, 4), f.admits(10**9, 2),
              f.admits(10**9), f.workspace_tokens(7), f.oneshot(16, 4, "default"), f.oneshot(17, 4, "default"), f.oneshot(1, 2, "default"))
    """
    IN_FORCE = "True True [False, True, True, False] True False True True 2048 True False default"
    CLOSED = "False [False, False, False, False] False False False False 7 default default default"

    def test_the_policy_answers_where_all_is_in_force(self):
        for mode in ("shim", "in-place", "run"):
            site = self.site(mode)
            self.assertEqual(site.code(self.ASK, **GPU), self.IN_FORCE, mode)
            self.assertEqual(site.code("import flashinfer" + self.ASK.replace("\n        ", "\n"), **GPU), self.IN_FORCE, mode)

    def test_it_answers_nothing_on_another_gpu_or_where_nothing_is_in_force(self):
        site = self.site()
        self.assertEqual(site.code(self.ASK, FAKE_GPU="9.0"), "False " + self.CLOSED)
        self.assertEqual(site.code(self.ASK), "False " + self.CLOSED)
        self.assertEqual(site.code(self.ASK, FI_ARCH_DISABLE="1", **GPU), "False " + self.CLOSED)
        site = self.site("in-place")
        site.write(JIT, COMM)
        status, out, _ = site.run("-c", textwrap.dedent(self.ASK), **GPU)
        self.assertEqual((status, out.strip()), (0, "False " + self.CLOSED))

    def test_a_policy_without_numbers_leaves_the_defaults(self):
        site = self.site(policy={"format": 1, "ranks": [{"count": 2, "reason": "r"}]})
        self.assertEqual(
            site.code(self.ASK, **GPU), "True True [False, True, False, False] False False True True 7 default default default"
        )

    def test_an_answer_without_a_gpu_is_not_the_last_one(self):
        self.assertEqual(self.site().code("""
            import os, torch, fi_arch_shim as f
            print(f.admits(), end=" ")
            os.environ["FAKE_GPU"] = "12.0"
            print(f.admits(), f.in_force())
        """), "False True True")

    def test_a_module_that_came_past_the_shim_closes_the_gates(self):
        self.assertEqual(self.site().code("""
            import sys, torch, fi_arch_shim as f
            import flashinfer.res
            sys.modules["flashinfer.jit.comm2"] = sys.modules.pop("flashinfer.jit.comm")
            ours = sys.meta_path.pop(0)
            import flashinfer.jit.comm as c
            sys.meta_path.insert(0, ours)
            from fi_arch_shim import _overlay
            _overlay.judged().served.discard("flashinfer.jit.comm")
            print(c.gate(), f.in_force())
        """, **GPU), "[9, 10] False")


class Run(Case):
    def test_the_next_sitecustomize_runs_as_python_would_run_it(self):
        site = self.site("run")
        theirs = site.write("sitecustomize.py", "import os\nos.environ['NCCL_X'] = __name__ + ' ' + __file__\nWHO = 'theirs'\n")
        out = site.code("""
            import os, sitecustomize, flashinfer.jit.comm as c
            print(os.environ["NCCL_X"], sitecustomize.WHO, sitecustomize.__spec__.name, c.gate())
        """, **GPU)
        self.assertEqual(out, "sitecustomize %s theirs sitecustomize [9, 10, 12]" % theirs)

    def test_a_usercustomize_runs_as_ever(self):
        site = self.site("run")
        site.write("usercustomize.py", "import os\nos.environ['USER_X'] = __name__\n")
        site.write("sitecustomize.py", "import os\nos.environ['SITE_X'] = __name__\n")
        # Outside of a virtual environment, with this folder as the user's own.
        site.python = getattr(sys, "_base_executable", sys.executable)
        home = {"PYTHONHOME": os.environ["PYTHONHOME"]} if "PYTHONHOME" in os.environ else {}
        code = "import os, flashinfer.jit.comm as c; print(os.environ['USER_X'], os.environ['SITE_X'], c.gate())"
        self.assertEqual(site.code(code, PYTHONUSERBASE=site.dir, **home), "usercustomize sitecustomize [9, 10, 12]")

    def test_an_error_of_theirs_is_reported_as_ever(self):
        site = self.site("run")
        site.write("sitecustomize.py", "raise ValueError('theirs')\n")
        code = "import sys, flashinfer.jit.comm as c; print(c.gate(), 'sitecustomize' in sys.modules)"
        with_us = site.run("-c", code, **GPU)
        self.assertEqual(with_us[:2], (0, "[9, 10, 12] False\n"))
        without_us = site.run("-c", code, PYTHONPATH="")
        self.assertEqual(with_us[2], without_us[2])
        self.assertIn("ValueError: theirs", with_us[2])

    def test_where_there_is_none_there_is_none(self):
        site = self.site("run")
        # Some systems have one in the folder of the standard library.
        code = "import sys; print(getattr(sys.modules.get('sitecustomize'), '__file__', None))"
        self.assertEqual(site.code(code), site.code(code, PYTHONPATH=""))
        self.assertEqual(site.code(STATE, **GPU), OURS)

    def test_children_have_it_too(self):
        site = self.site("run")
        self.assertEqual(site.code("""
            import subprocess, sys
            print(subprocess.check_output([sys.executable, "-c", "import flashinfer.jit.comm as c; print(c.gate())"]).decode().strip())
        """, **GPU), "[9, 10, 12]")

    def test_a_damaged_package_lets_theirs_run(self):
        site = self.site("run")
        site.write("sitecustomize.py", "WHO = 'theirs'\n")
        site.write("__init__.py", "def (:\n", site.package)
        status, out, err = site.run("-c", "import sitecustomize; print(sitecustomize.WHO)")
        self.assertEqual((status, out), (0, "theirs\n"), err)
        self.assertEqual(err.count("\n"), 1, err)
        self.assertIn("`fi-arch run`", err)

    def test_it_goes_before_what_is_installed(self):
        # An installed shim whose files have drifted; the run's are right.
        site = self.site("run")
        installed = self.site()
        shutil.copytree(installed.package, os.path.join(site.site, "fi_arch_shim"))
        shutil.copy(os.path.join(installed.site, "fi_arch_shim.pth"), site.site)
        site.write("fi_arch_shim/state.json", "{")
        self.assertEqual(site.code(STATE, **GPU), OURS)


class Report(Case):
    def report(self, site, **env):
        status, out, err = site.run("-m", "fi_arch_shim", **env)
        self.assertEqual((status, err), (0, ""))
        return json.loads(out)

    def test_it_says_file_by_file_what_would_happen(self):
        site = self.site()
        said = self.report(site, FLASHINFER_CUDA_ARCH_LIST="12.0f")
        self.assertEqual((said["serves"], said["started"], said["mode"], said["fits"], said["problems"]), (True, True, "shim", "sm_120f", []))
        files = {file["path"]: file for file in said["files"]}
        self.assertEqual(files[os.path.join(site.site, JIT)]["served"], os.path.join(site.package, "overlay", JIT))
        self.assertEqual(files[os.path.join(site.site, HEADER)]["served"], None)
        self.assertEqual({file["state"] for file in said["files"]}, {"original"})
        self.assertFalse(self.report(site, FI_ARCH_DISABLE="1")["serves"])

    def test_it_lists_every_fault(self):
        site = self.site()
        os.remove(os.path.join(site.site, HEADER))
        site.write(JIT, "drifted = 1\n")
        site.write("sglang/gate.py", POSTS["sglang/gate.py"])
        os.remove(os.path.join(site.package, fakes.ARTIFACT))
        said = self.report(site, FI_ARCH_REQUIRE="1")
        self.assertEqual((said["serves"], len(said["problems"])), (False, 4))
        states = {os.path.relpath(file["path"], site.site): file["state"] for file in said["files"]}
        self.assertEqual((states[HEADER], states[JIT], states["sglang/gate.py"]), ("missing", "drifted", "ours"))
        self.assertIn("cannot be read", said["artifacts"][0]["problem"])

    def test_a_damaged_state_is_a_report_too(self):
        site = self.site()
        site.write("state.json", "{", site.package)
        said = self.report(site)
        self.assertEqual((said["serves"], said["mode"], len(said["problems"])), (False, None, 1))


if __name__ == "__main__":
    unittest.main()
