"""Write tables in docs/{performance,convert,which_recipe}.md, and figures in docs/index.md and README.md.

--check only compares.

python docs/performance_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from generated import ROOT, write

PAGE = ROOT / "docs" / "performance.md"
HOME = ROOT / "docs" / "index.md"
README = ROOT / "README.md"
CONVERT = ROOT / "docs" / "convert.md"
CHOICE = ROOT / "docs" / "which_recipe.md"
MEMORY = ROOT / "docs" / "memory.md"
TRAINING = ROOT / "docs" / "training.md"
RESULTS = ROOT / "benchmarks" / "results"


def layers(rows: list[dict[str, Any]]) -> list[str]:
    """GPU, host and plain-loop times, product rate and peak memory per layer."""
    lines = [
        "| case | recipe | GPU ms | host ms | wall ms | TFLOP/s | peak MiB |",
        "|" + " --- |" * 7,
    ]
    for row in rows:
        family, recipe, shape = row["case"].split("/")
        times = (f"{row['gpu_ms']:.3f}", f"{row['cpu_ms']:.2f}", f"{row['eager_ms']:.2f}")
        rest = (row.get("rate", ""), row.get("peak_mib", ""))
        lines.append(
            "| " + " | ".join(map(str, (f"{family} {shape}", recipe, *times, *rest))) + " |"
        )
    return lines


def kernels(rows: list[dict[str, Any]]) -> list[str]:
    """GPU time and bandwidth per kernel."""
    lines = ["| case | GPU ms | GB/s |", "|" + " --- |" * 3]
    return lines + [f"| {row['case']} | {row['gpu_ms']:.4f} | {row['rate']} |" for row in rows]


def decode(rows: list[dict[str, Any]]) -> list[str]:
    """Microseconds per decoding step and fraction of the copy rate, one column per implementation."""
    names = list(dict.fromkeys(row["by"] for row in rows))
    lines = ["| batch, context | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = {row["by"]: row for row in rows if row["case"] == case}
        texts = [
            f"{cells[name]['gpu_us']:.0f} us, {cells[name]['percent_of_copy']:.0f} %"
            if "gpu_us" in cells.get(name, {})
            else ""
            for name in names
        ]
        batch, context = case.removeprefix("b").split("_s")
        lines.append(f"| {batch} x {context} | " + " | ".join(texts) + " |")
    return lines


TABLES = {"layers": layers, "kernels": kernels, "attention": layers, "decode": decode}
FILES = {"attention": "attention_te_bench_h200.json"}


def sections() -> dict[str, str]:
    """Return {name: table} for the page."""
    records = {
        name: json.loads((RESULTS / FILES.get(name, f"{name}_h200.json")).read_text())
        for name in TABLES
    }
    return {
        name: "\n".join(table(records[name].get("results") or records[name]["cases"])) + "\n"
        for name, table in TABLES.items()
    }


SIZES = {
    "57M": "57M parameters, 32 x 512 tokens",
    "1B": "1.1B, 4 x 4096",
    "8Bx4": "4 layers of 8B, 2 x 4096",
}
ARMS = {
    "te:delayed": "this engine, `DelayedScaling`",
    "te:current": "this engine, `Float8CurrentScaling`",
    "te:block": "this engine, `Float8BlockScaling`",
    "te:bf16": "this engine, bfloat16",
    "pt:tensorwise": "torchao, tensorwise",
    "pt:rowwise": "torchao, rowwise",
    "pt:bf16": "plain PyTorch, compiled, bfloat16",
    "liger:bf16": "Liger kernels, bfloat16",
}
SHARDED_ARMS = {
    "te:current": "this engine, `Float8CurrentScaling`, bfloat16 weights gathered",
    "te:current+codes": "this engine, FP8 parameters gathered, float32 master weights",
    "pt:tensorwise": "torchao, tensorwise, bfloat16 weights gathered",
    "pt:tensorwise+codes": "torchao, FP8 all-gather without precomputed scales",
    "pt:bf16": "plain PyTorch, compiled, bfloat16",
}


def models() -> str:
    """Tokens per second and peak memory per arm and model size."""
    record = json.loads((RESULTS / "models_h200.json").read_text())
    rows = {(row["arm"], row["size"]): row for row in record["medians"]}
    return _size_table(
        rows,
        ARMS,
        SIZES,
        lambda row: f"{row['tokens_per_second'] / 1e3:,.0f}k tokens/s, {row['peak_gib']:.1f} GiB",
    )


def _size_table(
    rows: dict[tuple[str, str], dict[str, Any]],
    arms: dict[str, str],
    sizes: dict[str, str],
    cell: Callable[[dict[str, Any]], str],
) -> str:
    """Table with one row per arm and one column per model size; both map names in the record to titles."""
    lines = ["| | " + " | ".join(sizes.values()) + " |", "| --- |" + " ---: |" * len(sizes)]
    for arm, title in arms.items():
        lines.append(f"| {title} | " + " | ".join(cell(rows[arm, size]) for size in sizes) + " |")
    return "\n".join(lines) + "\n"


OPTIONS = {
    "columns": "columns of weights and norms cast in the backward pass",
    "cached": "the same, and inputs of activations saved in FP8",
    "loss": "`fused_linear_cross_entropy`",
    "head": "head in FP8",
}


def model_options() -> str:
    """Tokens per second and peak memory for options that are off by default."""
    record = json.loads((RESULTS / "models_h200.json").read_text())
    rows = {(row["arm"], row["size"]): row for row in (*record["medians"], *record["options"])}
    sizes = {name: SIZES[name] for name in ("1B", "8Bx4")}
    arms = {
        "te:current": "default",
        **{f"te:current+{name}": title for name, title in OPTIONS.items()},
    }
    return _size_table(
        rows,
        arms,
        sizes,
        lambda row: f"{row['tokens_per_second']:,.0f} tokens/s, {row['peak_gib']:.2f} GiB",
    )


def sharded() -> str:
    """Tokens per second, memory and all-gathers per arm for the 8B model on four GPUs."""
    record = json.loads((RESULTS / "four_gpus_h200.json").read_text())
    rows = {row["arm"]: row for row in record["sharded models"]["results"]}
    lines = [
        "| | tokens/s of four GPUs | peak GiB per GPU | GB gathered per step |",
        "| --- | ---: | ---: | ---: |",
    ]
    for arm, title in SHARDED_ARMS.items():
        row = rows[arm]
        cells = (
            f"{row['tokens_per_second']:,.0f}",
            f"{row['peak_gib']:.1f}",
            f"{row['gathered_mb'] / 1e3:.1f}",
        )
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


CONVERTED = {
    "llama-1b": "Llama, 8 layers of 2048, 2 x 4096 tokens",
    "vit-l": "ViT, 12 layers of 1024, 64 x 256 patches",
    "dit-xl": "DiT, 14 layers of 1152, 64 x 256 patches",
    "gpt-57m": "GPT, 8 layers of 768, 32 x 512 tokens",
}
CONVERSION_ARMS = {
    "eager": "PyTorch",
    "te": "converted",
    "bf16": "PyTorch, compiled",
    "torchao": "torchao, compiled",
    "te+compile": "converted, compiled",
}


def conversions() -> str:
    """Milliseconds per step and peak GiB per arm in benchmarks/convert.py."""
    results = json.loads((RESULTS / "convert_h200.json").read_text())["results"]
    lines = [
        "| | " + " | ".join(CONVERSION_ARMS.values()) + " |",
        "| --- |" + " ---: |" * len(CONVERSION_ARMS),
    ]
    for size, title in CONVERTED.items():
        rows = [results[size].get(arm) for arm in CONVERSION_ARMS]
        cells = [
            f"{row['step_ms']:.1f} ms, {row['peak_gib']:.1f}" if row else "not measured"
            for row in rows
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


TRAINED = {
    "bfloat16": "bfloat16",
    "delayed": "`DelayedScaling(amax_history_len=16)`",
    "current": "`Float8CurrentScaling`",
    "block": "`Float8BlockScaling`",
    "current+attention": "current, `fp8_dpa=True`: FP8 attention",
    "current+columns": "current, columns of weights and norms cast in the backward pass",
    "current+cached": "current, columns recomputed, inputs of activations saved in FP8",
    "current+loss": "current, `fused_linear_cross_entropy`",
    "current+head": "current, head in FP8",
    "mxfp8": "`MXFP8BlockScaling`, emulated",
    "nvfp4": "`NVFP4BlockScaling`, emulated",
    "nvfp4-nearest": "NVFP4, `disable_rht` and `disable_stochastic_rounding`",
    "nvfp4-4over6": 'the same, and `nvfp4_4over6="all"`',
    "nvfp4-row-scaled": "the same, and `row_scaled_activation` instead",
}


def trainings() -> str:
    """Loss and next-byte accuracy per recipe relative to bfloat16, with their standard errors."""
    rows = json.loads((RESULTS / "recipe_table_h200.json").read_text())["rows"]
    lines = [
        "| model, million bytes | | seeds | loss, nats per byte | next bytes predicted, % |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    order = list(TRAINED)
    rows = [row for row in rows if row["arm"] in order]
    for row in sorted(rows, key=lambda row: (-row["tokens"], order.index(row["arm"]))):
        loss, share = f"{row['loss']:.4f}", f"{100 * row['accuracy']:.2f}"
        if row["arm"] != order[0]:
            loss, share = (_gap(row, *cell) for cell in (("loss", 1, 4), ("accuracy", 100, 2)))
        size = f"{row['size'].removesuffix('-short')}, {row['tokens'] / 1e6:.0f}"
        lines.append(f"| {size} | {TRAINED[row['arm']]} | {row['seeds']} | {loss} | {share} |")
    return "\n".join(lines) + "\n"


STATES = {
    "adam": "float32 masters and moments, `FusedAdam`",
    "adam-block": "float32 masters, block-scaled moments, rounded stochastically",
    "adam-block-nearest": "float32 masters, block-scaled moments, rounded to nearest",
    "adam-tensor": "float32 masters, FP8 moments with one scale per tensor",
    "adam-rounded": "bfloat16 parameters, rounded stochastically; float32 moments",
    "adam-nearest": "bfloat16 parameters, rounded to nearest; float32 moments",
    "adam-block-rounded": "bfloat16 parameters and block-scaled moments, rounded stochastically",
}


def optimizer_states() -> str:
    """Loss per kind of optimizer states relative to torch's AdamW in float32; "" unless measured."""
    rows = json.loads((RESULTS / "recipe_table_h200.json").read_text())["rows"]
    by_arm = {row["arm"]: row for row in rows if row["size"] == "57M-short"}
    if not set(STATES) & set(by_arm):
        return ""
    baseline = by_arm["bfloat16"]
    lines = [
        "The 57M model of [Which recipe](which_recipe.md#measured-losses), in bfloat16 with 2,000 steps on an H200:",
        "the loss, and paired differences from it with their standard error (`benchmarks/recipe_table.py`).",
        "",
        "| parameters and moments | seeds | loss, nats per byte |",
        "| --- | ---: | ---: |",
        f"| float32 masters and moments, `torch.optim.AdamW` | {baseline['seeds']} | {baseline['loss']:.4f} |",
    ]
    for arm, title in STATES.items():
        if arm in by_arm:
            gap = _gap(by_arm[arm], "loss", 1, 4)
            lines.append(f"| {title} | {by_arm[arm]['seeds']} | {gap} |")
    return "\n".join(lines) + "\n"


