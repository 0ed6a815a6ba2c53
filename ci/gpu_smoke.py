"""Proves on one GPU that the all-reduce kernels of an artifact compute the right numbers.

All ranks live in one process: each is a stream, and one CUDA graph holds the calls of all of them. Before each replay
the inputs are made anew and every output is filled with a NaN that no kernel computes; after it each element is compared
with a float64 reference, against the largest error that the kernel's own roundings can add up to.

A kernel that waits for a rank which never comes cannot be stopped from inside its process. So the cases run in a worker
process that can be killed: a hang or a CUDA error costs the rest of that group of cases, and the next group gets a new one.

Memory is plain device memory; nothing here creates a multicast object or maps memory between devices.
"""

import argparse
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

REPLAYS = 10
EPS = 1e-5
MIB_2 = 1 << 21
# Quiet NaN in both 16-bit types, and not the 0x7fff that the GPU itself computes.
POISON = 0x7FA5
NEGATIVE_ZERO = -0x8000
# How long a worker may take until it answers for the first time (importing torch, loading the artifact).
START_S = 180
# After so many lost workers nothing more is tried: each costs a deadline and a start.
LOST_WORKERS = 6
# How long the worker has, after a case's deadline, to say so.
GRACE_S = 10

# name: unit roundoff, half of the smallest subnormal, bits of the largest subnormal
DTYPES = {
    "bf16": (2.0**-8, 2.0**-134, 0x007F),
    "fp16": (2.0**-11, 2.0**-25, 0x03FF),
}

# What each function takes. The artifact is asked for its own signature and refused where it differs, so no release has
# to be named: FlashInfer 0.5.3 to 0.6.4 end at `layout_code`, 0.6.16.post4 and 0.7.4 at `weight_bias`.
SIGNATURES = {
    "trtllm_lamport_initialize": ["int", "int", "dtype"],
    # in, world_size, world_rank, token_num, hidden_size, workspace_ptrs, launch_with_pdl, use_oneshot,
    # trigger_completion_at_end, fp32_acc, pattern_code, allreduce_out, residual_in, residual_out, norm_out, quant_out,
    # scale_out, rms_gamma, rms_eps, scale_factor, layout_code
    "trtllm_allreduce_fusion": ["tensor", "int", "int", "int", "int", "tensor", "bool", "bool", "bool", "bool", "int"]
    + ["tensor?"] * 7 + ["float?", "tensor?", "int?"],
    # in, out, tp_size, tp_rank, token_num, fusion_op_code, strategy_code, config_code, launch_with_pdl, flag_value,
    # peer_comm_buffer_ptrs, peer_barrier_ptrs_in, peer_barrier_ptrs_out, bias, residual, weight,
    # weight_pre_residual_norm, eps, intermediate_buffer, lamport_peer_comm_buffer_ptrs_0, _1, _2
    "trtllm_custom_all_reduce": ["tensor", "tensor"] + ["int"] * 6 + ["bool", "int"] + ["tensor"] * 3
    + ["tensor?"] * 4 + ["float?"] + ["tensor?"] * 4,
}
# Later releases append optional parameters to this one; each gets None.
MAY_GROW = "trtllm_allreduce_fusion"


class WrongNumbers(Exception):
    """A result differs from the reference; the process is still sound."""


class Hang(Exception):
    """The GPU did not finish in time; the process is lost."""


# --- what is run ------------------------------------------------------------------------------------------------------


def fusion_case(pattern, dtype, ranks, tokens, hidden, oneshot, pdl, fp32_acc=True, trigger_at_end=True):
    shot = "one-shot" if oneshot else "two-shot"
    name = f"fusion {('all-reduce', 'all-reduce+norm')[pattern]} {shot} {dtype} ranks={ranks} tokens={tokens} hidden={hidden}"
    name += " pdl" * pdl + " acc16" * (not fp32_acc) + " early-trigger" * (not trigger_at_end)
    return {
        "name": name, "group": f"fusion {pattern} {shot} {hidden}", "api": "fusion", "pattern": pattern, "dtype": dtype,
        "ranks": ranks, "tokens": tokens, "hidden": hidden, "oneshot": oneshot, "pdl": pdl, "fp32_acc": fp32_acc,
        "trigger_at_end": trigger_at_end,
    }


def custom_case(dtype, ranks, tokens, hidden, pdl):
    name = f"custom all-reduce+norm one-shot {dtype} ranks={ranks} tokens={tokens} hidden={hidden}" + " pdl" * pdl
    return {
        "name": name, "group": f"custom {hidden}", "api": "custom", "dtype": dtype, "ranks": ranks, "tokens": tokens,
        "hidden": hidden, "pdl": pdl,
    }


