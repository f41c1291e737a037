"""The benchmark cases as data: name, sizes and recipe, and the minimal operations and bytes.

Longer than 400 lines, because the families of one report are in one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformer_engine.pytorch.quantization import all_families

from .kernel_cases import KERNELS

# Module recipes; the first one means no recipe: parameters and arithmetic in bfloat16.
RECIPES = ("bf16", *(family.name for family in all_families() if family.samples))
# A recipe may quantize to more than one format.
QUANTIZATIONS = {
    sample.name: (family.name, sample) for family in all_families() for sample in family.samples
}
BYTES = 2  # per bfloat16 element
Families = Callable[[tuple[str, ...], bool], "Iterator[Case]"]


@dataclass(frozen=True)
class Case:
    """One report row.

    Attributes:
        name: Family and passes ("f": forward, "fb": forward and backward), recipe, sizes: the comparison key.
        recipe: One of RECIPES, or of QUANTIZATIONS in the family quantize.
        arguments: Arguments for a provider's family builder.
        backward: Run the backward pass too.
        operations: Floating-point operations in the matrix products; 0 if bytes limit the speed.
        moved: Bytes that must be read and written once; 0 if operations limit the speed.
    """

    name: str
    family: str
    recipe: str
    arguments: dict[str, Any]
    backward: bool = True
    operations: float = 0.0
    moved: float = 0.0


def cases(recipes: Iterable[str], quick: bool, families: Iterable[str] = ()) -> list[Case]:
    """List every case in the families (by default all) under the recipes; quick: small sizes, suitable for a CPU."""
    selected = tuple(families) or tuple(FAMILIES)
    unknown = [name for name in selected if name not in FAMILIES]
    if unknown:
        raise ValueError(f"family {unknown[0]!r} does not exist; choose from {', '.join(FAMILIES)}")
    recipe_names = tuple(recipes)
    return [case for name in selected for case in FAMILIES[name](recipe_names, quick)]


def _quantize(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    rows, depth = (256, 512) if quick else (8192, 14336)
    for kind, (recipe, sample) in QUANTIZATIONS.items():
        if recipe not in recipes:
            continue
        width = 1 / sample.format.packing  # bytes per code
        for both in (False, True):
            yield Case(
                f"quantize/{kind}_{'both' if both else 'row'}/{rows}x{depth}",
                "quantize",
                kind,
                {"rows": rows, "depth": depth, "both": both},
                backward=False,
                moved=rows * depth * (BYTES + width * (1 + both)),
            )


def _norm(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    rows, widths = (256, (512,)) if quick else (16384, (4096, 8192))
    for kind in ("LayerNorm", "RMSNorm") if "bf16" in recipes else ():
        for width in widths:
            for backward in (False, True):
                yield Case(
                    f"norm_{'fb' if backward else 'f'}/{kind}/{rows}x{width}",
                    "norm",
                    "bf16",
                    {"kind": kind, "rows": rows, "width": width},
                    backward,
                    moved=rows * width * BYTES * (5 if backward else 2),
                )


def _linear(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    large = ((8192, 4096, 4096, False), (8192, 4096, 28672, False), (8192, 14336, 4096, False))
    small = ((256, 256, 512, False),)
    with_bias = (256, 256, 512, True) if quick else (8192, 4096, 14336, True)
    for recipe in recipes:
        for rows, depth, width, bias in (*(small if quick else large), with_bias):
            kind = "linear_bias_f" if bias else "linear_fb"
            yield _products(kind, "linear", recipe, (rows, depth, width), bias)


def _dense(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Square products: below some size, quantization costs more than it saves."""
    for recipe in recipes:
        for side in (128,) if quick else (8192, 4096, 2048):
            yield _products("dense_fb", "dense", recipe, (side, side, side), False)


def _products(kind: str, family: str, recipe: str, sizes: tuple[int, int, int], bias: bool) -> Case:
    """Build a linear layer, rows x depth times depth x width; with a bias only the forward pass."""
    return Case(
        f"{kind}/{recipe}/{'x'.join(map(str, sizes))}",
        family,
        recipe,
        {**dict(zip(("rows", "depth", "width"), sizes, strict=True)), "bias": bias},
        not bias,
        operations=_product(*sizes, not bias),
    )


