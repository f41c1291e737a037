"""The `te plan` simulator against the measurements in benchmarks/results: predicted and measured, case by case.

    python benchmarks/plan_accuracy.py [--only TEXT]

A case is "fitted" if constants in `common/planning` were chosen by it or by another run, otherwise "held out". The
H100 constants follow from its roofs alone, so that its layers are held out. Cases with host time, FP8 attention,
emulation, CPUs and JAX are not simulated and not listed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformer_engine.common.planning import plan
from transformer_engine.common.planning.hardware import (
    DEFAULT_LINKS,
    FORMATS,
    GPUS,
    GpuRates,
    format_named,
)
from transformer_engine.common.planning.layer import (
    LOSS,
    UNEVEN,
    Both,
    MicroBatch,
    attention,
    experts,
    layer,
    linears,
    mlp,
    no_costs,
)
from transformer_engine.common.planning.layer_steps import Pass, Step
from transformer_engine.common.planning.models import MODELS, ModelShape
from transformer_engine.common.planning.simulate import (
    Cost,
    Extent,
    LinearSize,
    PassRun,
    RankMachine,
)

# Cases for which the simulator claims no accuracy, and why; the page lists their errors.
_REUSED = "measured before layers reused the memory of the product before an activation"
NOT_CLAIMED = {
    r"products: .*128x1024->4096": "a product of 10 us, whose time depends on the tiles that cuBLASLt chooses",
    r"products: fp8 split forward 8192x4096->28672": "a product that cuBLASLt computes more slowly than similar ones",
    r"attention by backend: .*b32_s512": "sequences of 512 tokens: most blocks touch the mask",
    r"layer_small_fb/": "a layer of 0.2 ms: each kernel takes as long as its launch",
    r"experts: block": "uneven groups slow down grouped products of block scales more than those of other formats",
    r"collectives: .*_16?MiB": "a loop of small collectives measures the host and the start of NCCL",
    r"context parallelism, all-gather|on . H200, all-gather: .*s131072": (
        "measured when its blocks had slower masks than those of the ring"
    ),
    r"tensor parallelism on . H200: .*/(delayed|current|block)/.*(eager_ms|transfers)": (
        "the host limits layers in FP8 whose products are divided among ranks; `graphed_ms` excludes the host"
    ),
    r"exposed communication": "the trace also counts the time in which a rank waits for another rank, or for the host",
    r"memory of layers: .*MLP.* (bf16|current|block)$": _REUSED,
    r"memory of layers: TransformerLayer.*current": _REUSED,
    r"memory of layers, later: linear_fb/(delayed|block)": "the order in which the codes of a small layer are freed",
    r"training runs, tokens/s: graphs": "gaps between kernels of a few microseconds, and the optimizer of the run",
}
RESULTS = Path(__file__).parent / "results"
MIB = 2.0**20
LIMIT = 0.15
LLAMA = MODELS["llama-8b"]
SMALL = ModelShape("small", 1024, 1, 16, 16, 64, 4096, 32000)
FITTED_LAYERS = ("grouped", "layer_small", "dpa")
FITTED_ATTENTION = (
    "b2_s8192_h32_8_d128_causal",
    "b4_s4096_h32_32_d128_causal",
    "thd_8x2048_h32_8_d128_causal",
    "b8_s2048_h16_16_d64_causal",
    "b2_s4096_h16_16_d256_causal",
)
FORMAT_OF_CAST = {
    "delayed": "delayed",
    "current": "current",
    "block1d": "block",
    "block2d": "block",
}


@dataclass(frozen=True)
class Check:
    """A measurement and its prediction.

    group      measurement type, a row in the page's table
    case       name in the results file
    fitted     constants were chosen by it
    """

    group: str
    case: str
    measured: float
    predicted: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted / self.measured - 1

    @property
    def reason(self) -> str | None:
        """Why no accuracy is claimed; None if it is."""
        name = f"{self.group}: {self.case}"
        return next(
            (text for pattern, text in NOT_CLAIMED.items() if re.search(pattern, name)), None
        )

    @property
    def holds(self) -> bool:
        return abs(self.error) <= LIMIT


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def machine(
    recipe: str, gpu: GpuRates = GPUS["h200"], loaded: bool = False, **options: Any
) -> RankMachine:
    return RankMachine(
        gpu,
        format_named(recipe, gpu),
        attention=options.pop("attention", "flash4"),
        loaded=loaded,
        **options,
    )


def linear(
    used: RankMachine, rows: int, inputs: int, outputs: int, groups: int = 1, bias: bool = False
) -> Both:
    kind = "linear" if groups == 1 else "grouped"
    extents = {"x": Extent(rows, inputs), "grad_output": Extent(rows, outputs)}
    return linears(
        used, kind, {"linear": LinearSize(rows, inputs, outputs, groups)}, extents, bias=bias
    )


def norm_linear(used: RankMachine, rows: int, inputs: int, outputs: int) -> Both:
    extents = {"x": Extent(rows, inputs), "grad_output": Extent(rows, outputs)}
    return linears(used, "norm_linear", {"linear": LinearSize(rows, inputs, outputs)}, extents)


def dense_mlp(used: RankMachine, rows: int, hidden: int, inner: int, gated: bool) -> Both:
    return mlp(
        used, replace(LLAMA, hidden=hidden, ffn=inner, gated=gated), rows, Extent(rows, hidden)
    )


def together(costs: Both) -> float:
    return costs.forward.total + costs.backward.total


def layer_case(case: str, used: RankMachine) -> float | None:
    """Milliseconds for a `te bench` layer case, or None if the simulator does not cover it."""
    family, _, rest = case.split("/", 2)
    sizes = [int(number) for number in re.findall(r"\d+", rest)]
    if family in ("linear_fb", "torch_linear_fb"):
        return together(linear(used, sizes[0], sizes[1], sizes[2]))
    if family == "linear_bias_f":
        return linear(used, sizes[0], sizes[1], sizes[2], bias=True).forward.total
    if family == "layernorm_linear_fb":
        return together(norm_linear(used, 8192, *sizes))
    if family == "layernorm_mlp_fb":
        return together(dense_mlp(used, 8192, *sizes, gated=rest.startswith("swiglu")))
    if family == "grouped_linear_fb":
        groups, rows, inputs, outputs = sizes
        return together(linear(used, rows, inputs, outputs, groups))
    if family == "ops_fb" and rest == "mlp_4096x14336_modules":
        return together(dense_mlp(used, 8192, 4096, 14336, gated=False))
    if family in ("layer_fb", "layer_f"):
        costs = layer(used, LLAMA, MicroBatch(8192))
        return costs.forward.total if family == "layer_f" else together(costs)
    if family == "layer_small_fb":
        return together(layer(used, SMALL, MicroBatch(128, rotary=False)))
    if family.startswith("dpa_f") and "d192" not in rest:
        return attention_case(rest, used, family == "dpa_fb")
    return None


def attention_case(name: str, used: RankMachine, backward: bool) -> float | None:
    """Milliseconds for attention with the sizes in a case's name."""
    found = re.search(r"(?:b|thd_)(\d+)[x_]s?(\d+)_h(\d+)_(\d+)_d(\d+)(\w*)", name)
    if found is None or found[6].startswith("_128") or "fp8" in name:
        return None
    batch, sequence, heads, kv_heads, width = (int(found[index]) for index in range(1, 6))
    window = 4096 if "window4096" in name else None
    work = MicroBatch(sequence, batch, window=window, causal="full" not in name)
    costs = attention(used, work, heads, kv_heads, width)
    return together(costs) if backward else costs.forward.total


