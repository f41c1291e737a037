"""Tokens/s, memory and all-gathers for an 8-billion-parameter model that FSDP2 shards over all GPUs in a machine.

    torchrun --standalone --nproc-per-node 4 benchmarks/sharded_models.py [--size 8B] [--json FILE] [--arms ARM ...]

A step is forward, backward and the optimizer on each rank's own tokens. The models come from `models.py`. Arms:

- te:{bf16,delayed,current,block}: this engine, or another release; FSDP2 gathers bfloat16 weights;
- te:current+codes: weights are FP8 parameters, so FSDP2 gathers codes; FusedAdam keeps float32 master weights;
- te:current+masters: bfloat16 weights are gathered; FusedAdam keeps float32 master weights;
- pt:{bf16,tensorwise}: torch with compiled layers and torchao's float8 training; FSDP2 gathers bfloat16 weights;
- pt:tensorwise+codes: torchao's FP8 all-gather, with all weight scales computed once per step.

Peak GiB is the maximum over the ranks. Gathers is the number of all-gathers of a step, gathered MB the bytes that they
write on a rank. Transfer ms is their time without waiting: the time of each on the last rank to join;
gather ms is the mean over the ranks. `--trace` prints the kernels of a step.

`--gathers` measures no steps but the gathers of eight layers alone, in a loop, for each format of parameters: the wall
time of a layer's gather with the work before and after it, and its transfer. On a CPU, `--size tiny --eager` shows that
everything runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_arms import SIZES, LanguageModel, Size, make_model
from record import join_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

ARMS = (
    *("te:bf16", "te:delayed", "te:current", "te:block", "te:current+codes", "te:current+masters"),
    *("pt:bf16", "pt:tensorwise", "pt:tensorwise+codes"),
)
MODELS = {
    "8B": Size(32, 4096, 14336, 32, 8, 32768, batch=2, length=4096),
    "8Bx4": SIZES["8Bx4"],
    "tiny": SIZES["tiny"],
}
WARM_UP, BLOCKS, BLOCK = 3, 3, 3
CODES, MASTERS = "+codes", "+masters"
FORMATS = ("te:bf16", "te:current", "te:block", "te:mxfp8", "te:nvfp4", "pt:bf16", "pt:tensorwise")
GATHERED_LAYERS, GATHER_TURNS = 8, 5
LISTED_KERNELS = 40


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes that all-gathers write."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "allgather" in func.__name__ or "all_gather" in func.__name__:
            self.total += sum(
                leaf.numel() * leaf.element_size()
                for leaf in torch.utils._pytree.tree_leaves(args[0])
                if isinstance(leaf, torch.Tensor)
            )
        return func(*args, **(kwargs or {}))


class ShardedSteps:
    """One rank's training steps."""

    def __init__(self, arm: str, size: Size, device: torch.device, compiled: bool) -> None:
        base = arm.partition("+")[0]
        self.codes, self.masters = arm.endswith(CODES), arm.endswith(MASTERS)
        self.precomputes_scales = self.codes and base.startswith("pt:")
        self.device = device
        torch.manual_seed(0)
        self.model = self._make_model(base, size, compiled)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = self._make_optimizer(base)
        torch.manual_seed(1 + dist.get_rank())
        shape = (2, size.batch, size.length)
        self.tokens, self.targets = torch.randint(size.vocabulary, shape, device=device).unbind()

    def _make_model(self, arm: str, size: Size, compiled: bool) -> LanguageModel:
        device = self.device.type
        if not self.codes:
            return make_model(arm, size, device, compiled)
        if arm.startswith("te:"):
            import transformer_engine.pytorch as te
            from transformer_engine.common.recipe import Float8CurrentScaling

            with te.quantized_model_init(recipe=Float8CurrentScaling()):
                return make_model(arm, size, device, compiled)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = make_model("pt:bf16", size, device, compiled)
        convert_to_float8_training(
            model.layers, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        )
        return model

    def _make_optimizer(self, arm: str) -> torch.optim.Optimizer:
        if self.masters or (self.codes and arm.startswith("te:")):
            import transformer_engine.pytorch as te

            return te.optimizers.FusedAdam(self.model.parameters(), lr=1e-4, master_weights=True)
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def run(self) -> torch.Tensor:
        """Forward, backward and optimizer; returns the loss."""
        loss = self.model(self.tokens, self.targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.precomputes_scales:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)
        return loss.detach()

    def measure(self) -> dict[str, Any]:
        """Measure warm steps; every rank calls this function."""
        for _ in range(WARM_UP):
            self.run()
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.run()
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        step_ms = _maximum(statistics.median(self._block_ms() for _ in range(BLOCKS)), self.device)
        with GatheredBytes() as gathered:
            self.run()
        return {
            "step_ms": step_ms,
            "tokens_per_second": 1e3 * self.tokens.numel() * dist.get_world_size() / step_ms,
            "peak_gib": _maximum(peak, self.device),
            "gathered_mb": gathered.total / 1e6,
            **(gather_times(self.run, self.device) if on_gpu else {}),
            "loss": self.run().item(),
        }

    def _block_ms(self) -> float:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(BLOCK):
            self.run()
        self._synchronize()
        return 1e3 * (time.perf_counter() - start) / BLOCK

    def _synchronize(self) -> None:
        _synchronize(self.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def profiled(run: Callable[[], object], device: torch.device) -> torch.profiler.profile:
    """Profile the kernels of a call on every rank."""
    _synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return profile


def gather_times(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Measure the all-gathers of a call: their number, and milliseconds with and without waiting for other ranks."""
    spans = sorted(
        (event.time_range.start, event.time_range.elapsed_us())
        for event in profiled(run, device).events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and "AllGather" in event.name
    )
    local = [length for _, length in spans]
    lengths: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, local)
    if len({len(each) for each in lengths}) > 1:
        raise RuntimeError(
            f"ranks have {[len(each) for each in lengths]} all-gathers; the trace is incomplete"
        )
    return {
        "gathers": len(local),
        "transfer_ms": sum(map(min, zip(*lengths, strict=True))) / 1e3,
        "gather_ms": sum(map(statistics.mean, zip(*lengths, strict=True))) / 1e3,
    }


def print_kernels(run: Callable[[], object], device: torch.device) -> None:
    """Print the kernels of a call, the longest total first, on the first rank."""
    averages = profiled(run, device).key_averages()
    if dist.get_rank() == 0:
        rows = sorted(averages, key=lambda event: -event.self_device_time_total)[:LISTED_KERNELS]
        for event in rows:
            print(
                f"{event.self_device_time_total / 1e3:9.3f} ms {event.count:6} {event.key[:110]}",
                flush=True,
            )


class GatheredLayers:
    """Layers with parameters in one format, sharded over all ranks, whose parameters are gathered one after another."""

    def __init__(self, arm: str, size: Size, device: torch.device) -> None:
        self.device = device
        torch.manual_seed(0)
        size = replace(size, layers=GATHERED_LAYERS if device.type == "cuda" else size.layers)
        self.layers = self._make_model(arm, size, device.type).layers
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        if arm == "pt:tensorwise":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.layers)

    @staticmethod
    def _make_model(arm: str, size: Size, device: str) -> LanguageModel:
        library, name = arm.split(":")
        if library == "te":
            import transformer_engine.pytorch as te
            from transformer_engine.common import recipe

            recipes = {
                "current": recipe.Float8CurrentScaling,
                "block": recipe.Float8BlockScaling,
                "mxfp8": recipe.MXFP8BlockScaling,
                "nvfp4": recipe.NVFP4BlockScaling,
            }
            chosen = recipes[name]() if name in recipes else None
            # The casts of MXFP8 and NVFP4 run on every GPU, their products on some.
            with te.emulate(), te.quantized_model_init(enabled=chosen is not None, recipe=chosen):
                return make_model("te:bf16", size, device)
        model = make_model("pt:bf16", size, device, False)
        if name == "tensorwise":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
            convert_to_float8_training(model.layers, config=config)
        return model

    def run(self) -> None:
        """Gather and free the parameters of each layer."""
        for layer in self.layers:
            layer.unshard()
            layer.reshard()

    def measure(self) -> dict[str, Any]:
        """Measure a layer's gather; every rank calls this function."""
        for _ in range(WARM_UP):
            self.run()
        times = []
        for _ in range(GATHER_TURNS):
            _synchronize(self.device)
            start = time.perf_counter()
            self.run()
            _synchronize(self.device)
            times.append(1e3 * (time.perf_counter() - start))
        with GatheredBytes() as gathered:
            self.run()
        count = len(self.layers)
        figures = {
            "layer_ms": _maximum(statistics.median(times), self.device) / count,
            "layer_mb": gathered.total / 1e6 / count,
        }
        if self.device.type == "cuda":
            found = gather_times(self.run, self.device)
            figures |= {name: value / count for name, value in found.items()}
        return figures


def _maximum(value: float, device: torch.device) -> float:
    """Maximum over the ranks."""
    number = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--size", choices=MODELS, default="8B")
    options.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    options.add_argument("--json", type=Path)
    options.add_argument("--eager", action="store_true", help="do not compile the layers of pt")
    options.add_argument("--trace", action="store_true", help="print the kernels of a step")
    options.add_argument(
        "--gathers", action="store_true", help="measure the gathers of parameters alone"
    )
    chosen = options.parse_args()
    device = join_ranks("nccl")
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.cache_size_limit = 64
    rows = []
    for arm in FORMATS if chosen.gathers else chosen.arms:
        row: dict[str, Any] = {"arm": arm, "size": chosen.size, "ranks": dist.get_world_size()}
        try:
            if chosen.gathers:
                row |= GatheredLayers(arm, MODELS[chosen.size], device).measure()
            else:
                steps = ShardedSteps(arm, MODELS[chosen.size], device, not chosen.eager)
                row |= steps.measure()
                if chosen.trace and device.type == "cuda":
                    print_kernels(steps.run, device)
                del steps
        except (ImportError, RuntimeError, ValueError) as error:  # the next arm may run
            row["error"] = f"{type(error).__name__}: {error}"[:400]
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            if chosen.json:
                chosen.json.write_text(
                    json.dumps({"torch": torch.__version__, "results": rows}, indent=1)
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