def _layernorm_linear(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    rows, depth, width = (256, 256, 384) if quick else (8192, 4096, 6144)
    for recipe in recipes:
        yield Case(
            f"layernorm_linear_fb/{recipe}/rms_{depth}x{width}",
            "layernorm_linear",
            recipe,
            {"rows": rows, "depth": depth, "width": width},
            operations=_product(rows, depth, width, True),
        )


def _layernorm_mlp(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    rows, hidden, inner = (256, 256, 512) if quick else (8192, 4096, 14336)
    for recipe in recipes:
        for activation in ("swiglu", "gelu"):
            products = 3 if activation == "swiglu" else 2
            yield Case(
                f"layernorm_mlp_fb/{recipe}/{activation}_{hidden}x{inner}",
                "layernorm_mlp",
                recipe,
                {"rows": rows, "hidden": hidden, "inner": inner, "activation": activation},
                operations=products * _product(rows, hidden, inner, True),
            )


def _grouped_linear(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    large = ((8, 16384, 2048, 4096), (64, 32768, 2048, 1408))
    for recipe in recipes:
        for groups, rows, depth, width in ((4, 512, 256, 128),) if quick else large:
            yield Case(
                f"grouped_linear_fb/{recipe}/e{groups}_t{rows}_{depth}x{width}",
                "grouped_linear",
                recipe,
                {"groups": groups, "rows": rows, "depth": depth, "width": width},
                operations=_product(rows, depth, width, True),
            )


def _ops(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Yield an MLP and a grouped expert MLP, as a Sequential of operations and as modules."""
    rows, hidden, inner = (256, 256, 512) if quick else (8192, 4096, 14336)
    groups, expert = (4, 128) if quick else (8, 1408)
    kinds = (
        (f"mlp_{hidden}x{inner}", None, inner, 2),
        (f"grouped_mlp_e{groups}_{hidden}x{expert}", groups, expert, 3),
    )
    for recipe in recipes:
        for made_of in ("sequential", "modules"):
            for kind, experts, width, products in kinds:
                sizes = {
                    "rows": rows,
                    "hidden": hidden,
                    "inner": width,
                    "groups": experts,
                    "made_of": made_of,
                }
                work = products * _product(rows, hidden, width, True)
                yield Case(
                    f"ops_fb/{recipe}/{kind}_{made_of}", "ops", recipe, sizes, operations=work
                )


# (kind, batch, sequence, heads, key-value heads, head size, with a forward-only case too)
ATTENTIONS = (
    ("causal", 2, 8192, 32, 8, 128, True),
    ("causal", 4, 4096, 32, 32, 128, False),
    ("causal", 8, 2048, 16, 16, 64, False),
    ("causal", 2, 4096, 16, 16, 256, True),
    ("window4096", 1, 32768, 32, 8, 128, False),
    ("thd", 8, 2048, 32, 8, 128, True),
)
# Under a recipe q, k and v are rounded to FP8; the backward pass is in 16 bits, or in FP8 where its name says so.
FP8_ATTENTIONS = (ATTENTIONS[0], ("causal", 4, 4096, 32, 32, 128, True))


def _attention(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    small = (("causal", 2, 128, 4, 2, 64, True),)
    for recipe in recipes:
        if recipe not in ("bf16", "delayed", "current"):
            continue  # the attention kernels do not support block scales
        table = ATTENTIONS if recipe == "bf16" else FP8_ATTENTIONS
        for kind, batch, sequence, heads, groups, size, forward_too in small if quick else table:
            passes = [("f", False)] if forward_too else []
            passes += [("fb", False), ("fb", True)] if recipe == "delayed" else [("fb", False)]
            window = int(kind.removeprefix("window")) if kind.startswith("window") else None
            pairs = (
                sequence * sequence / 2
                if window is None
                else sequence * window - window * window / 2
            )
            for name, in_fp8 in passes:
                yield Case(
                    f"dpa_{name}/{recipe}/{kind}_b{batch}_s{sequence}_h{heads}_{groups}_d{size}"
                    + "_fp8backward" * in_fp8,
                    "attention",
                    recipe,
                    {
                        "batch": batch,
                        "sequence": sequence,
                        "heads": heads,
                        "groups": groups,
                        "size": size,
                        "window": window,
                        "packed": kind == "thd",
                        "fp8_backward": in_fp8,
                    },
                    name == "fb",
                    operations=4 * batch * heads * pairs * size * (3.5 if name == "fb" else 1),
                )


def _layer(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    sizes = {"hidden": 4096, "inner": 14336, "heads": 32, "groups": 8, "sequence": 8192}
    label = "llama8b_s8192"
    if quick:
        sizes, label = (
            {"hidden": 256, "inner": 512, "heads": 4, "groups": 2, "sequence": 128},
            "h256_s128",
        )
    kv_width = sizes["groups"] * sizes["hidden"] // sizes["heads"]
    weights = sizes["hidden"] * (2 * sizes["hidden"] + 2 * kv_width + 3 * sizes["inner"])
    attention = 2 * sizes["sequence"] ** 2 * sizes["hidden"]
    for recipe in recipes:
        for backward in (True, False):
            products = (6 if backward else 2) * sizes["sequence"] * weights
            yield Case(
                f"layer_{'fb' if backward else 'f'}/{recipe}/{label}",
                "layer",
                recipe,
                {**sizes, "rotary": True},
                backward,
                operations=products + (3.5 if backward else 1) * attention,
            )


def _layer_small(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Yield a layer whose wall time is its host time."""
    sizes = {"hidden": 1024, "inner": 4096, "heads": 16, "groups": 16, "sequence": 128}
    if quick:
        sizes = {"hidden": 128, "inner": 256, "heads": 2, "groups": 2, "sequence": 32}
    for recipe in recipes:
        name = f"layer_small_fb/{recipe}/h{sizes['hidden']}_s{sizes['sequence']}"
        yield Case(name, "layer_small", recipe, {**sizes, "rotary": False})


def _layer_variant(
    family: str, of: Families, work: float, recipes: tuple[str, ...], quick: bool
) -> Iterator[Case]:
    """Yield a layer's training passes in another execution mode, with `work` times its operations.

    * layer_graphed: a small layer as a CUDA graph, which shows the remaining host time.
    * layer_recomputed: under te.checkpoint, which saves only the input and repeats the forward pass.
    * layer_observed: in a step that te.observe reads, including reading the report.
    """
    for case in of(recipes, quick):
        if case.backward:
            name = case.name.replace(f"{case.family}_fb", f"{family}_fb")
            yield replace(case, name=name, family=family, operations=case.operations * work)


def _offload(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Linear layers whose saved inputs are mostly offloaded to the host."""
    sizes = {"rows": 8192, "width": 8192, "layers": 8, "offloaded": 6}
    if quick:
        sizes = {"rows": 64, "width": 128, "layers": 4, "offloaded": 2}
    for recipe in recipes:
        yield Case(
            f"offload_fb/{recipe}/{sizes['layers']}x{sizes['rows']}x{sizes['width']}",
            "offload",
            recipe,
            sizes,
            operations=sizes["layers"]
            * _product(sizes["rows"], sizes["width"], sizes["width"], True),
        )


def _rope(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    sequence, batch, heads, size = (128, 1, 4, 64) if quick else (8192, 2, 32, 128)
    if "bf16" in recipes:
        yield Case(
            f"rope_fb/bf16/s{sequence}_b{batch}_h{heads}_d{size}",
            "rope",
            "bf16",
            {"sequence": sequence, "batch": batch, "heads": heads, "size": size},
            moved=4 * sequence * batch * heads * size * BYTES,
        )


def _permute(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Yield permutations to experts and, with constant weights, back; each pass moves tokens and rows once."""
    tokens, hidden, experts, places = (256, 128, 8, 2) if quick else (16384, 4096, 64, 8)
    sizes = {"tokens": tokens, "hidden": hidden, "experts": experts, "places": places}
    name = f"permute_fb/bf16/t{tokens}_h{hidden}_e{experts}_k{places}"
    if "bf16" in recipes:
        yield Case(name, "permute", "bf16", sizes, moved=4 * tokens * (1 + places) * hidden * BYTES)


def _padding(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Yield row padding for a recipe and its inverse; both passes read and write every row twice."""
    groups, rows, width = (4, 300, 128) if quick else (64, 65601, 4096)
    if "bf16" in recipes:
        name = f"padding_fb/bf16/{groups}x{rows}x{width}"
        sizes = {"groups": groups, "rows": rows, "width": width}
        yield Case(name, "padding", "bf16", sizes, moved=8 * rows * width * BYTES)


def _router(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Yield routers: float32 logits, weights, scores and two gradients; the map is written and read."""
    tokens, experts, places = (256, 16, 2) if quick else (16384, 256, 8)
    for score in ("softmax", "sigmoid") if "bf16" in recipes else ():
        sizes = {"tokens": tokens, "experts": experts, "places": places, "score": score}
        name = f"router_fb/{score}/t{tokens}_e{experts}_k{places}"
        yield Case(name, "router", "bf16", sizes, moved=tokens * experts * (4 * 6 + 2))


def _cross_entropy(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Logits are read for the loss, and read and written for the gradient."""
    rows, ids = (64, 1000) if quick else (8192, 128256)
    if "bf16" in recipes:
        arguments = {"rows": rows, "ids": ids}
        name = f"cross_entropy_fb/bf16/{rows}x{ids}"
        yield Case(name, "cross_entropy", "bf16", arguments, moved=3 * rows * ids * BYTES)


def _linear_cross_entropy(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    rows, depth, ids = (64, 128, 1000) if quick else (8192, 4096, 128256)
    if "bf16" in recipes:
        yield Case(
            f"linear_cross_entropy_fb/bf16/{rows}x{depth}x{ids}",
            "linear_cross_entropy",
            "bf16",
            {"rows": rows, "depth": depth, "ids": ids},
            operations=_product(rows, depth, ids, True),
        )


def _adam(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Yield Adam steps: float32 gradients are read, parameters and two moments read and written."""
    sizes = ((4, 1 << 12),) if quick else ((60, 1 << 24), (1000, 1 << 10))
    for count, size in sizes if "bf16" in recipes else ():
        yield Case(
            f"adam_step/bf16/{count}x{size}_fp32",
            "adam",
            "bf16",
            {"count": count, "size": size},
            backward=False,
            moved=7 * 4 * count * size,
        )
    # bfloat16 gradients are read, float32 masters and moments read and written, codes in both directions written.
    count, width = (2, 128) if quick else (15, 8192)
    for recipe in recipes:
        if recipe != "bf16":
            yield Case(
                f"adam_step/{recipe}/{count}x{width}x{width}_codes",
                "adam",
                recipe,
                {"count": count, "width": width},
                backward=False,
                moved=(2 + 3 * 8 + 2) * count * width * width,
            )


def _sgd(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Yield SGD steps: float32 gradients are read, parameters and momentum read and written."""
    count, size = (4, 1 << 12) if quick else (60, 1 << 24)
    if "bf16" in recipes:
        name = f"sgd_step/bf16/{count}x{size}_fp32"
        sizes = {"count": count, "size": size}
        yield Case(name, "sgd", "bf16", sizes, backward=False, moved=5 * 4 * count * size)


def _kernel(recipes: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Yield one kernel from each family in common/kernels, which torch and JAX start from the same record."""
    rows, width = (128, 256) if quick else (8192, 8192)
    for name, moved_bytes in KERNELS.items() if "bf16" in recipes else ():
        sizes = {"kernel": name, "rows": rows, "width": width}
        title = f"kernel/{name}/{rows}x{width}"
        yield Case(title, "kernel", "bf16", sizes, backward=False, moved=moved_bytes * rows * width)


def _product(rows: int, depth: int, width: int, backward: bool) -> float:
    return (6.0 if backward else 2.0) * rows * depth * width


FAMILIES: dict[str, Families] = {
    "quantize": _quantize,
    "norm": _norm,
    "linear": _linear,
    "dense": _dense,
    "layernorm_linear": _layernorm_linear,
    "layernorm_mlp": _layernorm_mlp,
    "grouped_linear": _grouped_linear,
    "ops": _ops,
    "attention": _attention,
    "layer": _layer,
    "layer_small": _layer_small,
    "layer_graphed": partial(_layer_variant, "layer_graphed", _layer_small, 1.0),
    "layer_recomputed": partial(_layer_variant, "layer_recomputed", _layer, 4 / 3),
    "layer_observed": partial(_layer_variant, "layer_observed", _layer, 1.0),
    "offload": _offload,
    "rope": _rope,
    "permute": _permute,
    "padding": _padding,
    "router": _router,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "adam": _adam,
    "sgd": _sgd,
    "kernel": _kernel,
}