def layers(file: str, group: str) -> Iterator[Check]:
    """Yield layer times in a `te bench` file: kernels alone, and in a loop where the GPU limits it."""
    for row in results(file)["results"]:
        if row.get("provider", "te") != "te":
            continue
        case, recipe = row["case"], row["case"].split("/")[1]
        if recipe not in (*FORMATS, "bf16") or (case.startswith("dpa") and recipe != "bf16"):
            continue
        gpu = GPUS["h100" if "h100" in file else "h200"]
        for key, loaded in (("gpu_ms", False), ("eager_ms", True)):
            # Loops with short steps measure the host.
            if key == "eager_ms" and row["eager_ms"] < 3 * row["cpu_ms"]:
                continue
            predicted = layer_case(case, machine(recipe, gpu, loaded))
            if predicted is not None:
                fitted = (
                    gpu is GPUS["h200"] and case.startswith(FITTED_LAYERS) and "window" not in case
                )
                yield Check(f"{group}, {key}", case, row[key], predicted, fitted)


def one_step(used: RankMachine, step: Step, inputs: dict[str, Extent]) -> float:
    """Milliseconds for one step's pass."""
    return (
        PassRun(used, {}, inputs).run(Pass(tuple(inputs), step.results, (), (step,)), Cost()).total
    )


