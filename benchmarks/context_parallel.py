"""One sequence's attention over several GPUs against one GPU: time for both passes, and errors.

torchrun --nproc-per-node 2 benchmarks/context_parallel.py [--tokens 65536] [--fp8]     # NCCL, a GPU per rank
python benchmarks/context_parallel.py --threads 2 --tokens 4096                          # threads as ranks on one GPU

Prints one JSON line per scheme: milliseconds on one device and on the ranks, and relative errors in the output
and every gradient against the same attention on one device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

SCHEMES = ("p2p", "all_gather", "a2a")


def milliseconds(run: Any, steps: int = 10) -> float:
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps


def rank_chunks(x: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    chunks = x.chunk(2 * size, dim=1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=1).detach().requires_grad_()


def measure(options: argparse.Namespace, rank: int, size: int, timed: bool) -> list[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, options.tokens)
    q, k, v, dout = (
        torch.randn(*shape, heads, 128, device=device, dtype=torch.bfloat16, generator=generator)
        for heads in (options.heads, options.groups, options.groups, options.heads)
    )
    module = te.DotProductAttention(
        options.heads, 128, options.groups, qkv_format="bshd", attn_mask_type=options.mask
    )
    recipe = DelayedScaling(fp8_dpa=True)

    def both(*tensors: torch.Tensor) -> list[torch.Tensor]:
        *qkv, grad = tensors
        with te.autocast(enabled=True, recipe=recipe) if options.fp8 else contextlib.nullcontext():
            out = module(*qkv)
        return [out.detach(), *torch.autograd.grad(out, qkv, grad)]

    full = [x.detach().requires_grad_() for x in (q, k, v)]
    alone = both(*full, dout.flatten(-2))
    one = milliseconds(lambda: both(*full, dout.flatten(-2))) if timed else None
    results = []
    for scheme in SCHEMES:
        module.set_context_parallel_group(
            dist.group.WORLD, list(range(size)), torch.cuda.Stream(), scheme
        )
        local = [rank_chunks(x, size, rank) for x in (q, k, v)]
        grad = rank_chunks(dout, size, rank).detach().flatten(-2)
        found = both(*local, grad)
        errors = {}
        for name, x, y in zip(("out", "dq", "dk", "dv"), found, alone, strict=True):
            expected = rank_chunks(y, size, rank).detach().float()
            errors[name] = round(float((x.float() - expected).norm() / expected.norm()), 5)
        several = (
            milliseconds(lambda separate=local, grad=grad: both(*separate, grad)) if timed else None
        )
        results.append(
            {"scheme": scheme, "ranks": size, "one_ms": one, "ranks_ms": several, "errors": errors}
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--mask", default="causal")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from tests.distributed.threaded_ranks import run_on_threads

        size = options.threads
        for result in run_on_threads(lambda rank: measure(options, rank, size, False), size)[0]:
            print(json.dumps(result))
        return
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    results = measure(options, dist.get_rank(), dist.get_world_size(), True)
    if dist.get_rank() == 0:
        for result in results:
            print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
