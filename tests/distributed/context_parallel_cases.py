"""Attention shared by ranks against attention of the whole sequence, written plainly in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_engine.pytorch import DotProductAttention


@dataclass(frozen=True)
class Case:
    """One attention: `batch` sequences with `tokens` each, or packed ones with real and padded lengths."""

    comm: str = "p2p"
    size: int = 2
    layout: str = "sbhd"
    mask: str = "causal"
    window: tuple[int, int] | None = None
    batch: int = 2
    tokens: int = 16
    keys: int | None = None  # key tokens; None if equal to the query tokens
    heads: int = 8
    groups: int = 8
    head_dim: tuple[int, int] = (8, 8)
    bias: str | None = None  # "11", "1h", "b1" or "bh": the axes that it has
    softmax: str = "vanilla"
    lengths: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None
    keys_lengths: tuple[int, ...] | None = None
    arbitrary: bool = False
    mask_tensor: bool = False
    alibi: bool = False
    max_logit: bool = False
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        listing = [self.comm, str(self.size), self.layout, self.mask]
        listing += [str(self.window)] * (self.window is not None) + [f"g{self.groups}"] * (
            self.groups != 8
        )
        listing += [
            f"{n}={v}"
            for n, v in (("bias", self.bias), ("d", self.head_dim), ("s", self.softmax))
            if v not in (None, (8, 8), "vanilla")
        ]
        listing += [
            name
            for name in ("alibi", "arbitrary", "mask_tensor", "max_logit", "recompute")
            if getattr(self, name)
        ]
        listing += [f"softcap={self.softcap}"] * (self.softcap > 0.0)
        listing += ["padded"] * (self.padded is not None) + ["lengths"] * (self.lengths is not None)
        listing += ["cross"] * (self.keys is not None) + [str(self.dtype)[6:]] * (
            self.dtype != torch.float32
        )
        return " ".join(listing)


def sequences(case: Case) -> list[tuple[int, int, int, int]]:
    """(query start, key start, real queries, real keys) per sequence, in the batch's token order."""
    extents_q, extents_k = extents(case)
    reals_q = case.lengths or extents_q
    reals_k = case.keys_lengths or (reals_q if case.keys is None else extents_k)
    starts_q = [sum(extents_q[:i]) for i in range(len(extents_q))]
    starts_k = [sum(extents_k[:i]) for i in range(len(extents_k))]
    return list(zip(starts_q, starts_k, reals_q, reals_k, strict=True))


