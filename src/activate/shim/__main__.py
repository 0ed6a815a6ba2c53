"""`python -m fi_arch_shim`: what this interpreter would do, as one JSON object."""

import json
import sys

import fi_arch_shim
from fi_arch_shim import _artifacts, _gpu, _overlay


def main():
    _overlay.quiet()
    overlay = _overlay.judged()
    disabled = fi_arch_shim.is_set("FI_ARCH_DISABLE")
    gpus = _gpu.present()
    targets = gpus or _gpu.of_process()[0]
    through = overlay.mode == "in-place" or fi_arch_shim.started()
    serves = overlay.ok and through and not disabled
    state = overlay.state or {}
    report = {
        "format": 1,
        "fi_arch": state.get("fi_arch"),
        "package": _overlay.HERE,
        "python": "%d.%d.%d" % sys.version_info[:3],
        "executable": sys.executable,
        "prefix": sys.prefix,
        "mode": overlay.mode if state else None,
        "started": fi_arch_shim.started(),
        "disabled": disabled,
        "required": fi_arch_shim.is_set("FI_ARCH_REQUIRE"),
        "serves": serves,
        "problems": [str(wrong) for wrong in overlay.wrong],
        "absent": overlay.absent,
        "files": [_file(file, serves) for file in overlay.files],
        "artifacts": [_artifact(artifact, overlay) for artifact in state.get("artifacts", [])],
        "gpus": [list(gpu) for gpu in gpus],
        "driver": _gpu.driver(),
        "fits": _fits(overlay, targets),
    }
    print(json.dumps(report, indent=2))


def _file(file, serves):
    return {
        "path": file.path,
        "module": file.module,
        "state": file.state,
        "served": file.overlay if serves and file.edited and file.module and file.state == "original" else None,
    }


def _artifact(artifact, overlay):
    return {
        "module": artifact["module"],
        "target": artifact["target"],
        "file": _overlay.artifact_path(artifact),
        "problem": overlay.bad_artifacts.get(artifact["file"]) or _artifacts.unfit_driver(artifact),
    }


def _fits(overlay, targets):
    """The target of the artifact for this machine's GPUs, or for FLASHINFER_CUDA_ARCH_LIST; None where there is none."""
    found = _artifacts.fitting(overlay, "trtllm_comm", targets) if overlay.state else None
    return found and found[0]["target"]


main()