FINETUNED = {
    "te:stochastic": "`finetune_8b.py`",
    "te:remainders": "`--optimizer remainders`",
    "te:float32": "`--optimizer float32`",
    "te:quantized": "`--quantized`",
    "te:delayed": "`--recipe delayed`",
    "te:block": "`--recipe block`",
    "ao:AdamWFp8": "torchao: float8 training, `AdamWFp8`, compiled layers",
    "ao:AdamW8bit": "torchao: float8 training, `AdamW8bit`, compiled layers",
}


def finetuning() -> str:
    """Rate, measured and planned peak per arm in benchmarks/finetune.py."""
    rows = json.loads((RESULTS / "finetune_h200.json").read_text())["rows"]
    lines = ["| | tokens/s | ms | peak GiB | planned GiB |", "| --- |" + " ---: |" * 4]
    for row in rows:
        if "error" in row:
            continue
        planned = row.get("planned_gib")
        cells = [
            f"{row['tokens_per_second']:,.0f}",
            f"{row['step_ms']:.0f}",
            f"{row['peak_gib']:.1f}",
            "-" if planned is None else f"{planned:.1f}",
        ]
        lines.append(f"| {FINETUNED[row['arm']]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _gap(row: dict[str, Any], figure: str, scale: int, digits: int) -> str:
    text = f"{scale * row[f'{figure}_gap']:+.{digits}f}"
    error = row[f"{figure}_error"]
    return text if error is None else f"{text} ± {scale * error:.{digits}f}"


# Layer cases, and the run in their picture.
HIGHLIGHTS = {
    "layer_fb/delayed/llama8b_s8192": "a layer of an 8-billion-parameter model",
    "layernorm_mlp_fb/delayed/swiglu_4096x14336": "a SwiGLU feed-forward block",
    "linear_fb/delayed/8192x4096x28672": "a linear layer",
}
RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
}