def cases(which):
    """All cases of `quick` or `full`, those of one group next to each other."""
    quick = which == "quick"
    found = []
    for pattern in (0, 1):
        for oneshot in (True, False):
            # 2880 gives 180 or 360 threads a block: the last warp is partial.
            for hidden in (2880, 7168) if quick else (2880, 4096, 7168):
                for dtype in DTYPES:
                    for ranks in (2, 4):
                        for tokens in (8,) if quick else (1, 3, 8, 16, 64):
                            if not oneshot and tokens <= ranks:
                                continue  # The two-shot kernel gives each rank at least one token.
                            for pdl in (False, True):
                                found.append(fusion_case(pattern, dtype, ranks, tokens, hidden, oneshot, pdl))
                        if not quick:
                            found.append(fusion_case(pattern, dtype, ranks, 8, hidden, oneshot, False, fp32_acc=False))
                        if oneshot and not quick:
                            found.append(fusion_case(pattern, dtype, ranks, 8, hidden, True, True, trigger_at_end=False))
    # Clusters of 1, 4, 7 and 8 blocks. Not a hidden size of partial warps: that kernel runs past the end of the token there.
    for hidden in (7168,) if quick else (2048, 4096, 7168, 8192):
        for dtype in DTYPES:
            for ranks in (2,) if quick else (2, 4):
                for tokens in (8,) if quick or hidden != 7168 else (1, 8, 16):
                    for pdl in (False, True):
                        found.append(custom_case(dtype, ranks, tokens, hidden, pdl))
    return found


