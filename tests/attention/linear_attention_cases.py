"""Random linear attention calls, and their recurrences in float64, one sequence and token at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

import transformer_engine.pytorch as te
from transformer_engine.pytorch.primitives.linear_attention import DeltaInputs

RULES = ("gdn", "gdn2", "gdp")
MODULES = {
    "gdn": te.GatedDeltaNetAttention,
    "gdn2": te.GatedDeltaNet2Attention,
    "gdp": te.GatedDeltaProductAttention,
}
# Relative error in the Frobenius norm: each result is rounded once, and sums are float32.
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-5, torch.float64: 1e-11}


@dataclass
class Case:
    """A call.

    Attributes:
        rule: A name in `RULES`.
        format: "sbhd", "bshd" or "thd".
        lengths: Tokens per sequence, all equal unless packed.
        padding: Tokens after the last packed sequence.
        options: Keyword arguments for forward that are not tensors.
    """

    rule: str
    format: str = "bshd"
    lengths: tuple[int, ...] = (12, 12)
    heads: int = 2
    sizes: tuple[int, int] = (16, 8)
    updates: int = 1
    dtype: torch.dtype = torch.float64
    gate_dtype: torch.dtype = torch.float64
    has_state: bool = True
    padding: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Extents along the leading axes."""
        if self.format == "thd":
            return (sum(self.lengths) + self.padding,)
        batch, length = len(self.lengths), self.lengths[0]
        return (batch, length) if self.format == "bshd" else (length, batch)

    def module(self) -> torch.nn.Module:
        extra = {"num_householder": self.updates} if self.rule == "gdp" else {}
        return MODULES[self.rule](self.heads, self.sizes, qkv_format=self.format, **extra)

    def tensors(self, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
        """Keyword arguments for forward that need gradients."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        (dk, dv), heads, tokens = self.sizes, (self.heads,), self.tokens
        sub = (self.updates,) if self.rule == "gdp" else ()
        channels = (dk,) if self.rule == "gdn2" else ()
        key = normal(*tokens, *sub, *heads, dk)
        logits = self.options.get("use_beta_sigmoid_in_kernel")
        beta, g = normal(*tokens, *sub, *heads, *channels), normal(*tokens, *heads, *channels)
        results = {
            "query_layer": normal(*tokens, *heads, dk),
            "key_layer": key
            if self.options.get("use_qk_l2norm_in_kernel")
            else key / key.norm(dim=-1, keepdim=True),
            "value_layer": normal(*tokens, *sub, *heads, dv),
            "g": g
            if self.options.get("safe_gate")
            else -torch.rand(g.shape, generator=generator, dtype=g.dtype),
            "beta": beta if logits else torch.sigmoid(beta),
        }
        if self.options.get("gate_domain") == "linear":
            results["g"] = torch.exp(results["g"])
        if self.rule == "gdn2":
            results["w"] = torch.sigmoid(normal(*tokens, *heads, dv))
        if self.options.get("safe_gate"):
            results |= {"a_log": normal(*heads), "dt_bias": normal(*heads)}
        if self.has_state:
            results["initial_state"] = normal(len(self.lengths), *heads, dv, dk)
        return {
            name: x.to(device, self.dtype_of(name)).requires_grad_() for name, x in results.items()
        }

    def dtype_of(self, name: str) -> torch.dtype:
        if self.dtype == torch.float64:
            return torch.float64
        if name == "initial_state":
            return torch.float32
        if name in ("g", "beta", "a_log", "dt_bias"):
            return self.dtype if self.rule == "gdn2" and name == "beta" else self.gate_dtype
        return self.dtype

    def bounds(self, device: str = "cpu") -> Tensor | None:
        """cu_seqlens for packed sequences."""
        if self.format != "thd":
            return None
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)


def random_case(seed: int) -> Case:
    """Draw a case that every backend in torch operations supports."""
    draw = random.Random(seed)
    rule, layout = draw.choice(RULES), draw.choice(("sbhd", "bshd", "thd"))
    longer = draw.choice((20, 20, 65, 70))  # some beyond a chunk of 64 tokens
    if layout == "thd":
        lengths = tuple(
            draw.choice((0, 1, 2, 7, 16, 17, longer)) for _ in range(draw.randint(1, 4))
        )
    else:
        lengths = (draw.choice((1, 2, 15, 16, 17, longer)),) * draw.randint(1, 2)
    sizes = (draw.choice((4, 16, 24)), draw.choice((4, 8, 32)))
    if rule != "gdn":
        sizes = (64, draw.choice((64, 128)))
    dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32, torch.float64))
    gate_dtype = torch.float32 if rule == "gdn" else draw.choice((torch.float32, dtype))
    options: dict[str, Any] = {"output_final_state": draw.random() < 0.7}
    options["use_qk_l2norm_in_kernel"] = draw.random() < 0.5
    if rule != "gdn" and draw.random() < 0.5:
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": draw.random() < 0.5}
    if rule == "gdp":
        options |= draw.choice(({}, {"safe_gate": True}, {"gate_domain": "linear"}))
    return Case(
        rule,
        layout,
        lengths,
        heads=draw.randint(1, 2),
        sizes=sizes,
        updates=draw.randint(1, 3) if rule == "gdp" else 1,
        dtype=dtype,
        gate_dtype=torch.float64 if dtype == torch.float64 else gate_dtype,
        has_state=draw.random() < 0.5,
        padding=draw.choice((0, 0, 5)) if layout == "thd" else 0,
        options=options,
    )


def reference_results(case: Case, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Output in the layout of the case and final states [b, h, dv, dk], in float64."""
    x = {name: tensor.double() for name, tensor in tensors.items()}
    outputs, states = [], []
    for index, (begin, end) in enumerate(pairwise((0, *accumulate(case.lengths)))):
        alone = ("initial_state", "a_log", "dt_bias")
        per_token = {
            name: _sequence(case, y, index, begin, end)
            for name, y in x.items()
            if name not in alone
        }
        state = torch.zeros(case.heads, *case.sizes, dtype=torch.float64, device=x["g"].device)
        if "initial_state" in x:
            state = x["initial_state"][index].mT
        output, state = _recurrence(case, {**x, **per_token}, state)
        outputs.append(output)
        states.append(state.mT)
    output = (
        torch.cat(outputs).flatten(-2) if case.format == "thd" else torch.stack(outputs).flatten(-2)
    )
    if case.format == "thd":
        output = torch.nn.functional.pad(output, (0, 0, 0, case.padding))
    return output.transpose(0, 1) if case.format == "sbhd" else output, torch.stack(states)


def _sequence(case: Case, x: Tensor, index: int, begin: int, end: int) -> Tensor:
    if case.format == "thd":
        return x[begin:end]
    return x[index] if case.format == "bshd" else x[:, index]


def _recurrence(case: Case, x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one sequence from the rule's equations."""
    q, k, v, g, beta = (
        x[name] for name in ("query_layer", "key_layer", "value_layer", "g", "beta")
    )
    if case.options.get("use_qk_l2norm_in_kernel"):
        q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    if case.options.get("use_beta_sigmoid_in_kernel"):
        beta = (2 if case.options.get("allow_neg_eigval") else 1) * torch.sigmoid(beta)
    if case.options.get("safe_gate"):
        g = -torch.exp(x["a_log"]) * torch.log1p(torch.exp(g + x["dt_bias"]))
    alpha = g if case.options.get("gate_domain") == "linear" else torch.exp(g)
    outputs = []
    for t in range(q.shape[0]):
        if case.rule == "gdn2":
            state = alpha[t][:, :, None] * state
            error = x["w"][t] * v[t] - torch.einsum("hkv,hk->hv", state, beta[t] * k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], error)
        else:
            state = alpha[t][:, None, None] * state
            updates = (
                [(k[t], v[t], beta[t])]
                if case.rule == "gdn"
                else zip(k[t], v[t], beta[t], strict=True)
            )
            for key, value, strength in updates:
                error = value - torch.einsum("hkv,hk->hv", state, key)
                state = state + strength[:, None, None] * torch.einsum("hk,hv->hkv", key, error)
        outputs.append(case.sizes[0] ** -0.5 * torch.einsum("hkv,hk->hv", state, q[t]))
    empty = q.new_zeros(0, case.heads, case.sizes[1])
    return torch.stack(outputs) if outputs else empty, state


def error(actual: Tensor, exact: Tensor) -> float:
    """Relative error in the Frobenius norm; the absolute error if the result is zero."""
    scale = exact.double().norm().item()
    return (actual.double() - exact.double()).norm().item() / (scale or 1.0)


def run_with_gradients(
    case: Case, tensors: dict[str, Tensor], call: Any
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Output, and state if requested, from call(**tensors), and gradients for a fixed sum over both."""
    result = call(**tensors)
    results = list(result) if isinstance(result, tuple) else [result]
    weights = []
    for index, y in enumerate(results):
        generator = torch.Generator().manual_seed(100 + index)
        weights.append(torch.randn(y.shape, generator=generator).to(case.dtype).to(y.device))
    loss = sum(
        (y.double() * weight.double()).sum() for y, weight in zip(results, weights, strict=True)
    )
    gradients: list[Tensor | None] = [None] * len(tensors)
    if isinstance(loss, Tensor) and loss.requires_grad:
        gradients = list(torch.autograd.grad(loss, list(tensors.values()), allow_unused=True))
    return results, gradients


def compare(
    case: Case, call: Any, seed: int = 0, bound: float | None = None, device: str = "cpu"
) -> None:
    """Assert that call(**tensors) and its gradients equal the recurrence.

    Args:
        case: The case.
        call: Function that takes the module's tensors as keywords.
        seed: Random seed for the tensors.
        bound: Largest relative error; by default the dtype's bound.
        device: Device for the tensors.
    """
    tensors = case.tensors(seed, device)
    exact = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    actual, gradients = run_with_gradients(case, tensors, call)
    needs_state = bool(case.options.get("output_final_state"))
    assert len(actual) == 1 + needs_state
    expected, wanted_gradients = run_with_gradients(
        case, exact, lambda **x: reference_results(case, x)[: 1 + needs_state]
    )
    limit = BOUNDS[case.dtype] if bound is None else bound
    if case.options.get("gate_domain") == "linear":
        limit = max(limit, 1e-8)  # 1e-10 is added to the gate
    assert actual[0].dtype == case.dtype
    for name, y, exact_y in zip(("output", "state"), actual, expected, strict=False):
        assert y.shape == exact_y.shape
        assert error(y, exact_y) < limit, (name, case)
    for name, dx, exact_dx in zip(tensors, gradients, wanted_gradients, strict=True):
        zero = torch.zeros_like(tensors[name])
        dx, exact_dx = zero if dx is None else dx, zero if exact_dx is None else exact_dx
        assert dx.dtype == tensors[name].dtype
        assert error(dx, exact_dx) < 3 * limit, (f"gradient of {name}", case)


def operation_inputs(**tensors: Tensor | None) -> DeltaInputs:
    """Operation inputs, None by default."""
    return DeltaInputs(*(tensors.get(name) for name in DeltaInputs._fields))  # pyright: ignore


def module_call(case: Case, device: str = "cpu", **more: Any) -> Any:
    """Module's forward with a case's options and bounds, as a function that takes tensors."""
    module, bounds = case.module(), case.bounds(device)
    return lambda **tensors: module(**tensors, cu_seqlens=bounds, **case.options, **more)