def _times(record: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(row["case"], row["provider"]): row["gpu_ms"] for row in record["results"]}


def comparison() -> str:
    """Table with the highlighted cases: plain PyTorch in bfloat16, and each FP8 recipe with its ratio to PyTorch."""
    record = json.loads((RESULTS / "bench_h200.json").read_text())
    times = _times(record)
    names = [f"`{name}`" for name in RECIPES.values()]
    lines = [
        "| | plain PyTorch, bfloat16 | " + " | ".join(names) + " |",
        "| --- |" + " ---: |" * (len(names) + 1),
    ]
    for case, title in HIGHLIGHTS.items():
        plain = times[case.replace("/delayed/", "/bf16/"), "torch"]
        cells = [f"{plain:.1f} ms"]
        for recipe in RECIPES:
            fast = times[case.replace("/delayed/", f"/{recipe}/"), "te"]
            cells.append(f"{fast:.1f} ms, {plain / fast:.2f}x")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def headline() -> str:
    """The two larger models' rates relative to compiled PyTorch and to torchao."""
    record = json.loads((RESULTS / "models_h200.json").read_text())
    rates = {(row["arm"], row["size"]): row["tokens_per_second"] for row in record["medians"]}
    plain, torchao = (
        [f"{rates['te:delayed', size] / rates[arm, size]:.2f}" for size in ("1B", "8Bx4")]
        for arm in ("pt:bf16", "pt:tensorwise")
    )
    return "\n".join(
        [
            f"On one H200, a 1.1B model and four layers of an 8B model train {plain[0]} and {plain[1]} times as fast",
            "under `DelayedScaling` as in PyTorch with compiled layers in bfloat16, and",
            f"{torchao[0]} and {torchao[1]} times as fast as with torchao's tensorwise FP8:",
            "",
        ]
    )


