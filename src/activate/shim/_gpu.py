"""Which GPUs there are, as far as the choice of an artifact needs it."""

import os
import re
import sys

DRIVER = "/proc/driver/nvidia/version"


def of_process(context=None):
    """The compute capabilities that this process works for, and whether they are those of a GPU: with CUDA that of the
    current device; without, FlashInfer's own list of targets (`context`), as far as it is known."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    try:
        if cuda is not None and cuda.is_available():
            major, minor = cuda.get_device_capability(cuda.current_device())
            return [(int(major), int(minor))], True
    except Exception as error:
        raise RuntimeError("torch cannot tell the compute capability of this process's GPU: %s" % error)
    if context is None:
        context = getattr(sys.modules.get("flashinfer.jit.core"), "current_compilation_context", None)
    targets = getattr(context, "TARGET_CUDA_ARCHS", None)
    if targets is None:
        words = os.environ.get("FLASHINFER_CUDA_ARCH_LIST", "").split()
        targets = [word.partition(".")[::2] for word in words]
    return sorted(filter(None, map(_capability, targets))), False


def _capability(target):
    major, minor = (re.match(r"\d+", str(part)) for part in target)
    return (int(major.group()), int(minor.group())) if major and minor else None


def driver():
    """The version of the NVIDIA driver, such as `580.65.06`; None where there is none."""
    try:
        with open(DRIVER) as file:
            found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", file.read(), re.M)
    except OSError:
        return None
    return found and found.group(1)


def older(version, floor):
    """Whether a driver's `version` is below `floor`, such as `580` or `580.65.06`."""
    numbers = [[int(part) for part in re.findall(r"\d+", text)] for text in (version, floor)]
    return numbers[0] < numbers[1]


def present():
    """The compute capabilities of the GPUs that this process may see, without a CUDA context: a process that has one must
    not fork. Empty where there is no driver, or it does not say."""
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    found = []
    try:
        count = ctypes.c_uint(0)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device = ctypes.c_void_p()
            major, minor = ctypes.c_int(), ctypes.c_int()
            uuid = ctypes.create_string_buffer(96)
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                nvml.nvmlDeviceGetUUID(device, uuid, 96)
                if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
                    found.append((index, uuid.value.decode("ascii", "replace"), (major.value, minor.value)))
    finally:
        nvml.nvmlShutdown()
    return [capability for index, uuid, capability in found if _visible(index, uuid)]


def _visible(index, uuid):
    """Whether `CUDA_VISIBLE_DEVICES` shows a GPU, as far as NVML's order says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    words = [word.strip() for word in visible.split(",") if word.strip()]
    if all(word.lstrip("-").isdigit() for word in words):
        numbers = [int(word) for word in words]
        if any(number < 0 for number in numbers):
            numbers = numbers[: [number < 0 for number in numbers].index(True)]
        # CUDA's own order puts the fastest first: which one a number means is known only in the order of the bus.
        return index in numbers if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" else bool(numbers)
    return any(uuid.startswith(word) or word.startswith("MIG-") for word in words)