def kernels() -> Iterator[Check]:
    """Yield casts, norms and products from `te bench` and benchmarks/products.py."""
    for row in results("bench_h200")["results"]:
        if row["provider"] != "te":
            continue
        family, name, *_ = row["case"].split("/")
        sizes = [int(number) for number in re.findall(r"\d+", row["case"].rpartition("/")[2])]
        if family == "quantize":
            kind, _, directions = name.partition("_")
            both = directions == "both"
            names = ("row", "column" if both else None)
            step = Step("cast", ("x",), names, casts=True)
            predicted = one_step(machine(FORMAT_OF_CAST[kind]), step, {"x": Extent(*sizes)})
            yield Check("casts", row["case"], row["gpu_ms"], predicted, fitted=True)
        elif family in ("norm_f", "norm_fb"):
            inputs = {"x": Extent(*sizes), "gamma": Extent(1, sizes[1])}
            step = Step("norm", ("x", "gamma"), ("y", None, "rstdev"))
            predicted = one_step(machine("bf16"), step, inputs)
            if family == "norm_fb":
                options = {
                    "dy": Extent(*sizes),
                    "x": Extent(*sizes),
                    "rstdev": Extent(sizes[0], 1, 4.0),
                }
                read = ("dy", "x", None, "rstdev", "gamma")
                step = Step("norm_backward", read, ("dx", "dgamma", None))
                predicted += one_step(
                    machine("bf16"), step, {**options, "gamma": Extent(1, sizes[1])}
                )
            yield Check("norms", row["case"], row["gpu_ms"], predicted)
        elif family == "rope_fb":
            costs = no_costs()
            moved = 2 * 8192 * 2 * 32 * 128 * 2.0
            costs.stream(machine("bf16"), "rotary", moved, moved)
            yield Check("other kernels", row["case"], row["gpu_ms"], together(costs))
    for row in results("cublaslt_h200")["products"]:
        found = re.fullmatch(
            r"(bf16|fp8 fast|fp8 split|block) (forward|dgrad|wgrad) (\d+)x(\d+)->(\d+)", row["case"]
        )
        if found is None:
            continue  # with a bias or accumulated, which the simulator adds as memory traffic
        kind = {"fp8 fast": "fp8", "fp8 split": "fp8_split"}.get(found[1], found[1])
        kind = "block_1d" if (kind, found[2]) == ("block", "wgrad") else kind
        rows, inputs, outputs = (int(found[index]) for index in (3, 4, 5))
        element = 2.0 if kind == "bf16" else 1.0
        moved = element * (rows * inputs + inputs * outputs) + 2.0 * rows * outputs
        predicted = GPUS["h200"].product_ms(kind, 2.0 * rows * inputs * outputs, moved)
        yield Check("products", row["case"], row["cublaslt_ms"], predicted, fitted=True)
    yield from other_kernels()


def other_kernels() -> Iterator[Check]:
    """Yield the optimizer, the loss and the token permutation."""
    gpu = GPUS["h200"]
    for row in results("experts_loss_optimizer_graphs_h200")["results"]:
        case = row["case"]
        if row["provider"] != "te":
            continue
        if case == "adam_step/bf16/60x16777216_fp32":
            predicted = gpu.copy_ms(28.0 * 60 * 16777216, 0.97)
        elif case.startswith("cross_entropy_fb"):
            logits, costs = 8192 * 128256 * 2.0, no_costs()
            costs.stream(machine("bf16"), "loss", logits / LOSS, 2 * logits / LOSS, 2)
            predicted = together(costs)
        elif case.startswith("permute_fb"):
            moved, costs = 2.0 * 9 * 16384 * 4096 * 2.0, no_costs()
            costs.stream(machine("bf16"), "routing", moved, moved, 2)
            predicted = together(costs)
        else:
            continue
        yield Check(
            "other kernels", case, row["gpu_ms"], predicted, case.startswith("cross_entropy_fb")
        )


