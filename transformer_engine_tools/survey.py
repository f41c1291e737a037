"""Recipes and backends on this machine, from a training step of a small layer under every recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine import pytorch as te
from transformer_engine.common.dispatch import Verdict, observing, tables
from transformer_engine.common.explanation import chosen_name
from transformer_engine.pytorch.primitives.gemm import DEQUANTIZING
from transformer_engine.pytorch.quantization import all_families, format_support

from .demo.config import RECIPES, make_recipe

KINDS = {family.name: family.kind for family in all_families() if family.kind is not None}


@dataclass(frozen=True)
class RecipeReport:
    """Status of a recipe, the product backends that it uses, and the reason why it is not native.

    Attributes:
        recipe: Recipe name.
        status: "native", "emulated", or "on request": emulated once TE_EMULATE=1 or te.emulate() requests it.
        products: Backends of its products.
        reason: Reason why it is not native, or None.
    """

    recipe: str
    status: str
    products: tuple[str, ...]
    reason: str | None


@dataclass(frozen=True)
class OperationUse:
    """A request to an operation, the recipes that make it, and the verdict on every backend.

    Attributes:
        operation: Name of the operation.
        recipes: Recipes whose layers make the request.
        verdicts: One verdict per backend, in order of preference.
    """

    operation: str
    recipes: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> str | None:
        return chosen_name(self.verdicts)


@dataclass(frozen=True)
class Survey:
    """The recipes, the operations that a TransformerLayer uses, and the operations that it does not use.

    Attributes:
        recipes: One report per recipe.
        findings: Operations that a TransformerLayer uses.
        unused: Names of the other operations.
    """

    recipes: tuple[RecipeReport, ...]
    findings: tuple[OperationUse, ...]
    unused: tuple[str, ...]


def _unique_requests(recipe: str, device: str) -> list[tuple[str, Any]]:
    """Operations and requests of one training step, each pair once, in the order of first use."""
    unique: dict[tuple[str, Any], None] = {}
    with (
        te.emulate(),
        observing(lambda operation, request: unique.setdefault((operation, request))),
    ):
        _training_step(recipe, device)
    return list(unique)


def survey(device: str) -> Survey:
    """Run one training step with a small TransformerLayer under every recipe and collect the requests."""
    reports: list[RecipeReport] = []
    recipes_by_answer: dict[tuple[str, tuple[Verdict, ...]], list[str]] = {}
    for name in RECIPES:
        requests = _unique_requests(name, device)
        answers = [
            (operation, tuple(tables[operation].explain(request)))
            for operation, request in requests
        ]
        for answer in dict.fromkeys(answers):
            recipes_by_answer.setdefault(answer, []).append(name)
        reports.append(_report(name, requests))
    findings = [
        OperationUse(operation, tuple(names), answers)
        for (operation, answers), names in recipes_by_answer.items()
    ]
    findings.sort(key=lambda finding: finding.operation)
    used = {finding.operation for finding in findings}
    return Survey(tuple(reports), tuple(findings), tuple(sorted(set(tables) - used)))


def _training_step(name: str, device: str) -> None:
    recipe = make_recipe(name)
    layer = te.TransformerLayer(
        128,
        256,
        2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        activation="swiglu",
        normalization="RMSNorm",
        device=device,
        attn_input_format="bshd",
    )
    x = torch.randn(1, 128, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    positions = te.attention.RotaryPositionEmbedding(64)(128).to(device)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(x, rotary_pos_emb=positions)
    out.float().sum().backward()


def _report(name: str, requests: list[tuple[str, Any]]) -> RecipeReport:
    products = [request for operation, request in requests if operation == "gemm"]
    if name == "none":
        return RecipeReport(name, "native", _backends(products), None)
    backends = _backends([request for request in products if request.a_format is not None])
    support = format_support(KINDS[name])
    if not support.native:
        return RecipeReport(
            name, "emulated" if support.emulated else "on request", backends, support.reason
        )
    emulated = [backend for backend in backends if backend in DEQUANTIZING]
    if emulated:
        reason = f"the hardware has the format, the backend {emulated[0]} does not use it"
        return RecipeReport(name, "emulated", backends, reason)
    return RecipeReport(name, "native", backends, None)


def _backends(products: list[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tables["gemm"].chosen(request) for request in products))