def extents(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and key tokens per sequence, padding included."""
    if case.layout == "thd":
        of_queries = case.padded or case.lengths
        assert of_queries is not None
        return of_queries, of_queries
    return (case.tokens,) * case.batch, (case.keys or case.tokens,) * case.batch


def problem(case: Case, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Tensors for the full problem, packed [t, h, d]: sequence after sequence."""
    generator = torch.Generator().manual_seed(7)
    total_q, total_k = (sum(lengths) for lengths in extents(case))
    d_qk, d_v = case.head_dim
    shapes = {
        "q": (total_q, case.heads, d_qk),
        "k": (total_k, case.groups, d_qk),
        "v": (total_k, case.groups, d_v),
        "dout": (total_q, case.heads, d_v),
    }
    result = {
        name: torch.randn(shape, generator=generator).to(case.dtype)
        for name, shape in shapes.items()
    }
    rows, columns = case.tokens, case.keys or case.tokens
    if case.bias:
        shape = (
            case.batch if "b" in case.bias else 1,
            case.heads if "h" in case.bias else 1,
            rows,
            columns,
        )
        result["bias"] = torch.randn(shape, generator=generator).to(case.dtype)
    if case.arbitrary:
        masked = torch.rand((case.batch, 1, rows, columns), generator=generator) < 0.4
        masked[..., 0] = False
        result["masked"] = masked
    if case.softmax == "learnable":
        result["sink"] = torch.randn(case.heads, generator=generator)
    return {name: tensor.to(device) for name, tensor in result.items()}


def exact(case: Case) -> dict[str, Tensor]:
    """Full-sequence results and gradients in float64."""
    argument = problem(case)
    names = [name for name in ("q", "k", "v", "bias", "sink") if name in argument]
    leaves = {name: argument[name].double().requires_grad_() for name in names}
    each, scale, logits_of = case.heads // case.groups, 1 / math.sqrt(case.head_dim[0]), []
    out = torch.zeros(*argument["q"].shape[:2], case.head_dim[1], dtype=torch.float64)
    for number, (start_q, start_k, real_q, real_k) in enumerate(sequences(case)):
        if real_q == 0:
            continue
        q = leaves["q"][start_q : start_q + real_q].transpose(0, 1)
        k, v = (
            leaves[x][start_k : start_k + real_k].transpose(0, 1).repeat_interleave(each, 0)
            for x in ("k", "v")
        )
        i, j = torch.arange(real_q)[:, None], torch.arange(real_k)[None]
        bottom_right = "bottom_right" in case.mask or "causal" not in case.mask
        distance = j - i - (real_k - real_q if bottom_right else 0)
        left, right = case.window or (-1, -1)
        right = 0 if "causal" in case.mask else right
        visible = torch.ones(real_q, real_k, dtype=torch.bool)
        if left >= 0:
            visible = visible & (distance >= -left)
        if right >= 0:
            visible = visible & (distance <= right)
        logits = q @ k.transpose(1, 2) * scale
        if case.softcap:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        if case.bias:
            bias = leaves["bias"]
            logits = logits + bias[number if bias.shape[0] > 1 else 0][:, :real_q, :real_k]
        if case.alibi:
            slopes = torch.exp2(-8.0 * torch.arange(1, case.heads + 1) / case.heads).double()
            logits = logits - slopes[:, None, None] * distance.abs()
        if case.arbitrary:
            visible = visible & ~argument["masked"][number, 0]
        logits = logits.masked_fill(~visible, -torch.inf)
        logits_of.append(logits.detach().flatten(1).amax(1))
        blind = ~visible.any(-1)
        logits = logits.masked_fill(blind[:, None], 0.0)
        if case.softmax != "vanilla":
            sink = (
                leaves["sink"]
                if case.softmax == "learnable"
                else torch.zeros(case.heads, dtype=torch.float64)
            )
            logits = torch.cat((sink[:, None, None].expand(-1, real_q, 1), logits), dim=-1)
        p = torch.softmax(logits, -1)[..., -real_k:].masked_fill(blind[:, None], 0.0)
        rows = torch.zeros_like(out)
        rows[start_q : start_q + real_q] = (p @ v).transpose(0, 1)
        out = out + rows
    grads = torch.autograd.grad(out, list(leaves.values()), argument["dout"].double())
    results = {
        "out": out.detach(),
        **{f"d{name}": grad for name, grad in zip(names, grads, strict=True)},
    }
    if case.max_logit:
        results["max_logit"] = torch.stack(logits_of).amax(0)
    return results


def rank_tokens(lengths: tuple[int, ...], size: int, rank: int) -> list[int]:
    """A rank's tokens: chunks `rank` and `2 * size - 1 - rank` out of 2 * size chunks per sequence."""
    tokens, start = [], 0
    for length in lengths:
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            tokens += range(start + number * chunk, start + (number + 1) * chunk)
        start += length
    return tokens


def convert_layout(x: Tensor, layout: str, batch: int) -> Tensor:
    """Convert packed tokens [t, h, d] to a layout."""
    if layout == "thd":
        return x.contiguous()
    x = x.unflatten(0, (batch, -1))
    return (x.transpose(0, 1) if layout == "sbhd" else x).contiguous()


def packed(x: Tensor, layout: str) -> Tensor:
    """The inverse of `convert_layout`."""
    if layout == "thd":
        return x
    return (x.transpose(0, 1) if layout == "sbhd" else x).flatten(0, 1)


def communication_groups(case: Case, rank: int) -> tuple[Any, int]:
    """(cp_group, combined rank) for a case on `case.size` ranks; a2a+p2p in a grid of 2 x size / 2."""
    if case.comm != "a2a+p2p":
        return dist.group.WORLD, rank
    inner = 2
    outer = case.size // inner
    of_heads, of_ring = None, None
    for first in range(outer):
        ranks = [first * inner + i for i in range(inner)]
        group = dist.new_group(ranks)
        of_heads = group if rank in ranks else of_heads
    for first in range(inner):
        ranks = [first + i * inner for i in range(outer)]
        group = dist.new_group(ranks)
        of_ring = group if rank in ranks else of_ring
    return [of_heads, of_ring], rank


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def create_attention(case: Case, group: Any) -> DotProductAttention:
    module = DotProductAttention(
        case.heads,
        case.head_dim,
        case.groups,
        qkv_format=case.layout,
        attn_mask_type=case.mask,
        window_size=case.window,
        softcap=case.softcap,
        softmax_type=case.softmax,
        return_max_logit=case.max_logit,
        attention_type="self" if case.keys is None else "cross",
    )
    module.set_context_parallel_group(group, list(range(case.size)), None, case.comm)
    return module


def shared(case: Case, rank: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Results and gradients of one rank; cases with masks or lengths run on the CPU."""
    group, rank = communication_groups(case, rank)
    argument, (lengths_q, lengths_k) = problem(case, device), extents(case)
    rows, columns = (rank_tokens(lengths, case.size, rank) for lengths in (lengths_q, lengths_k))
    names = ("q", "k", "v")
    local = {
        name: convert_layout(
            argument[name][rows if name == "q" else columns], case.layout, case.batch
        ).requires_grad_()
        for name in names
    }
    arguments: dict[str, Any] = dict(case.arguments)
    of_row = rank_tokens((case.tokens,), case.size, rank)
    if case.bias:
        local["bias"] = argument["bias"][:, :, of_row].contiguous().requires_grad_()
        arguments |= {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": local["bias"],
        }
    if case.alibi:
        arguments["core_attention_bias_type"] = "alibi"
    if case.arbitrary:
        arguments["attention_mask"] = argument["masked"][:, :, of_row]
    if case.mask_tensor:
        assert case.lengths is not None
        arguments["attention_mask"] = (
            torch.arange(case.tokens) >= torch.tensor(case.lengths)[:, None]
        )[:, None, None]
    elif "padding" in case.mask:
        real = [(x[2], x[3]) for x in sequences(case)]
        cu_q = cumulative(tuple(x for x, _ in real))
        arguments |= {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_q}
        if case.keys_lengths or case.keys:
            arguments["cu_seqlens_kv"] = cumulative(tuple(x for _, x in real))
        if case.padded:
            arguments |= dict.fromkeys(
                ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), cumulative(case.padded)
            )
    module = create_attention(case, group)
    if case.softmax == "learnable":
        module.softmax_offset = torch.nn.Parameter(argument["sink"].clone())
    if case.recompute:
        arguments["checkpoint_core_attention"] = True
    out = module(local["q"], local["k"], local["v"], **arguments)
    results = {}
    if case.max_logit:
        out, results["max_logit"] = out
    dout = convert_layout(argument["dout"][rows], case.layout, case.batch).flatten(-2)
    out.backward(dout)
    results["out"] = packed(out.detach().unflatten(-1, (case.heads, -1)), case.layout)
    for name in names:
        results[f"d{name}"] = packed(local[name].grad, case.layout)
    if case.bias:
        results["dbias"] = local["bias"].grad
    if case.softmax == "learnable":
        results["dsink"] = module.softmax_offset.grad
    return results


def rank_results(case: Case, whole: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The rank's part in the full results."""
    lengths_q, lengths_k = extents(case)
    rows, columns = (rank_tokens(lengths, case.size, rank) for lengths in (lengths_q, lengths_k))
    results = {}
    for name, x in whole.items():
        if name in ("out", "dq"):
            x = x[rows]
        elif name in ("dk", "dv"):
            x = x[columns]
        elif name == "dbias":
            x = x[:, :, rank_tokens((case.tokens,), case.size, rank)]
        results[name] = x
    return results
