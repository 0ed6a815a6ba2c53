"""FlashInfer's own Python, on two or more GPUs: the unified all-reduce API inside a captured CUDA graph, every number compared.

    fi-arch run --env ENV --sm 90 -- python3 ci/flashinfer_path.py [--ranks 2] [--replays 20]

One process per rank, one GPU per rank, `backend="trtllm"`. Ends with 0 when every case passed, 1 when one failed, 3 when the machine
lacks GPUs. It prints where the module came from: run it through `fi-arch run` or after `fi-arch install`, with nvcc off the PATH.

NVLink multicast is never used: the driver's function that makes multicast objects is replaced by one that raises before any call.
"""

import argparse
import datetime
import json
import os
import sys
import time

TOKENS = (1, 3, 8, 16, 64, 128)
HIDDEN = (4096, 7168)
EAGER_CALLS = 300
EPS = 1e-6


def forbid_multicast():
    """Makes a mistake in choosing the backend an exception, not a driver call."""
    from cuda.bindings import driver

    def refuse(*_):
        raise RuntimeError("this check must not create NVLink multicast objects")

    for name in ("cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"):
        setattr(driver, name, refuse)


def case(comm, torch, dist, workspace, rank, ranks, tokens, hidden, oneshot, replays):
    """Runs one shape in a graph; returns the largest error of all replays, relative to each row's largest value, and µs: of a
    replay, and of the host for a call outside a graph."""
    device = torch.device("cuda", rank)
    make = lambda *shape: torch.zeros(*shape, dtype=torch.bfloat16, device=device)
    given, residual, gamma = make(tokens, hidden), make(tokens, hidden), make(hidden)
    residual_out, norm_out = make(tokens, hidden), make(tokens, hidden)

    def call():
        comm.allreduce_fusion(
            input=given,
            workspace=workspace,
            pattern=comm.AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            residual_out=residual_out,
            norm_out=norm_out,
            residual_in=residual,
            rms_gamma=gamma,
            rms_eps=EPS,
            use_oneshot=oneshot,
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    # What a caller without graphs waits for: the host's share alone, where a call takes the GPU less.
    begin = time.perf_counter()
    with torch.cuda.stream(stream):
        for _ in range(EAGER_CALLS):
            call()
    host_us = (time.perf_counter() - begin) / EAGER_CALLS * 1e6
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    worst, times = 0.0, []
    for replay in range(replays):
        made = torch.Generator(device=device).manual_seed(1000 * replay + rank)
        same = torch.Generator(device=device).manual_seed(77 * replay + 5)
        given.copy_(torch.randn(tokens, hidden, generator=made, device=device))
        given[0, :4] = torch.tensor([-0.0, 0.0, 1e-39, -1e-39], device=device)
        residual.copy_(torch.randn(tokens, hidden, generator=same, device=device))
        gamma.copy_(torch.rand(hidden, generator=same, device=device) + 0.5)
        norm_out.fill_(float("nan"))
        residual_out.fill_(float("nan"))
        everyone = [torch.empty_like(given) for _ in range(ranks)]
        dist.all_gather(everyone, given)
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
        total = sum((part.double() for part in everyone), torch.zeros((), device=device).double()) + residual.double()
        norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * gamma.double()
        for got, want in ((residual_out, total), (norm_out, norm)):
            error = ((got.double() - want).abs().amax(-1) / want.abs().amax(-1)).max().item()
            worst = max(worst, error if error == error else float("inf"))
    return worst, sorted(times)[len(times) // 2], host_us


def rank_main(rank, args):
    import torch
    import torch.distributed as dist

    forbid_multicast()
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    dist.init_process_group("nccl", rank=rank, world_size=args.ranks, timeout=datetime.timedelta(seconds=120))
    import flashinfer
    import flashinfer.comm as comm

    cases, failed = [], 0
    workspace = comm.create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=args.ranks,
        rank=rank,
        max_token_num=max(TOKENS),
        hidden_dim=max(HIDDEN),
        dtype=torch.bfloat16,
    )
    for hidden in HIDDEN:
        for tokens in TOKENS:
            for oneshot in (True, False) if tokens > args.ranks else (True,):
                error, us, host_us = case(comm, torch, dist, workspace, rank, args.ranks, tokens, hidden, oneshot, args.replays)
                # Two roundings to bf16 (2^-8 each), and the sum in the kernel's own order.
                right = error < 2.0**-6
                failed += not right
                shape = {"tokens": tokens, "hidden": hidden, "oneshot": oneshot}
                times = {"median_us": round(us, 1), "eager_host_us": round(host_us, 1)}
                cases.append({**shape, "error": error, **times, "verdict": "pass" if right else "fail"})
    loaded = sorted({line.split()[-1] for line in open("/proc/self/maps") if "trtllm_comm" in line})
    if rank == 0:
        report = {
            "verdict": "fail" if failed else "pass",
            "ranks": args.ranks,
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "flashinfer": flashinfer.__version__,
            "module": loaded,
            "nvcc_on_path": any(os.access(os.path.join(d, "nvcc"), os.X_OK) for d in os.environ["PATH"].split(":")),
            "cases": cases,
        }
        print(json.dumps(report, indent=1))
    dist.barrier()
    # The symmetric memory outlives the process group in some releases: leave without taking either down in order.
    sys.stdout.flush()
    os._exit(1 if failed else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--deadline", type=float, default=240, help="seconds until all ranks are killed")
    args = parser.parse_args()
    import torch
    import torch.multiprocessing as mp

    if torch.cuda.device_count() < args.ranks:
        print(f"error: {args.ranks} GPUs are wanted, {torch.cuda.device_count()} are here", file=sys.stderr)
        return 3
    spawn = mp.get_context("spawn")
    ranks = [spawn.Process(target=rank_main, args=(rank, args)) for rank in range(args.ranks)]
    for process in ranks:
        process.start()
    end = time.monotonic() + args.deadline
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        ranks[rank].kill()
    if late:
        print(f"error: ranks {late} did not end within {args.deadline:.0f} s and were killed", file=sys.stderr)
    return int(bool(late) or any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main())
