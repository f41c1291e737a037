"""Cases of `te bench --distributed` as data: collectives, and layers whose work several ranks share.

Every layer case is measured three times in one run: on one device, on the ranks, and on the ranks with a process group
that communicates nothing. The ratio of the first two is the speedup, the difference between the last two is the
communication that the computation does not hide.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
SCHEMES = ("p2p", "a2a", "all_gather")  # for context parallelism
LEVELS = "a2a+p2p"  # from four ranks on
LLAMA_8B = {"hidden": 4096, "inner": 14336, "heads": 32, "groups": 8, "sequence": 8192}
SMALL = {"hidden": 128, "inner": 256, "heads": 4, "groups": 4, "sequence": 64}


@dataclass(frozen=True)
class RanksCase:
    """One report row.

    Attributes:
        name: Family, recipe, sizes and number of ranks: the comparison key.
        recipe: One of RECIPES in `cases`.
        arguments: Arguments for the family's builder.
        work: All ranks' work together relative to one device: the number of ranks if each has its own tokens.
        moved: Bytes that a rank sends in a collective; 0 for layers.
    """

    name: str
    family: str
    recipe: str
    arguments: dict[str, Any]
    work: int = 1
    moved: float = 0.0

    @property
    def one_device(self) -> Hashable:
        """Key of the step on one device, which cases with different schemes have in common."""
        sizes = {name: value for name, value in self.arguments.items() if name != "scheme"}
        return self.family, self.recipe, *sizes.items()


Families = Callable[[tuple[str, ...], bool, int], Iterator[RanksCase]]


def ranks_cases(
    recipes: Iterable[str], quick: bool, ranks: int, families: Iterable[str] = ()
) -> list[RanksCase]:
    """List every case in the families (by default all) for a number of ranks; quick: sizes for a CPU."""
    selected = tuple(families) or tuple(RANKS_FAMILIES)
    unknown = [name for name in selected if name not in RANKS_FAMILIES]
    if unknown:
        raise ValueError(
            f"family {unknown[0]!r} of --distributed does not exist; choose from {', '.join(RANKS_FAMILIES)}"
        )
    recipe_names = tuple(recipes)
    return [case for name in selected for case in RANKS_FAMILIES[name](recipe_names, quick, ranks)]


def _collective(recipes: tuple[str, ...], quick: bool, ranks: int) -> Iterator[RanksCase]:
    """Yield collectives on bfloat16 buffers; the size is the size of the buffer that holds all ranks' data."""
    shares = {
        "all_gather": (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_to_all": (ranks - 1) / ranks,
        "all_reduce": 2 * (ranks - 1) / ranks,
        "send_receive": 1.0,
    }
    sizes = (MIB // 4, MIB) if quick else (MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    for operation, share in shares.items() if "bf16" in recipes else ():
        for size in sizes:
            yield RanksCase(
                f"collective/bf16/{operation}_{size / MIB:g}MiB_ranks{ranks}",
                "collective",
                "bf16",
                {"operation": operation, "size": size},
                moved=share * size,
            )


def _attention(recipes: tuple[str, ...], quick: bool, ranks: int) -> Iterator[RanksCase]:
    """Yield causal attention over one sequence whose tokens the ranks share."""
    heads, groups, width = (4, 4, 32) if quick else (32, 8, 128)
    for recipe in recipes:
        if recipe not in ("bf16", "delayed", "current"):
            continue  # FP8 attention supports no block scales
        for sequence in (128,) if quick else (65536, 131072) if ranks < 4 else (131072, 262144):
            for scheme in _schemes(ranks):
                yield RanksCase(
                    f"attention_cp_fb/{recipe}/causal_s{sequence}_h{heads}_{groups}_d{width}_{scheme}_ranks{ranks}",
                    "attention_cp",
                    recipe,
                    {
                        "sequence": sequence,
                        "heads": heads,
                        "groups": groups,
                        "width": width,
                        "scheme": scheme,
                    },
                )


def _schemes(ranks: int) -> tuple[str, ...]:
    return (*SCHEMES, LEVELS) if ranks >= 4 and ranks % 2 == 0 else SCHEMES


def _layer(recipes: tuple[str, ...], quick: bool, ranks: int, family: str) -> Iterator[RanksCase]:
    """Yield a layer whose weights (tensor parallelism) or tokens (context parallelism) the ranks share."""
    sizes, label = (SMALL, "h128_s64") if quick else (LLAMA_8B, "llama8b_s8192")
    schemes = _schemes(ranks) if family == "layer_cp" else ("",)
    for recipe in recipes:
        for scheme in schemes:
            suffix = f"_{scheme}" if scheme else ""
            yield RanksCase(
                f"{family}_fb/{recipe}/{label}{suffix}_ranks{ranks}",
                family,
                recipe,
                {**sizes, "scheme": scheme},
            )


def _sharded(recipes: tuple[str, ...], quick: bool, ranks: int) -> Iterator[RanksCase]:
    """Yield layers with sharded parameters; each rank has its own tokens, so all ranks do more work than one device."""
    sizes, label = (SMALL, "h128_s64") if quick else (LLAMA_8B, "llama8b_s8192")
    layers = 2 if quick else 4
    for recipe in recipes:
        for quantized in (False, True) if recipe != "bf16" else (False,):
            suffix = "_quantized_parameters" if quantized else ""
            yield RanksCase(
                f"layers_fsdp_fb/{recipe}/{label}_x{layers}{suffix}_ranks{ranks}",
                "layers_fsdp",
                recipe,
                {**sizes, "layers": layers, "quantized": quantized},
                work=ranks,
            )


def _family_layer(family: str) -> Families:
    return lambda recipes, quick, ranks: _layer(recipes, quick, ranks, family)


RANKS_FAMILIES: dict[str, Families] = {
    "collective": _collective,
    "attention_cp": _attention,
    "layer_tp": _family_layer("layer_tp"),
    "layer_sp": _family_layer("layer_sp"),
    "layer_ub": _family_layer("layer_ub"),
    "layer_cp": _family_layer("layer_cp"),
    "layers_fsdp": _sharded,
}