def attention_backends() -> Iterator[Check]:
    """Yield attention by cuDNN and flash-attn-4."""
    for row in results("attention_backends_h200")["results"]:
        if row["backend"] not in ("flash4", "cudnn"):
            continue
        used = machine("bf16", attention=row["backend"])
        name = row["case"].replace("thd_8x", "thd_8_")
        fitted = row["case"] in FITTED_ATTENTION and (
            row["backend"] == "flash4" or "thd" not in name
        )
        for key, backward in (("forward_ms", False), ("forward_backward_ms", True)):
            predicted = attention_case(name, used, backward)
            if predicted is not None:
                label = f"{row['backend']} {row['case']} {key}"
                yield Check("attention by backend", label, row[key], predicted, fitted)


def mixtures() -> Iterator[Check]:
    """Yield the mixtures of experts from benchmarks/expert_step.py."""
    for row in results("experts_h200")["rows"]:
        if "kernels_ms" not in row:
            continue
        name, hidden, tokens = re.fullmatch(r"(\w+)_h(\d+)_t(\d+)", row["case"]).groups()  # pyright: ignore
        used = machine("bf16" if name == "none" else name)
        width, rows = int(hidden), int(tokens)
        inner = -(-(-(-width * 8 // 384) * 128) // 256) * 128
        shape = replace(LLAMA, hidden=width, ffn=inner, experts=8, experts_per_token=2)
        products = no_costs()
        for inputs, outputs in ((width, 2 * inner), (inner, width)):
            products.add(linear(used, 2 * rows, inputs, outputs, 8))
        case = row["case"]
        # The layer's router determined the rows per expert.
        uneven = together(products) + UNEVEN * sum([cost.kernels["products"] for cost in products])
        yield Check("experts", f"{case} products", row["products_kernels_ms"], uneven)
        full = experts(used, shape, MicroBatch(rows), Extent(rows, width))
        yield Check("experts", case, row["kernels_ms"], together(full))


def several_devices() -> Iterator[Check]:
    """Yield collectives, context parallelism and a tensor-parallel layer on two H100."""
    first, second, third = results("distributed_h100x2")["runs"]
    alone_ms = statistics.median([took for rank in second["one device"] for took in rank])
    gpu = GPUS["h100"]
    for row in first["results"]:
        family, recipe, name = row["case"].split("/")
        if family == "collective":
            kind, size = re.fullmatch(r"(\w+)_(\d+)MiB_ranks2", name).groups()  # pyright: ignore
            predicted = DEFAULT_LINKS.collective_ms(kind, int(size) * MIB, 2, 1)  # pyright: ignore
            predicted = max(predicted, gpu.host)  # a loop with small collectives measures the host
            yield Check(
                "collectives", row["case"], row["eager_ms"], predicted, fitted=int(size) >= 64
            )
        elif recipe == "bf16":
            sequence, scheme = re.match(r"causal_s(\d+)_h32_8_d128_(\w+)_ranks2", name).groups()  # pyright: ignore
            used = machine("bf16", gpu, True, attention="cudnn")
            costs = attention(used, MicroBatch(int(sequence), cp=2, scheme=scheme), 32, 8, 128)  # pyright: ignore
            group = (
                "context parallelism, all-gather"
                if scheme == "all_gather"
                else "context parallelism"
            )
            yield Check(group, row["case"], row["eager_ms"], together(costs))
            exposed = sum([cost.exposed["cp"] for cost in costs]) / together(costs)
            yield Check(
                "exposed communication, %", row["case"], 100 * row["exposed"], 100 * exposed
            )
    used = machine("bf16", gpu, True, attention="cudnn")
    alone = together(attention(used, MicroBatch(65536), 32, 8, 128))
    yield Check("context parallelism", "one device, 65,536 tokens", alone_ms, alone)
    (row,) = third["results"]
    yield Check(
        "tensor parallelism",
        f"{row['case']}, one device",
        row["one_ms"],
        together(layer(used, LLAMA, MicroBatch(8192))),
    )
    pair = replace(used, tp=2)
    costs = layer(pair, LLAMA, MicroBatch(8192))
    hidden = sum([cost.communication["tp"] - cost.exposed["tp"] for cost in costs])
    predicted = together(costs) + DEFAULT_LINKS.contention_ms(hidden, 2, 1)
    yield Check("tensor parallelism", row["case"], row["eager_ms"], predicted)
    exposed = sum([cost.exposed["tp"] for cost in costs]) / predicted
    yield Check("exposed communication, %", row["case"], 100 * row["exposed"], 100 * exposed)
    computed = costs.forward.compute + costs.backward.compute
    yield Check(
        "tensor parallelism", f"{row['case']}, without transfers", row["compute_ms"], computed
    )


def ranks_cases(file: str) -> Iterator[Check]:
    """Yield context parallelism and tensor-parallel layers on several H200, from a file of `te bench --distributed`."""
    content = results(file)
    rows = content["layers and attention"]["results"] + content.get("after the repairs", {}).get(
        "results", []
    )
    for row in {row["case"]: row for row in rows}.values():
        family, recipe, name = row["case"].split("/")
        ranks = int(name.rpartition("ranks")[2])
        used = machine(recipe, loaded=True, attention="cudnn")
        if family == "attention_cp_fb" and recipe == "bf16":
            found = re.match(r"causal_s(\d+)_h32_8_d128_(p2p|a2a|all_gather)_ranks", name)
            if found is None:
                continue  # a2a+p2p, which the simulator does not cover
            sequence, scheme = int(found[1]), found[2]
            group = f"context parallelism on {ranks} H200"
            if scheme == "p2p":
                alone = together(attention(used, MicroBatch(sequence), 32, 8, 128))
                yield Check(group, f"one device, {sequence:,} tokens", row["one_ms"], alone)
            group = f"{group}, all-gather" if scheme == "all_gather" else group
            costs = attention(used, MicroBatch(sequence, cp=ranks, scheme=scheme), 32, 8, 128)  # pyright: ignore
            yield Check(group, row["case"], row["eager_ms"], together(costs))
        elif family in ("layer_sp_fb", "layer_ub_fb"):
            group = f"tensor parallelism on {ranks} H200"
            yield Check(
                group,
                f"{row['case']}, one device",
                row["one_ms"],
                together(layer(used, LLAMA, MicroBatch(8192))),
            )
            costs = layer(replace(used, tp=ranks), LLAMA, MicroBatch(8192))
            hidden = sum([cost.communication["tp"] - cost.exposed["tp"] for cost in costs])
            predicted = together(costs) + DEFAULT_LINKS.contention_ms(hidden, ranks, 1)
            for key in ("eager_ms", "graphed_ms"):
                if key in row:
                    yield Check(group, f"{row['case']}, {key}", row[key], predicted)
            computed = costs.forward.compute + costs.backward.compute
            yield Check(group, f"{row['case']}, without transfers", row["compute_ms"], computed)


def h100_layers() -> Iterator[Check]:
    """Yield the H100 layers, with H200 constants scaled by the ratio between their roofs."""
    rows = results("passes_te_bench_h100")[
        "gpu, host and wall ms, three alternating turns on another H100"
    ]
    for case, turns in rows.items():
        for index, (key, loaded) in enumerate((("gpu_ms", False), ("eager_ms", True))):
            values = sorted(turn[2 * index] for turn in turns["after"])
            recipe = case.split("/")[1]
            predicted = layer_case(case, machine(recipe, GPUS["h100"], loaded, attention="cudnn"))
            host = sorted(turn[1] for turn in turns["after"])[1]
            if predicted is not None and (not index or values[1] > 3 * host):
                yield Check(f"layers, H100, {key}", case, values[1], predicted)
    yield from layers("ops_h100", "layers, H100")


def memory() -> Iterator[Check]:
    """Yield the peak memory in a forward and backward pass, with parameters, gradients, inputs and outputs.

    Layer products are freed or replaced since; current-scaling products were measured before.
    """
    matrix = {"Linear(4096, 28672": (4096, 28672), "Linear(4096, 14336": (4096, 14336)}
    for row in results("memory_plan_h200")["results"]:
        name, used = row["model"], machine(row["recipe"])
        residual = Extent(8192, 4096).size
        count = 1
        sizes = next((sizes for start, sizes in matrix.items() if name.startswith(start)), None)
        output = residual
        if sizes is not None:
            costs = linear(used, 8192, sizes[0], sizes[1], 1, "bias" not in name)
            parameters = sizes[0] * sizes[1]
            output = Extent(8192, sizes[1]).size
        elif name.startswith("LayerNormLinear"):
            costs, parameters = norm_linear(used, 8192, 4096, 6144), 4096 * 6144
            output = Extent(8192, 6144).size
        elif name.startswith("LayerNormMLP"):
            gated = "swiglu" in name
            costs, parameters = (
                dense_mlp(used, 8192, 4096, 14336, gated),
                (3 if gated else 2) * 4096 * 14336,
            )
        else:
            count, tokens = (3, 4096) if name.startswith("three") else (1, 8192)
            costs = layer(used, LLAMA, MicroBatch(tokens, rotary=False))
            parameters, residual = LLAMA.layer_parameters(), 0.0  # the input is a saved tensor
            output = Extent(tokens, 4096).size
        backward = (
            (count - 1) * costs.forward.saved + 2 * output + 2 * parameters + costs.backward.peak
        )
        peak = 2 * count * parameters + residual + costs.forward.saved + backward
        yield Check("memory of layers", f"{name}, {row['recipe']}", row["measured_mib"], peak / MIB)


def later_memory() -> Iterator[Check]:
    """Yield layers' peak memory without parameters, gradients, input and output gradient."""
    for row in results("peak_memory_h200")["results"]:
        family, recipe, rest = row["case"].split("/")
        used, sizes = machine(recipe), [int(number) for number in re.findall(r"\d+", rest)]
        argument = 0.0
        if family == "linear_fb":
            costs = linear(used, sizes[0], sizes[1], sizes[2])
        elif family == "layernorm_linear_fb":
            costs = norm_linear(used, 8192, *sizes)
        elif family == "layernorm_mlp_fb":
            costs = dense_mlp(used, 8192, *sizes, gated="swiglu" in rest)
        elif family == "layer_fb":
            costs, argument = layer(used, LLAMA, MicroBatch(8192)), Extent(8192, 4096).size
        else:
            continue
        peak = max(costs.forward.peak, costs.forward.saved + costs.backward.peak) - argument
        yield Check("memory of layers, later", row["case"], row["peak_mib"], peak / MIB)


def training() -> Iterator[Check]:
    """Yield whole-model training runs: 6 layers with width 1,024, 8 x 1,024 bytes per step, on one H200."""
    shape = ModelShape("demonstration", 1024, 6, 16, 16, 64, 2816, 256, tied=False)
    variants = {
        "high_precision": ("bf16", False),
        "plain": ("delayed", False),
        "graphs": ("delayed", True),
    }
    for row in results("train_switches_h200")["rows"]:
        if row["variant"] not in variants:
            continue
        recipe, graphs = variants[row["variant"]]
        found = plan(
            shape,
            1,
            gpu="h200",
            recipe=recipe,
            sequence=1024,
            micro_batch=8,
            graphs=graphs,
            attention="flash4",
        )
        yield Check("training runs, tokens/s", row["variant"], row["tokens_s"], found.tokens_per_s)


SOURCES: tuple[Callable[[], Iterator[Check]], ...] = (
    kernels,
    attention_backends,
    lambda: layers("bench_h200", "layers, H200"),
    lambda: layers("layers_h200", "layers, H200"),
    lambda: layers("attention_te_bench_h200", "layers, H200"),
    h100_layers,
    mixtures,
    several_devices,
    lambda: ranks_cases("two_gpus_h200"),
    lambda: ranks_cases("four_gpus_h200"),
    memory,
    later_memory,
    training,
)


def checks() -> list[Check]:
    """Return every measurement with its prediction."""
    return [check for source in SOURCES for check in source()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose group or name contains this")
    chosen = parser.parse_args().only
    for check in checks():
        if chosen in f"{check.group} {check.case}":
            mark = " " if check.holds else "*"
            role = "fitted" if check.fitted else "held out"
            print(
                f"{mark} {check.error:+7.1%}  {check.measured:12.4f} {check.predicted:12.4f}  {role:8}  "
                f"{check.group}: {check.case}"
            )


if __name__ == "__main__":
    main()