def highlights() -> str:
    """Rate of whole models under `DelayedScaling` relative to compiled PyTorch in bfloat16, with the machine."""
    record = json.loads((RESULTS / "models_h200.json").read_text())
    rows = {(row["arm"], row["size"]): row for row in record["medians"]}
    lines = ['<ul class="numbers">']
    for size, title in SIZES.items():
        fast, plain = rows["te:delayed", size], rows["pt:bf16", size]
        ratio = fast["tokens_per_second"] / plain["tokens_per_second"]
        figures = [f"{row['tokens_per_second'] / 1e3:,.0f}k" for row in (fast, plain)]
        lines.append(
            f"<li><strong>{ratio:.2f} times</strong> the tokens per second: {title}; {figures[0]} tokens/s in FP8, "
            f"{figures[1]} in compiled PyTorch, bfloat16</li>"
        )
    torch = record["versions"]["torch"].split("+")[0]
    return "\n".join(
        [
            *lines,
            "</ul>",
            "",
            "Each number compares training steps of a Llama-like model under `DelayedScaling` with PyTorch's compiled",
            f"layers and cuDNN's attention on one {record['machine'].split(',')[0]} (torch {torch}).",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(
        write(
            __file__,
            {
                PAGE: {
                    **sections(),
                    "headline": headline(),
                    "comparison": comparison(),
                    "models": models(),
                    "options": model_options(),
                    "sharded": sharded(),
                },
                HOME: {"numbers": highlights()},
                README: {"models": models()},
                CONVERT: {"convert": conversions()},
                CHOICE: {"trainings": trainings()},
                TRAINING: {"states": optimizer_states()},
                MEMORY: {"finetune": finetuning()},
            },
        )
    )
