"""Plain PyTorch in bfloat16, as it comes and under torch.compile: the same modules for both."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..cases import Case
from ..workload import Workload, draw_routed_tokens
from .engine import Recomputed, float_parameters, stepping, target_ids, uneven_splits
from .provider import Builders, Provider

BF16 = torch.bfloat16
BUILDERS = Builders()
E4M3_MAXIMUM = 448.0


class Rope(nn.Module):
    """y [s, b, h, d] = x cos + rotate(x) sin, where a head's two halves are the pairs."""

    def __init__(self, sequence: int, size: int, device: torch.device):
        super().__init__()
        frequency = 10000.0 ** -(torch.arange(0, size, 2, device=device) / size)
        angles = torch.arange(sequence, device=device)[:, None] * frequency
        angles = torch.cat((angles, angles), dim=-1)[:, None, None]
        self.cos, self.sin = angles.cos().to(BF16), angles.sin().to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class GatedMLP(nn.Module):
    """y = fc2(silu(a) * b), (a, b) = fc1(norm(x))"""

    def __init__(self, hidden: int, inner: int, options: dict[str, Any]):
        super().__init__()
        self.norm = nn.RMSNorm(hidden, **options)
        self.fc1 = nn.Linear(hidden, 2 * inner, bias=False, **options)
        self.fc2 = nn.Linear(inner, hidden, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(F.silu(a) * b)


class PlainLayer(nn.Module):
    """A causal pre-norm layer on x [s, b, hidden] with grouped heads, and rotary positions if requested."""

    def __init__(self, sizes: dict[str, Any], device: torch.device):
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": BF16}
        hidden, self.heads, self.groups = sizes["hidden"], sizes["heads"], sizes["groups"]
        self.size = hidden // self.heads
        self.widths = [hidden, self.groups * self.size, self.groups * self.size]
        self.norm = nn.RMSNorm(hidden, **options)
        self.qkv = nn.Linear(hidden, sum(self.widths), bias=False, **options)
        self.proj = nn.Linear(hidden, hidden, bias=False, **options)
        self.mlp = GatedMLP(hidden, sizes["inner"], options)
        self.rope = Rope(sizes["sequence"], self.size, device) if sizes["rotary"] else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, self.size))
            for t in self.qkv(self.norm(x)).split(self.widths, dim=-1)
        )
        q, k, v = (t.permute(1, 2, 0, 3) for t in (self.rope(q), self.rope(k), v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.groups != self.heads
        )
        x = x + self.proj(out.permute(2, 0, 1, 3).flatten(2))
        return x + self.mlp(x)


class PlainGroupedLinear(nn.Module):
    """y [rows, out] = x @ weight[group of the row].T, for equal-sized groups."""

    def __init__(self, groups: int, rows: int, depth: int, width: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(groups, width, depth, device=device, dtype=BF16) * 0.02
        )
        self.ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * (rows // groups)

    def forward(self, x: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=self.ends)


class ScaledExperts(nn.Module):
    """y = fc2(scales * silu(a) * b), (a, b) = fc1(x), for equal-sized groups."""

    def __init__(self, groups: int, rows: int, hidden: int, inner: int, device: torch.device):
        super().__init__()
        self.fc1 = PlainGroupedLinear(groups, rows, hidden, 2 * inner, device)
        self.fc2 = PlainGroupedLinear(groups, rows, inner, hidden, device)

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        a, b = self.fc1(x).chunk(2, dim=-1)
        return self.fc2((F.silu(a) * b * scales.unsqueeze(-1)).to(x.dtype))


def _gelu_mlp(hidden: int, inner: int, options: dict[str, Any]) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(hidden, **options),
        nn.Linear(hidden, inner, **options),
        nn.GELU(approximate="tanh"),
        nn.Linear(inner, hidden, **options),
    )


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=BF16)