def fusion_grid(ranks, tokens, hidden, oneshot, sms):
    """(blocks, threads a block, blocks a cluster) of a fusion kernel on a device with `sms` multiprocessors."""
    clusters = tokens if oneshot else -(-tokens // ranks)
    threads = hidden // 8
    cluster = 8
    while threads % cluster:
        cluster //= 2
    block = threads // cluster
    while block < 128 and cluster >= 2:
        block, cluster = block * 2, cluster // 2
    while clusters * cluster > sms and cluster > 1 and block <= 512:
        block, cluster = block * 2, cluster // 2
    return min(sms, clusters * cluster) // cluster * cluster, block, cluster


def custom_grid(ranks, tokens, hidden):
    """The same of the custom kernel's Lamport path."""
    warps = -(-hidden // 256)
    least = 4 if hidden >= 4096 else 32 if ranks == 2 else 16
    cluster = min(-(-warps // least), 8)
    return tokens * cluster, warps // cluster * 32, cluster


def co_resident(case, device):
    """Whether all ranks of `case` can make progress on one GPU: all but one, and a cluster of the last, fit on it at once.

    Register counts are those that CUDA 13.0 gives these kernels; a wrong guess leaves a case out, or shows as a hang."""
    ranks, tokens, hidden = case["ranks"], case["tokens"], case["hidden"]
    if case["api"] == "custom":
        blocks, threads, cluster = custom_grid(ranks, tokens, hidden)
        registers = 72
    else:
        blocks, threads, cluster = fusion_grid(ranks, tokens, hidden, case["oneshot"], device["sms"])
        # At most 54 for 4 ranks in one shot on sm_90a, given out in steps of 8.
        registers = 56 if case["oneshot"] or ranks == 2 else 64
    warps = -(-threads // 32)
    room = min(device["threads_per_sm"] // (warps * 32), device["registers_per_sm"] // (warps * 32 * registers))
    return (ranks - 1) * blocks + cluster <= room * device["sms"]


# --- workspaces -------------------------------------------------------------------------------------------------------


def round_up(size, step):
    return -(-size // step) * step


def fusion_workspace(ranks, tokens, hidden):
    """Bytes of one rank's data, flag and Lamport buffer, and of one of the three parts of the last."""
    part = ranks * tokens * hidden * 2
    return round_up(part, MIB_2), round_up(ranks * 256 * 4, MIB_2), round_up(3 * part, MIB_2), part


def fusion_pointers(data, flags, lamport, control):
    """One rank's table of 3N+1 pointers; `control` is that rank's own."""
    return [*data, *flags, *lamport, control]


def custom_workspace(ranks, tokens, hidden):
    """Bytes of one rank's seven buffers: data twice, barrier flags in and out, Lamport three times."""
    data = ranks * tokens * hidden * 4
    flags = (24 + 1) * 4 * ranks * 2
    lamport = ranks * 16 * ranks * hidden * 2
    return [round_up(size, MIB_2) for size in (data, data, flags, flags, lamport, lamport, lamport)]


# --- the artifact's own word on its signatures ------------------------------------------------------------------------


def parse_signature(message):
    """The parameter kinds that tvm-ffi names when a function is called with too few arguments; None if it does not."""
    match = re.search(r"calling: `\w+\((.*)\) -> [^`]*`\. Expected (\d+) but got", message)
    if not match:
        return None
    kinds = []
    for parameter in match[1].split(", "):
        kind = parameter.partition(": ")[2]
        inner = re.fullmatch(r"Optional<(.*)>", kind)
        plain = inner[1] if inner else kind
        plain = {"DataType": "dtype"}.get(plain, "tensor" if "Tensor" in plain else plain)
        kinds.append(plain + ("?" if inner else ""))
    return kinds if len(kinds) == int(match[2]) else None


def check_signature(name, kinds):
    """How many trailing arguments `name` takes beyond ours; an error where it is another function than we know."""
    ours = SIGNATURES[name]
    if kinds is None:
        raise RuntimeError(f"{name} does not tell its signature")
    extra = kinds[len(ours) :]
    if kinds[: len(ours)] != ours or (extra and name != MAY_GROW) or not all(kind.endswith("?") for kind in extra):
        raise RuntimeError(f"{name} has a signature that this script does not know: {', '.join(kinds)}")
    return len(extra)


def probe(module):
    """The number of extra arguments of each function that we call."""
    extra = {}
    for name in SIGNATURES:
        function = module[name]
        try:
            function()  # Refused before anything runs.
        except TypeError as error:
            extra[name] = check_signature(name, parse_signature(str(error)))
        else:
            raise RuntimeError(f"{name} can be called without arguments")
    return extra


# --- numbers ----------------------------------------------------------------------------------------------------------


def torch_dtype(torch, dtype):
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


def fresh_values(torch, generator, shape, dtype, negative_zeros, turn=0):
    """Random rows of very different size, with subnormals, zeros and (unless forbidden) negative zeros among them."""
    device = generator.device
    size = torch.tensor([1.0, 4e-3, 30.0, 0.2], device=device)  # The second is of the order of sqrt(eps).
    rows = size[(torch.arange(shape[-2], device=device) + turn) % 4].unsqueeze(-1)
    values = (torch.randn(shape, generator=generator, device=device) * rows).to(torch_dtype(torch, dtype))
    bits = values.view(torch.int16)
    kind = torch.randint(0, 64, shape, generator=generator, device=device)
    subnormal = torch.randint(1, DTYPES[dtype][2] + 1, shape, generator=generator, device=device).to(torch.int16)
    sign = torch.randint(0, 2, shape, generator=generator, device=device).to(torch.int16) * NEGATIVE_ZERO
    bits = torch.where(kind < 2, subnormal | sign, bits)
    bits = torch.where(kind == 2, torch.zeros_like(bits), bits)
    bits = torch.where(kind > 61, torch.full_like(bits, NEGATIVE_ZERO), bits)
    bits[..., -1, :8] = NEGATIVE_ZERO  # A whole 16-byte access, in every rank.
    if not negative_zeros:
        bits = torch.where(bits == NEGATIVE_ZERO, torch.zeros_like(bits), bits)
    return bits.view(torch_dtype(torch, dtype))


def reference(torch, inputs, residual, gamma, dtype, fp32_acc):
    """{output: (value, largest error)} in float64, for inputs [calls, ranks, tokens, hidden] and gamma [ranks, hidden].

    The bounds follow the kernels' roundings one by one. With u the unit roundoff of the 16-bit type:
    the sum is rounded once if it is accumulated in float32 (u of its value), else after each of the N-1 additions (u of the
    sum of magnitudes each); adding the residual rounds once more; the norm passes on the error of its element, and that of
    the row's RMS, which is at most the RMS of the elements' errors; its result is rounded once. Arithmetic is float32
    with fast math: 2^-18 covers the norm's, and subnormal float32 values count as zero.
    """
    unit, quantum, _ = DTYPES[dtype]
    tiny = 2.0**-120
    ranks = inputs.shape[1]
    total = inputs.double().sum(1, keepdim=True).expand(inputs.shape)
    magnitude = inputs.double().abs().sum(1, keepdim=True)
    if fp32_acc:
        error = ranks * 2.0**-24 * magnitude + tiny
        error = error + unit * (total.abs() + error) + quantum
    else:
        error = ((ranks - 1) * (1.02 * unit * magnitude + quantum) + tiny).expand(inputs.shape)

    summed = total + residual.double()
    summed_error = error + (unit + 2.0**-23) * (summed.abs() + error) + quantum + tiny

    weight = gamma.double().unsqueeze(1)
    rms = (summed.square().mean(-1, keepdim=True) + EPS).sqrt()
    rms_error = summed_error.square().mean(-1, keepdim=True).sqrt() / rms
    norm = summed * weight / rms
    norm_error = weight.abs() / rms * (summed_error + summed.abs() * rms_error) / (1 - rms_error)
    norm_error = norm_error + 2.0**-18 * norm.abs()
    norm_error = norm_error + unit * (norm.abs() + norm_error) + quantum + tiny
    return {"sum": (total, error), "residual": (summed, summed_error), "norm": (norm, norm_error)}


def compare(torch, what, got, expected, bound):
    """(largest error relative to the largest value of its row, largest error relative to its bound).

    `got` has one row more than `expected` in each rank: it must still hold the poison."""
    unwritten = int((got[..., :-1, :].view(torch.int16) == POISON).sum())
    if unwritten:
        raise WrongNumbers(f"{what}: {unwritten} of {expected.numel()} elements were never written")
    beyond = int((got[..., -1:, :].view(torch.int16) != POISON).sum())
    if beyond:
        raise WrongNumbers(f"{what}: {beyond} elements behind the end were written")
    values = got[..., :-1, :].double()
    error = (values - expected).abs()
    wrong = ~(error <= bound)  # A NaN is wrong too.
    count = int(wrong.sum())
    if count:
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise WrongNumbers(
            f"{what}: {count} of {expected.numel()} elements are wrong; the first, at call, rank, token, column {at}: "
            f"{float(values[at]):.6g} where {float(expected[at]):.6g} +- {float(bound[at]):.2g} is right"
        )
    largest = expected.abs().amax(-1)
    relative = torch.where(largest > 0, error.amax(-1) / largest.clamp_min(2.0**-140), torch.zeros_like(largest))
    return float(relative.max()), float((error / bound).max())


# --- in the worker ----------------------------------------------------------------------------------------------------


class Gpu:
    """The artifact on the GPU, in this process."""

    def __init__(self, torch, tvm_ffi, artifact):
        self.torch, self.tvm_ffi = torch, tvm_ffi
        self.device = torch.device("cuda:0")
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)  # The artifact asks for the current device.
        self.module = tvm_ffi.load_module(artifact)
        self.extra = probe(self.module)
        self.streams = [torch.cuda.Stream() for _ in range(4)]

    def describe(self):
        props = self.torch.cuda.get_device_properties(self.device)
        return {
            "gpu": props.name,
            "capability": f"{props.major}.{props.minor}",
            "sms": props.multi_processor_count,
            "threads_per_sm": getattr(props, "max_threads_per_multi_processor", 1536),
            "registers_per_sm": getattr(props, "regs_per_multiprocessor", 65536),
            "torch": self.torch.__version__,
            "tvm_ffi": getattr(self.tvm_ffi, "__version__", "unknown"),
            "fusion_arguments": len(SIGNATURES[MAY_GROW]) + self.extra[MAY_GROW],
        }

    def run(self, case, deadline):
        """(largest relative error, largest part of its bound that an error took up) over all replays."""
        prepare = self.prepare_fusion if case["api"] == "fusion" else self.prepare_custom
        until = time.monotonic() + deadline
        calls, make = prepare(case)
        torch, dtype = self.torch, torch_dtype(self.torch, case["dtype"])
        ranks, tokens, hidden = case["ranks"], case["tokens"], case["hidden"]
        shape = (calls, ranks, tokens, hidden)

        inputs = torch.zeros(shape, dtype=dtype, device=self.device)
        residual = torch.zeros(shape, dtype=dtype, device=self.device)
        gamma = torch.zeros((ranks, hidden), dtype=dtype, device=self.device)
        names = ["sum"] if case.get("pattern") == 0 else ["residual", "norm"]
        outputs = {
            name: torch.zeros((calls, ranks, tokens + 1, hidden), dtype=dtype, device=self.device) for name in names
        }

        # The arguments of all calls, made before the capture: in it nothing but the calls themselves may happen.
        view = self.tvm_ffi.from_dlpack
        launches = []
        for rank in range(ranks):
            for call in range(calls):
                launches.append((rank, *make(
                    rank, call, view(inputs[call, rank]), view(residual[call, rank]), view(gamma[rank]),
                    {name: view(output[call, rank, :tokens]) for name, output in outputs.items()},
                )))
        self.finish(until, "preparing")
        graph = self.capture(ranks, launches)

        worst = (0.0, 0.0)
        generator = torch.Generator(device=self.device)
        for replay in range(REPLAYS):
            generator.manual_seed(replay * 7919 + calls * 31 + ranks * 17 + tokens * 13 + hidden)
            # The custom kernel's Lamport path waits for data that is not negative zero, and sends its input as it is.
            new_inputs = fresh_values(torch, generator, shape, case["dtype"], case["api"] == "fusion", replay)
            new_residual = fresh_values(torch, generator, shape, case["dtype"], True, replay)
            new_gamma = fresh_values(torch, generator, (1, ranks, hidden), case["dtype"], True)[0]
            inputs.copy_(new_inputs)
            residual.copy_(new_residual)
            gamma.copy_(new_gamma)
            for output in outputs.values():
                output.view(torch.int16).fill_(POISON)
            graph.replay()
            self.finish(until, f"replay {replay + 1} of {REPLAYS}")

            right = reference(torch, new_inputs, new_residual, new_gamma, case["dtype"], case.get("fp32_acc", False))
            for name, output in outputs.items():
                worst = tuple(map(max, worst, compare(torch, name, output, *right[name])))
            for what, now, then in (
                ("input", inputs, new_inputs), ("residual input", residual, new_residual), ("gamma", gamma, new_gamma),
            ):
                if not torch.equal(now.view(torch.int16), then.view(torch.int16)):
                    raise WrongNumbers(f"the {what} was overwritten")
        return worst

    def finish(self, until, what):
        """Waits for the GPU, but not for ever."""
        done = self.torch.cuda.Event()
        done.record()
        while not done.query():
            if time.monotonic() > until:
                raise Hang(what)
            time.sleep(0.0001)

    def capture(self, ranks, launches):
        """One graph in which each rank's calls follow each other and no rank waits for another."""
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        streams = self.streams[:ranks]
        failure = None
        try:
            with torch.cuda.graph(graph, capture_error_mode="relaxed"):
                origin = torch.cuda.current_stream()
                fork = torch.cuda.Event()
                fork.record(origin)
                for stream in streams:
                    stream.wait_event(fork)
                try:
                    for rank, function, arguments in launches:
                        with self.tvm_ffi.use_torch_stream(torch.cuda.stream(streams[rank])):
                            function(*arguments)
                except Exception as error:
                    failure = error
                for stream in streams:
                    join = torch.cuda.Event()
                    join.record(stream)
                    origin.wait_event(join)
        except Exception as error:
            raise failure or error  # The end of a capture that failed only says that it failed.
        if failure:
            raise failure
        return graph

    def lamport_buffer(self, size, dtype):
        """`size` bytes that the artifact itself has filled with negative zeros."""
        torch = self.torch
        buffer = torch.full((size // 2,), 0x5A5A, dtype=torch.int16, device=self.device)
        with self.tvm_ffi.use_torch_stream():
            self.module["trtllm_lamport_initialize"](buffer.data_ptr(), size // 2, torch_dtype(torch, dtype))
        torch.cuda.synchronize()
        left = int((buffer != NEGATIVE_ZERO).sum())
        if left:
            raise WrongNumbers(f"trtllm_lamport_initialize left {left} of {size // 2} elements as they were")
        return buffer

    def prepare_fusion(self, case):
        torch = self.torch
        ranks, tokens, hidden = case["ranks"], case["tokens"], case["hidden"]
        data_size, flags_size, lamport_size, part = fusion_workspace(ranks, tokens, hidden)
        each = range(ranks)
        data = [torch.zeros(data_size, dtype=torch.uint8, device=self.device) for _ in each]
        flags = [torch.zeros(flags_size, dtype=torch.uint8, device=self.device) for _ in each]
        lamport = [self.lamport_buffer(lamport_size, case["dtype"]) for _ in each]
        control = [torch.tensor([0, 0, 0, part, 0], dtype=torch.int32, device=self.device) for _ in each]
        addresses = [[buffer.data_ptr() for buffer in buffers] for buffers in (data, flags, lamport)]
        tables = [
            torch.tensor(fusion_pointers(*addresses, control[rank].data_ptr()), dtype=torch.int64, device=self.device)
            for rank in each
        ]
        kept = (data, flags, lamport, control, tables)
        views = [self.tvm_ffi.from_dlpack(table) for table in tables]
        function = self.module["trtllm_allreduce_fusion"]
        norm = case["pattern"] == 1

        def make(rank, _call, given, residual, gamma, outputs, _kept=kept):
            return function, [
                given, ranks, rank, tokens, hidden, views[rank],
                case["pdl"], case["oneshot"], case["trigger_at_end"], case["fp32_acc"], case["pattern"],
                outputs.get("sum"),  # allreduce_out
                residual if norm else None,  # residual_in
                outputs.get("residual"),  # residual_out
                outputs.get("norm"),  # norm_out
                None, None,  # quant_out, scale_out
                gamma if norm else None,  # rms_gamma
                EPS if norm else None,  # rms_eps
                None, None,  # scale_factor, layout_code
            ] + [None] * self.extra[MAY_GROW]

        # Three calls go once round the three parts of the Lamport buffer, and give each launch a neighbour to overlap with.
        return 3, make

    def prepare_custom(self, case):
        torch = self.torch
        ranks, tokens, hidden = case["ranks"], case["tokens"], case["hidden"]
        each = range(ranks)
        sizes = custom_workspace(ranks, tokens, hidden)
        buffers = [[torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in each] for size in sizes[:4]]
        buffers += [[self.lamport_buffer(size, case["dtype"]) for _ in each] for size in sizes[4:]]
        # Unlike those of the fusion kernels, these tables are read by the host.
        tables = [
            self.tvm_ffi.from_dlpack(torch.tensor([buffer.data_ptr() for buffer in kind], dtype=torch.int64))
            for kind in buffers
        ]
        function = self.module["trtllm_custom_all_reduce"]

        def make(rank, call, given, residual, gamma, outputs, _kept=buffers):
            flag = call + 1  # Zero means a released barrier.
            return function, [
                given, outputs["norm"], ranks, rank, tokens,
                1,  # fusion_op_code: residual + RMSNorm
                4,  # strategy_code: one-shot
                2,  # config_code: push
                case["pdl"], flag,
                tables[flag % 2], tables[2], tables[3],
                None,  # bias
                residual, gamma,
                None,  # weight_pre_residual_norm
                EPS,
                outputs["residual"],  # intermediate_buffer
                tables[4], tables[5], tables[6],
            ]

        # The flags are part of the graph, and flag 1 of the next replay must find the Lamport buffers where flag 6 of the
        # last one left them: a multiple of three calls.
        return 6, make


def worker(artifact, reply_fd):
    """Answers each case on stdin with one line on `reply_fd`; leaves without ceremony once the GPU can't be trusted."""
    reply = os.fdopen(reply_fd, "w", buffering=1)

    def send(**fields):
        reply.write(json.dumps(fields) + "\n")
        reply.flush()

    try:
        import torch
        import tvm_ffi
    except ImportError as error:
        return send(lacks=f"cannot import {error.name}: {error}")
    if not torch.cuda.is_available():
        return send(lacks=f"torch {torch.__version__} finds no GPU that it can use")
    try:
        gpu = Gpu(torch, tvm_ffi, artifact)
        send(device=gpu.describe())
    except Exception as error:
        send(broken=f"{type(error).__name__}: {error}")
        os._exit(1)
    for line in sys.stdin:
        case = json.loads(line)
        try:
            relative, part = gpu.run(case, case["deadline"])
            send(status="ok", error=relative, of_bound=part)
        except WrongNumbers as error:
            send(status="FAIL", detail=str(error))
        except Hang as error:
            send(status="HANG", detail=f"in {error}", lost=True)
            os._exit(1)
        except Exception as error:
            send(status="FAIL", detail=f"{type(error).__name__}: {error}", lost=True)
            os._exit(1)


# --- over the workers -------------------------------------------------------------------------------------------------


class Worker:
    """A worker process and what it says."""

    def __init__(self, command):
        self.log = tempfile.TemporaryFile()
        reading, writing = os.pipe()
        self.reading, self.pending = reading, b""
        self.process = subprocess.Popen(
            [*command, str(writing)], stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, pass_fds=[writing]
        )
        os.close(writing)

    def ask(self, case):
        try:
            self.process.stdin.write((json.dumps(case) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # Its end is seen when its answer is read.

    def answer(self, seconds):
        """The next answer; None after `seconds` without one; an empty one when the process ended."""
        until = time.monotonic() + seconds
        while b"\n" not in self.pending:
            ready, _, _ = select.select([self.reading], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(self.reading, 65536)
            if not chunk:
                return {}
            self.pending += chunk
        line, _, self.pending = self.pending.partition(b"\n")
        return json.loads(line)

    def end(self):
        """Kills the process; how it ended, in words."""
        try:
            code = self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            code = None
            self.process.kill()
        try:
            # Tearing down a context with a kernel that spins takes the driver seconds.
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            print("warning: a killed worker has not gone after 60 s", file=sys.stderr)
        self.process.stdin.close()
        os.close(self.reading)
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        how = "killed" if code is None else signal.Signals(-code).name if code < 0 else f"exit {code}"
        return how + "".join(f" | {line}" for line in lines[-3:])

    def stop(self):
        self.process.kill()
        self.end()


class MachineLacks(Exception):
    """This machine cannot run any case."""


def supervise(command, todo, deadline, report, grace=GRACE_S):
    """Runs `todo` in workers started by `command`; returns what the device says of itself, or None."""
    device, live, lost, dead_group = None, None, 0, None
    try:
        for case in todo:
            if case["group"] == dead_group:
                report(case, status="not run", detail="an earlier case of its group took the process with it")
                continue
            if lost >= LOST_WORKERS:
                report(case, status="not run", detail=f"{lost} processes were lost")
                continue
            begun = time.monotonic()
            if live is None:
                live = Worker(command)
                hello = live.answer(START_S)
                if hello and "lacks" in hello:
                    raise MachineLacks(hello["lacks"])
                if not hello or "device" not in hello:
                    detail = hello["broken"] if hello else "the process did not start: "
                    ended = live.end()
                    live, lost, dead_group = None, LOST_WORKERS, case["group"]
                    report(case, status="FAIL", detail=detail if hello else detail + ended)
                    continue
                device = hello["device"]
            if not co_resident(case, device):
                report(case, status="skipped", detail="its ranks do not fit on this GPU at once")
                continue
            live.ask({**case, "deadline": deadline})
            found = live.answer(deadline + grace)
            seconds = time.monotonic() - begun
            if found is None or not found or found.get("lost"):
                ended = live.end()
                live, lost, dead_group = None, lost + 1, case["group"]
                if found is None:
                    found = {"status": "HANG", "detail": f"no answer for {deadline + grace:g} s ({ended})"}
                elif not found:
                    found = {"status": "FAIL", "detail": f"the process ended: {ended}"}
            found.pop("lost", None)
            report(case, seconds=round(seconds, 3), **found)
    finally:
        if live is not None:
            live.stop()
    return device


def verdict(results):
    """(closing line, exit code). Success needs a case that passed, and none that failed or was left out after a loss."""
    count = {status: sum(r["status"] == status for r in results) for status in ("ok", "FAIL", "HANG", "not run", "skipped")}
    failed = count["FAIL"] + count["HANG"]
    line = f"{count['ok']} passed, {failed} failed"
    line += "".join(f", {count[status]} {status}" for status in ("not run", "skipped") if count[status])
    return line, 0 if count["ok"] and not failed and not count["not run"] else 1


def main():
    parser = argparse.ArgumentParser(description="Run the all-reduce of artifacts on one GPU against a float64 reference.")
    parser.add_argument("artifacts", nargs="*", metavar="ARTIFACT", help="a trtllm_comm.so")
    parser.add_argument("--cases", choices=("quick", "full"), default="full", help="how much to run (default: full)")
    parser.add_argument("--only", metavar="TEXT", help="only cases whose name has TEXT in it")
    parser.add_argument("--deadline", type=float, default=20, metavar="SECONDS", help="for one case (default: 20)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--self-test", action="store_true", help="test this script, without a GPU")
    parser.add_argument("--worker", nargs=2, metavar=("ARTIFACT", "FD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker[0], int(options.worker[1]))
    if options.self_test:
        return self_test()
    if not options.artifacts:
        parser.error("an artifact is needed")
    for artifact in options.artifacts:
        if not os.path.isfile(artifact):
            parser.error(f"no such file: {artifact}")
    todo = [case for case in cases(options.cases) if (options.only or "") in case["name"]]
    if not todo:
        parser.error("no case has that in its name")

    results, runs = [], []
    for artifact in options.artifacts:
        mine = []

        def report(case, **found):
            mine.append({"name": case["name"], **found})
            line = f"{found['status']:<8}{case['name']}"
            if found["status"] == "ok":
                line += f"  error {found['error']:.1e}, {found['of_bound']:.2f} of its bound"
            else:
                line += f"  {found['detail']}"
            print(line, flush=True)

        print(f"# {artifact}", flush=True)
        command = [sys.executable, os.path.abspath(__file__), "--worker", os.path.abspath(artifact)]
        try:
            device = supervise(command, todo, options.deadline, report)
        except MachineLacks as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
        if device:
            print("# " + ", ".join(f"{key} {value}" for key, value in device.items()))
        results += mine
        # An artifact of which no case passed is a failure, whatever the others did.
        runs.append({"artifact": artifact, "device": device, "exit": verdict(mine)[1], "cases": mine})
    line, code = verdict(results)
    code = max([code, *(run["exit"] for run in runs)])
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"format": 1, "replays": REPLAYS, "summary": line, "exit": code, "runs": runs}, file, indent=1)
            file.write("\n")
    print(line)
    return code


# --- without a GPU ----------------------------------------------------------------------------------------------------

FAKE_WORKER = """
import json, os, signal, sys, time
reply = os.fdopen(int(sys.argv[1]), "w", buffering=1)
reply.write(json.dumps({"device": {"sms": 132, "threads_per_sm": 2048, "registers_per_sm": 65536}}) + "\\n")
for line in sys.stdin:
    does = json.loads(line)["does"]
    if does == "die": os.kill(os.getpid(), signal.SIGFPE)
    if does == "spin": time.sleep(600)
    if does == "lost": reply.write(json.dumps({"status": "FAIL", "detail": "CUDA error", "lost": True}) + "\\n"); os._exit(1)
    if does == "wrong": reply.write(json.dumps({"status": "FAIL", "detail": "wrong"}) + "\\n")
    if does == "ok": reply.write(json.dumps({"status": "ok", "error": 0.0, "of_bound": 0.0}) + "\\n")
"""


def self_test():
    """Runs every check; needs torch (CPU is enough) for those of the numbers."""
    tests = [test_tables, test_signatures, test_supervision]
    try:
        import torch

        tests.append(lambda: test_numbers(torch))
    except ImportError:
        print("no torch: the reference is not tested")
    for test in tests:
        test()
    print(f"{len(tests)} passed, 0 failed")
    return 0


def test_tables():
    assert fusion_workspace(2, 8, 7168) == (MIB_2, MIB_2, MIB_2, 2 * 8 * 7168 * 2)
    assert fusion_workspace(4, 64, 7168)[2] == 12582912 and fusion_workspace(4, 64, 7168)[3] == 3670016
    assert fusion_pointers([1, 2], [3, 4], [5, 6], 7) == [1, 2, 3, 4, 5, 6, 7]
    assert custom_workspace(2, 8, 7168) == [MIB_2] * 4 + [MIB_2] * 3
    assert custom_workspace(4, 8, 8192)[4:] == [2 * MIB_2] * 3
    assert fusion_grid(2, 8, 2880, True, 132) == (16, 180, 2)
    assert fusion_grid(2, 64, 7168, True, 132) == (128, 448, 2)
    assert fusion_grid(4, 64, 7168, False, 132) == (64, 224, 4)
    assert custom_grid(2, 8, 7168) == (56, 128, 7) and custom_grid(4, 8, 2048) == (8, 256, 1)
    h200 = {"sms": 132, "threads_per_sm": 2048, "registers_per_sm": 65536}
    full, quick = cases("full"), cases("quick")
    for every in (full, quick):
        names = [case["name"] for case in every]
        assert len(set(names)) == len(names)
        groups = [case["group"] for case in every]
        starts = [g for i, g in enumerate(groups) if i == 0 or groups[i - 1] != g]
        assert len(set(starts)) == len(starts), "a group lies in two places"
        left_out = [case for case in every if not co_resident(case, h200)]
        assert all((c["ranks"], c["tokens"], c["oneshot"]) == (4, 64, True) and c["hidden"] >= 7168 for c in left_out), left_out
        for case in every:
            assert case["hidden"] % 8 == 0
            if case["api"] == "custom":
                assert case["tokens"] <= 16 and case["hidden"] >= 256 and case["hidden"] % 256 == 0
            elif not case["oneshot"]:
                assert case["tokens"] > case["ranks"]
    for tokens, ranks in ((128, 4), (64, 8), (128, 8)):
        assert not co_resident(fusion_case(1, "bf16", ranks, tokens, 7168, True, False), h200)
    print(f"tables: {len(quick)} quick and {len(full)} full cases")


def test_signatures():
    written = {"tensor": "DLTensor*", "dtype": "DataType"}

    def message(name, kinds):
        texts = [written.get(k.rstrip("?"), k.rstrip("?")) for k in kinds]
        texts = [f"Optional<{t}>" if k.endswith("?") else t for t, k in zip(texts, kinds)]
        inner = ", ".join(f"{i}: {t}" for i, t in enumerate(texts))
        call = f"Mismatched number of arguments when calling: `{name}({inner}) -> void`."
        return call + f" Expected {len(kinds)} but got 0 arguments"

    def refused(name, kinds):
        try:
            check_signature(name, kinds)
        except RuntimeError:
            return True
        return False

    for name, kinds in SIGNATURES.items():
        assert parse_signature(message(name, kinds)) == kinds
        assert check_signature(name, kinds) == 0
        assert refused(name, kinds[:-1]) and refused(name, kinds + ["int"]) and refused(name, None)
        assert refused(name, ["float"] + kinds[1:])
    assert [len(kinds) for kinds in SIGNATURES.values()] == [3, 21, 22]
    fusion = SIGNATURES[MAY_GROW]
    assert check_signature(MAY_GROW, fusion + ["int?", "float?"]) == 2
    assert refused("trtllm_custom_all_reduce", SIGNATURES["trtllm_custom_all_reduce"] + ["int?"])
    assert parse_signature("something else") is None
    print("signatures: known ones accepted, others refused")


def test_supervision():
    def play(script):
        seen = []
        todo = [
            {"name": str(i), "group": group, "api": "custom", "ranks": 2, "tokens": 1, "hidden": 256, "does": does}
            for i, (group, does) in enumerate(script)
        ]
        command = [sys.executable, "-c", FAKE_WORKER]
        supervise(command, todo, 2, lambda case, **found: seen.append(found), grace=0)
        return seen

    seen = play([
        ("a", "ok"), ("a", "wrong"), ("a", "ok"), ("b", "die"), ("b", "ok"), ("c", "ok"), ("c", "spin"), ("c", "ok"),
        ("d", "lost"), ("e", "ok"),
    ])
    states = [found["status"] for found in seen]
    assert states == ["ok", "FAIL", "ok", "FAIL", "not run", "ok", "HANG", "not run", "FAIL", "ok"], states
    assert "SIGFPE" in seen[3]["detail"], seen[3]
    assert verdict(seen) == ("4 passed, 4 failed, 2 not run", 1)
    assert verdict(play([("a", "ok")])) == ("1 passed, 0 failed", 0)
    assert verdict([]) == ("0 passed, 0 failed", 1)
    assert verdict([{"status": "skipped"}])[1] == 1
    assert verdict([{"status": "ok"}, {"status": "not run"}])[1] == 1
    print("supervision: hangs and deaths end in a line each, and the next group runs")


def test_numbers(torch):
    def kernel(inputs, residual, gamma, fp32_acc):
        """What the kernels do, step by step, in 16-bit and float32 arithmetic."""
        kind = inputs.dtype
        total = inputs[:, 0].float()
        for rank in range(1, inputs.shape[1]):
            total = total + inputs[:, rank].float()
            total = total if fp32_acc else total.to(kind).float()
        total = total.to(kind).unsqueeze(1).expand(inputs.shape)
        summed = (total.float() + residual.float()).to(kind)
        scale = (summed.float().square().mean(-1, keepdim=True) + EPS).rsqrt()
        norm = (summed.float() * scale * gamma.float().unsqueeze(1)).to(kind)
        return {"sum": total, "residual": summed, "norm": norm}

    def guarded(values):
        row = torch.full_like(values[..., :1, :].contiguous().view(torch.int16), POISON).view(values.dtype)
        return torch.cat((values, row), -2).contiguous()

    def refused(what, got, expected, bound):
        try:
            compare(torch, what, got, expected, bound)
        except WrongNumbers as error:
            return str(error)
        raise AssertionError(f"a wrong {what} passed")

    torch.set_num_threads(1)  # On busy cores the threads wait for each other longer than they work.
    poison = torch.full((1,), POISON, dtype=torch.int16)
    assert poison.view(torch.bfloat16).isnan() and poison.view(torch.float16).isnan()
    generator = torch.Generator()
    largest = 0.0
    for dtype, (_, _, subnormals) in DTYPES.items():
        for ranks, tokens, hidden in ((2, 5, 2880), (4, 2, 2880), (4, 1, 7168)):
            for fp32_acc in (True, False):
                for replay in range(2):
                    generator.manual_seed(replay)
                    shape = (2, ranks, tokens, hidden)
                    inputs = fresh_values(torch, generator, shape, dtype, True, replay)
                    residual = fresh_values(torch, generator, shape, dtype, True, replay)
                    gamma = fresh_values(torch, generator, (1, ranks, hidden), dtype, True)[0]
                    bits = inputs.view(torch.int16)
                    assert (bits == NEGATIVE_ZERO).any() and ((bits & 0x7FFF <= subnormals) & (bits & 0x7FFF > 0)).any()
                    assert inputs.isfinite().all()
                    clean = fresh_values(torch, generator, shape, dtype, False, replay)
                    assert not (clean.view(torch.int16) == NEGATIVE_ZERO).any()

                    right = reference(torch, inputs, residual, gamma, dtype, fp32_acc)
                    made = kernel(inputs, residual, gamma, fp32_acc)
                    for name, (value, bound) in right.items():
                        _, part = compare(torch, name, guarded(made[name]), value, bound)
                        largest = max(largest, part)

                    # Faults that must not pass, each a small one.
                    hole = guarded(made["norm"])
                    hole[1, ranks - 1, tokens - 1, 8:16] = guarded(made["norm"])[1, ranks - 1, tokens, 8:16]
                    assert "never written" in refused("norm", hole, *right["norm"])
                    nan = guarded(made["norm"])
                    nan[0, 0, 0, 5] = float("nan")
                    assert "wrong" in refused("norm", nan, *right["norm"])
                    over = guarded(made["sum"])
                    over[0, 1, tokens, 3] = 0
                    assert "behind the end" in refused("sum", over, *right["sum"])
                    without = inputs.clone()
                    without[:, ranks - 1] = 0
                    for name, value in kernel(without, residual, gamma, fp32_acc).items():
                        refused(name, guarded(value), *right[name])
                    off = (made["norm"].float() * 1.05).to(made["norm"].dtype)
                    refused("norm", guarded(off), *right["norm"])
                    refused("norm", guarded(made["norm"].roll(8, -1)), *right["norm"])
                    refused("residual", guarded(made["sum"].contiguous()), *right["residual"])
                    stale = fresh_values(torch, generator, shape, dtype, True, replay)
                    refused("residual", guarded(kernel(stale, residual, gamma, fp32_acc)["residual"]), *right["residual"])
                    # A partial warp of the RMS left out: 20 of 180 threads, 160 of 2880 elements.
                    less = made["residual"].float()
                    less[..., : hidden // 9] = 0
                    scale = (less.square().mean(-1, keepdim=True) + EPS).rsqrt()
                    short = (made["residual"].float() * scale * gamma.float().unsqueeze(1)).to(inputs.dtype)
                    refused("norm", guarded(short), *right["norm"])
    assert 0.2 < largest <= 1.0, largest
    print(f"numbers: the right ones take up at most {largest:.2f} of their bounds, wrong ones are refused")


if __name__ == "__main__":
    sys.exit(main())
