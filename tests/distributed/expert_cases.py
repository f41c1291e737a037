"""One-device float64 oracle for expert parallelism, and the same mixture of experts over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_engine.pytorch import ep

HIDDEN, INNER = 32, 16


@dataclass(frozen=True)
class Case:
    """A mixture of experts over ranks.

    Attributes:
        tokens: Tokens per rank.
        experts: Number of experts over all ranks.
        top_k: Experts per token.
        capacity: Receive-buffer rows; None for the eager mode.
        alignment: Alignment for each expert's rows.
        spread: Experts that tokens choose from; None for all.
        absent: Share of expert indices that are -1.
        dtype: Dtype for tokens and experts.
        settings: Further EpBuffer arguments.
    """

    tokens: tuple[int, ...]
    experts: int = 8
    top_k: int = 2
    capacity: int | None = None
    alignment: int = 0
    spread: tuple[int, ...] | None = None
    absent: float = 0.0
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Inputs:
    """Tokens [T, H], choices [T, k], weights [T, k] and gradients [T, H] of each rank, and the experts' weights."""

    tokens: list[Tensor]
    choices: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]
    fc1: Tensor
    fc2: Tensor


def inputs(case: Case) -> Inputs:
    """Draw a case's inputs, identical in every process."""
    random = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(case.dtype)

    choices = []
    for count in case.tokens:
        allowed = torch.tensor(range(case.experts) if case.spread is None else case.spread)
        chosen = allowed[
            torch.rand(count, len(allowed), generator=random).argsort(1)[:, : case.top_k]
        ]
        chosen[torch.rand(chosen.shape, generator=random) < case.absent] = -1
        choices.append(chosen)
    weights = [torch.rand(count, case.top_k, generator=random) for count in case.tokens]
    return Inputs(
        [normal(count, HIDDEN) for count in case.tokens],
        choices,
        weights,
        [normal(count, HIDDEN) for count in case.tokens],
        normal(case.experts, INNER, HIDDEN) / HIDDEN**0.5,
        normal(case.experts, HIDDEN, INNER) / INNER**0.5,
    )


def one_device_results(case: Case) -> dict[str, Any]:
    """Outputs and gradients in float64: {"y", "tokens", "weights": one per rank, "fc1", "fc2": of all experts}."""
    argument = inputs(case)
    leaves = {
        "tokens": [x.double().requires_grad_() for x in argument.tokens],
        "weights": [w.double().requires_grad_() for w in argument.weights],
    }
    fc1, fc2 = (w.double().requires_grad_() for w in (argument.fc1, argument.fc2))
    saved = rows_within_capacity(case, argument.choices)
    outputs = []
    for rank, (x, w) in enumerate(zip(leaves["tokens"], leaves["weights"], strict=True)):
        y = torch.zeros(x.shape, dtype=torch.float64) + 0 * x
        for token, index, expert in saved[rank]:
            out = fc2[expert] @ torch.tanh(fc1[expert] @ x[token]) * w[token, index]
            y = y.index_add(0, torch.tensor([token]), out[None])
        outputs.append(y)
    loss = sum((y * g.double()).sum() for y, g in zip(outputs, argument.gradients, strict=True))
    loss.backward()  # pyright: ignore[reportAttributeAccessIssue]
    zero = {"fc1": torch.zeros_like(fc1), "fc2": torch.zeros_like(fc2)}
    return {
        "y": [y.detach() for y in outputs],
        "tokens": [x.grad for x in leaves["tokens"]],
        "weights": [torch.zeros_like(w) if w.grad is None else w.grad for w in leaves["weights"]],
        "fc1": zero["fc1"] if fc1.grad is None else fc1.grad,
        "fc2": zero["fc2"] if fc2.grad is None else fc2.grad,
    }


def rows_within_capacity(case: Case, choices: list[Tensor]) -> list[list[tuple[int, int, int]]]:
    """Per rank, the (token, position, expert) of every choice whose row is within the capacity."""
    local, align = case.experts // len(case.tokens), max(1, case.alignment)
    saved: list[list[tuple[int, int, int]]] = [[] for _ in case.tokens]
    row = 0
    for expert in range(case.experts):
        row = 0 if expert % local == 0 else row
        for rank, chosen in enumerate(choices):
            for token, index in (chosen == expert).nonzero().tolist():
                if case.capacity is None or row < case.capacity:
                    saved[rank].append((token, index, expert))
                row += 1
        row = -(-row // align) * align
    return saved


def rank_results(
    case: Case, rank: int, drop: bool = False, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Outputs and gradients of one rank: {"y", "tokens", "weights", "fc1", "fc2"}, and the received rows."""
    argument, ranks = inputs(case), len(case.tokens)
    local = case.experts // ranks
    most = max(1, *case.tokens)
    ep.ep_bootstrap(
        None, case.experts, most, HIDDEN, case.top_k, case.capacity, drop_on_overflow=drop
    )
    buffer = ep.EpBuffer(case.top_k, most, HIDDEN, local, alignment=case.alignment, **case.settings)
    x, w = (
        values[rank].to(device).requires_grad_() for values in (argument.tokens, argument.weights)
    )
    separate = slice(rank * local, (rank + 1) * local)
    fc1, fc2 = (
        full[separate].to(device, copy=True).requires_grad_()
        for full in (argument.fc1, argument.fc2)
    )
    received, received_weights, counts = ep.ep_dispatch(
        buffer, x, argument.choices[rank].to(device), w
    )
    rows = (
        received.dequantize()
        if hasattr(received, "dequantize") and type(received) is not Tensor
        else received
    )
    parts = rows.split([*counts.tolist(), rows.shape[0] - int(counts.sum())])
    outputs = [
        torch.tanh(part @ a.t()) @ b.t() for part, a, b in zip(parts, fc1, fc2, strict=False)
    ]
    # unused rows do not contribute
    out = torch.cat([*outputs, torch.full_like(parts[-1], float("nan"))])
    weighted = (out * received_weights[:, None]).to(x.dtype)
    y = ep.ep_combine(buffer, weighted, num_local_tokens=case.tokens[rank])
    y.backward(argument.gradients[rank].to(device))
    ep.ep_finalize()
    if dist.is_initialized():
        dist.barrier()
    of_leaves = {"tokens": x, "weights": w, "fc1": fc1, "fc2": fc2}
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in of_leaves.items()
    }
    return {
        "y": y.detach(),
        **gradients,
        "counts": counts,
        "total": buffer.total_recv_tokens.clone(),
        "rows": rows.detach(),
        "row_weights": received_weights.detach(),
    }