@BUILDERS.of("quantize")
def _quantize(case: Case, device: torch.device) -> Workload:
    """Build codes = saturate(x scale), by the operations of torch."""
    a = case.arguments
    scale = torch.ones(1, device=device)

    def cast(x: Tensor) -> tuple[Tensor, ...]:
        scaled = (x.float() * scale).clamp(-E4M3_MAXIMUM, E4M3_MAXIMUM)
        codes = scaled.to(torch.float8_e4m3fn)
        return (codes, codes.t().contiguous()) if a["both"] else (codes,)

    return Workload(cast, (_random(device, a["rows"], a["depth"]),))


@BUILDERS.of("norm")
def _norm(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    kind = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[a["kind"]]
    norm = kind(a["width"], device=device, dtype=BF16)
    return Workload(norm, (_random(device, a["rows"], a["width"]),))


@BUILDERS.of("linear", "dense")
def _linear(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    module = nn.Linear(a["depth"], a["width"], bias=a["bias"], device=device, dtype=BF16)
    return Workload(module, (_random(device, a["rows"], a["depth"]),))


@BUILDERS.of("layernorm_linear")
def _layernorm_linear(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    norm = nn.RMSNorm(a["depth"], device=device, dtype=BF16)
    linear = nn.Linear(a["depth"], a["width"], bias=False, device=device, dtype=BF16)
    return Workload(nn.Sequential(norm, linear), (_random(device, a["rows"], a["depth"]),))


@BUILDERS.of("layernorm_mlp")
def _layernorm_mlp(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    options: dict[str, Any] = {"device": device, "dtype": BF16}
    if a["activation"] == "swiglu":
        module: nn.Module = GatedMLP(a["hidden"], a["inner"], options)
    else:
        module = _gelu_mlp(a["hidden"], a["inner"], options)
    return Workload(module, (_random(device, a["rows"], 1, a["hidden"]),))


@BUILDERS.of("ops")
def _ops(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    if a["groups"] is None:
        module: nn.Module = _gelu_mlp(a["hidden"], a["inner"], {"device": device, "dtype": BF16})
        return Workload(module, (_random(device, a["rows"], a["hidden"]),))
    module = ScaledExperts(a["groups"], a["rows"], a["hidden"], a["inner"], device)
    scales = torch.rand(a["rows"], device=device)
    return Workload(module, (_random(device, a["rows"], a["hidden"]),), {"scales": scales})


@BUILDERS.of("grouped_linear")
def _grouped_linear(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    module = PlainGroupedLinear(a["groups"], a["rows"], a["depth"], a["width"], device)
    return Workload(module, (_random(device, a["rows"], a["depth"]),))


@BUILDERS.of("attention")
def _attention(case: Case, device: torch.device) -> Workload | None:
    """Build causal attention; windows and packed sequences have no plain counterpart without quadratic memory."""
    a = case.arguments
    if a["window"] is not None or a["packed"]:
        return None
    grouped = a["groups"] != a["heads"]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(2)

    tokens = (a["batch"], a["sequence"])
    q, k, v = (
        _random(device, *tokens, heads, a["size"])
        for heads in (a["heads"], a["groups"], a["groups"])
    )
    return Workload(attend, (q, k, v))


class SavedOnHost(nn.Module):
    """y = layers(x); torch's own hooks copy everything that the first layers save to the host."""

    def __init__(self, layers: Sequence[nn.Module], offloaded: int):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.offloaded = offloaded

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            moves = number < self.offloaded and x.is_cuda
            with torch.autograd.graph.save_on_cpu(pin_memory=True) if moves else nullcontext():
                x = layer(x)
        return x


@BUILDERS.of("offload")
def _offload(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    layers = [
        nn.Linear(a["width"], a["width"], bias=False, dtype=BF16, device=device)
        for _ in range(a["layers"])
    ]
    return Workload(SavedOnHost(layers, a["offloaded"]), (_random(device, a["rows"], a["width"]),))


@BUILDERS.of("layer", "layer_small", "layer_graphed", "layer_observed")
def _layer(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    return Workload(PlainLayer(a, device), (_random(device, a["sequence"], 1, a["hidden"]),))


@BUILDERS.of("layer_recomputed")
def _layer_recomputed(case: Case, device: torch.device) -> Workload:
    workload = _layer(case, device)
    return replace(workload, function=Recomputed(workload.function, checkpoint))


@BUILDERS.of("rope")
def _rope(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    x = _random(device, a["sequence"], a["batch"], a["heads"], a["size"])
    return Workload(Rope(a["sequence"], a["size"], device), (x,))


@BUILDERS.of("permute")
def _permute(case: Case, device: torch.device) -> Workload:
    """Build a permutation by the token and the expert of every row, sorted by expert."""
    tokens, mask, probs = draw_routed_tokens(case, device)

    def there_and_back(x: Tensor, probs: Tensor) -> Tensor:
        expert, token = mask.t().nonzero(as_tuple=True)
        rows = x.index_select(0, token) * probs[token, expert].to(x.dtype)[:, None]
        return torch.zeros_like(x).index_add(0, token, rows)

    return Workload(there_and_back, (tokens,), {"probs": probs})


@BUILDERS.of("padding")
def _padding(case: Case, device: torch.device) -> Workload:
    a, splits = case.arguments, uneven_splits(case)

    def there_and_back(x: Tensor) -> Tensor:
        padded = torch.cat([F.pad(part, (0, 0, 0, -len(part) % 128)) for part in x.split(splits)])
        parts = padded.split([-(-rows // 128) * 128 for rows in splits])
        return torch.cat([part[:rows] for part, rows in zip(parts, splits, strict=True)])

    return Workload(there_and_back, (_random(device, a["rows"], a["width"]),))


@BUILDERS.of("router")
def _router(case: Case, device: torch.device) -> Workload:
    a = case.arguments

    def weights(logits: Tensor) -> Tensor:
        if a["score"] == "softmax":
            values, expert_ids = logits.topk(a["places"], dim=1)
            values = values.softmax(1)
        else:
            values, expert_ids = logits.sigmoid().topk(a["places"], dim=1)
            values = values / (values.sum(1, keepdim=True) + 1e-20)
        mask = torch.zeros_like(logits, dtype=torch.int32).scatter(1, expert_ids, 1).bool()
        return torch.zeros_like(logits).scatter(1, expert_ids, values) * mask

    return Workload(weights, (torch.randn(a["tokens"], a["experts"], device=device),))


@BUILDERS.of("cross_entropy")
def _cross_entropy(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    return Workload(_mean_loss, (_random(device, 1, a["rows"], a["ids"]), target_ids(case, device)))


@BUILDERS.of("linear_cross_entropy")
def _linear_cross_entropy(case: Case, device: torch.device) -> Workload:
    a = case.arguments

    hidden, weight = (
        _random(device, 1, a["rows"], a["depth"]),
        _random(device, a["ids"], a["depth"]),
    )
    return Workload(
        lambda hidden, weight, target: _mean_loss(F.linear(hidden, weight), target),
        (hidden, weight, target_ids(case, device)),
    )


def _mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


@BUILDERS.of("adam")
def _adam(case: Case, device: torch.device) -> Workload:
    """Build the step that is one kernel per device, if there is a GPU."""
    fused = device.type == "cuda"
    return stepping(torch.optim.AdamW(float_parameters(case, device), lr=1e-4, fused=fused))


@BUILDERS.of("sgd")
def _sgd(case: Case, device: torch.device) -> Workload:
    fused = device.type == "cuda"
    return stepping(
        torch.optim.SGD(float_parameters(case, device), lr=1e-4, momentum=0.9, fused=fused)
    )


def _compiled(case: Case, device: torch.device) -> Workload | None:
    workload = BUILDERS[case.family](case, device)
    return None if workload is None else workload.compiled()


# Their library calls are opaque to the compiler, as are data-dependent row counts; their figures would equal the plain
# rows' figures.
UNCHANGED_MODULES = ("attention", "grouped_linear", "ops", "permute", "adam", "sgd")

PLAIN = Provider("torch", ("bf16",), BUILDERS, quantizations=("delayed",))
COMPILED = Provider(
    "torch.compile",
    ("bf16",),
    {family: _compiled for family in BUILDERS if family not in UNCHANGED_MODULES},
    gpu_only="compiling for a CPU takes longer than its figures are worth",
    quantizations=("delayed",),
)
