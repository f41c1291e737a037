"""Transformer layer cost on one rank: attention, the dense MLP or experts, and all communication inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..memory import Memory
from .hardware import HIGH_PRECISION
from .models import ModelShape
from .simulate import VALUE, Cost, Extent, LinearSize, PassRun, RankMachine, layer_passes

Scheme = Literal["p2p", "all_gather", "a2a"]
# Additional keys for each query: blocks at the diagonal of a causal mask are computed whole, and rows end unevenly.
EDGE = 640
LOSS = 0.84  # part of an activation's rate that the loss over a vocabulary reaches
# Additional part for expert products with unequal token counts; measured with 23 to 2,419 rows per group.
UNEVEN = 0.12


class Both(NamedTuple):
    """Forward and backward pass costs."""

    forward: Cost
    backward: Cost

    def add(self, other: Both) -> None:
        """Add both costs of another part."""
        self.forward.add(other.forward)
        self.backward.add(other.backward)

    def stream(
        self, machine: RankMachine, kind: str, forward: float, backward: float, launches: int = 1
    ) -> None:
        """Add kernels that are limited by memory: bytes that they move in each pass."""
        gpu = machine.gpu
        for cost, moved_bytes in ((self.forward, forward), (self.backward, backward)):
            if moved_bytes:
                cost.spend(
                    kind, gpu.copy_ms(moved_bytes, 0.95) + (launches - 1) * gpu.launch, launches
                )


def no_costs() -> Both:
    """Empty costs to add to."""
    return Both(Cost(), Cost())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tokens in one micro-batch on one tensor-parallel group.

    Attributes:
        sequence: Tokens per sequence, over all context-parallel ranks.
        batch: Sequences per micro-batch.
        cp: Context-parallel ranks.
        scheme: How they exchange keys and values.
        ep: Ranks that share the experts.
        window: Keys before a query that it attends to; None for all.
        causal: Queries attend to earlier keys only.
        rotary: Queries and keys are rotated.
    """

    sequence: int
    batch: int = 1
    cp: int = 1
    scheme: Scheme = "p2p"
    ep: int = 1
    window: int | None = None
    causal: bool = True
    rotary: bool = True

    @property
    def tokens(self) -> float:
        """Tokens per rank."""
        return self.sequence * self.batch / self.cp


def attention_flops(work: MicroBatch, heads: int, head_dim: int) -> float:
    """Forward-pass operations for a rank's part of attention; the backward pass has 2.5 times as many."""
    length = work.sequence
    pairs = length * (length + EDGE) / 2 if work.causal else float(length * length)
    if work.window is not None and work.window < length:
        pairs -= (length - work.window) * (length - work.window) / 2
    return 4.0 * work.batch * heads * head_dim * pairs / work.cp


def attention(
    machine: RankMachine, work: MicroBatch, heads: int, kv_heads: int, head_dim: int
) -> Both:
    """Compute attention costs alone, on q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim].

    A context-parallel ring sends one key and value block while it computes with the previous block. A gather of keys
    overlaps with the attention to the rank's own keys, if the mask is causal; the sum of their gradients, in float32,
    and the exchange of heads overlap with nothing.
    """
    costs = no_costs()
    flops = attention_flops(work, heads, head_dim)
    wide, narrow = (work.tokens * count * head_dim * VALUE for count in (heads, kv_heads))
    for cost, scale, backward in ((costs.forward, 1.0, False), (costs.backward, 2.5, True)):
        took = machine.matrix_time * machine.gpu.attention_ms(
            machine.attention, head_dim, scale * flops, backward
        )
        cost.flops += scale * flops
        cost.spend("attention", took, 3)
        if work.cp == 1:
            continue
        links, cp, times = machine.links, work.cp, 2 if backward else 1
        if work.scheme == "p2p":
            sent = links.collective_ms("send_receive", times * 2 * narrow, cp, machine.tp)
            hidden = took / cp
            cost.communicate("cp", (cp - 1) * sent, (cp - 1) * max(0.0, sent - hidden))
        elif work.scheme == "all_gather":
            gathered = links.collective_ms("all_gather", 2 * narrow * cp, cp, machine.tp)
            own = took / cp if work.causal and work.window is None else 0.0
            cost.communicate("cp", gathered, max(0.0, gathered - own))
            if backward:
                moved_bytes = 2 * (2 * narrow * cp)  # float32 gradients
                cost.communicate(
                    "cp", links.collective_ms("reduce_scatter", moved_bytes, cp, machine.tp)
                )
        else:
            cost.communicate(
                "cp", links.collective_ms("all_to_all", wide + 2 * narrow, cp, machine.tp)
            )
            cost.communicate("cp", links.collective_ms("all_to_all", wide, cp, machine.tp))
            if backward:
                cost.communicate("cp", links.collective_ms("all_to_all", wide, cp, machine.tp))
    costs.forward.saved = 2 * wide + 2 * narrow + 4 * work.tokens * heads
    costs.forward.peak = costs.forward.saved
    # The output gradient in float32 while the key blocks add to dq.
    costs.backward.peak = wide + 2 * narrow + (2 * wide if machine.attention == "flash4" else 0.0)
    return costs


def linears(
    machine: RankMachine,
    kind: str,
    sizes: dict[str, LinearSize],
    inputs: dict[str, Extent],
    *,
    activation: str = "",
    mode: str | None = None,
    bias: bool = False,
) -> Both:
    """Compute the costs for a layer from `layer_passes`.

    Args:
        machine: The machine.
        kind: "linear", "grouped", "norm_linear" or "norm_mlp".
        sizes: {name: local sizes} for the linear layers.
        inputs: Extents for "x" and "grad_output".
        activation: Activation in a "norm_mlp".
        mode: "column" or "row" for a tensor-parallel "linear".
        bias: The products add a bias.
    """
    forward, backward = layer_passes(kind, machine, activation, mode, bias)
    extents = dict(inputs)
    for name, size in sizes.items():
        prefix = f"{name}_" if kind == "norm_mlp" else ""
        extents[f"{prefix}weight"] = Extent(size.outputs * size.groups, size.inputs)
        extents[f"{prefix}bias"] = Extent(size.groups, size.outputs)
    vector = Extent(1, inputs["x"].columns)
    run = PassRun(machine, sizes, {**extents, "gamma": vector, "beta": vector})
    return Both(run.run(forward, Cost()), run.run(backward, Cost()))


def mlp(machine: RankMachine, shape: ModelShape, rows: float, residual: Extent) -> Both:
    """Compute the costs for a norm and a dense MLP; `rows` count the product rows, after a gather."""
    inner = shape.ffn // machine.tp
    sizes = {
        "fc1": LinearSize(rows, shape.hidden, inner * (2 if shape.gated else 1)),
        "fc2": LinearSize(rows, inner, shape.hidden),
    }
    activation = "swiglu" if shape.gated else "gelu"
    return linears(
        machine, "norm_mlp", sizes, {"x": residual, "grad_output": residual}, activation=activation
    )


def experts(machine: RankMachine, shape: ModelShape, work: MicroBatch, residual: Extent) -> Both:
    """Compute the costs for a norm, a router, the token exchange and grouped products, with balanced experts.

    A rank owns experts / ep experts, sharded over the tensor-parallel ranks, and receives as many rows as it sends.
    """
    costs = no_costs()
    links, tokens, k = machine.links, work.tokens, shape.experts_per_token
    rows, groups, inner = tokens * k, shape.experts // work.ep, shape.ffn // machine.tp
    one, sent = residual.size, rows * shape.hidden * VALUE
    traffic = tokens * shape.hidden * VALUE
    costs.stream(machine, "norms", 2 * one, 3 * one)
    for cost in costs:  # gather the tokens, scatter the results, and their gradients
        for collective in ("all_gather", "reduce_scatter"):
            cost.communicate("tp", links.collective_ms(collective, traffic, machine.tp, 1))
        # Dispatch and combine go over ranks that have other tokens, beyond the tensor-parallel ranks.
        for _ in range(2):
            cost.communicate("ep", links.collective_ms("all_to_all", sent, work.ep, machine.tp))
    router = 2.0 * tokens * shape.hidden * shape.experts
    costs.forward.flops += router
    costs.backward.flops += 2 * router
    costs.forward.spend("products", machine.gpu.product_ms("bf16", router, traffic), 1)
    costs.backward.spend("products", 2 * machine.gpu.product_ms("bf16", router, traffic), 2)
    scores = tokens * shape.experts * 4
    costs.stream(machine, "routing", 6 * scores, 4 * scores, 4)
    costs.stream(machine, "routing", 2 * (traffic + sent), 2 * (traffic + sent), 2)
    first = {"linear": LinearSize(rows, shape.hidden, inner * (2 if shape.gated else 1), groups)}
    second = {"linear": LinearSize(rows, inner, shape.hidden, groups)}
    wide, half, narrow = (
        Extent(rows, columns) for columns in (first["linear"].outputs, inner, shape.hidden)
    )
    # A tensor-parallel layer's group is the token group above, so the products communicate nothing.
    costs.add(linears(machine, "grouped", first, {"x": narrow, "grad_output": wide}))
    costs.stream(machine, "activations", wide.size + half.size, 2 * wide.size + half.size)
    costs.add(linears(machine, "grouped", second, {"x": half, "grad_output": narrow}))
    for cost in costs:
        cost.spend("uneven experts", UNEVEN * cost.kernels["products"], 0)
    # Permuted rows, the input of the activation, and the results before they are weighted.
    costs.forward.saved += one + wide.size + sent + scores
    if machine.format.name == HIGH_PRECISION:
        costs.forward.saved += sent + half.size
    return costs


def layer(machine: RankMachine, shape: ModelShape, work: MicroBatch) -> Both:
    """Compute a layer's forward and backward pass costs for one micro-batch; do not change them."""
    return _LAYERS[machine, shape, work]


def _simulate_key(key: tuple[RankMachine, ModelShape, MicroBatch]) -> Both:
    machine, shape, work = key
    costs = no_costs()
    tp, rows = machine.tp, work.tokens
    residual = Extent(rows / tp if machine.sequence_parallel else rows, shape.hidden)
    heads, kv_heads = shape.heads // tp, max(1, shape.kv_heads // tp)
    width = (heads + 2 * kv_heads) * shape.head_dim
    inner = heads * shape.head_dim
    projected, attended = Extent(rows, width), Extent(rows, inner)
    costs.add(
        linears(
            machine,
            "norm_linear",
            {"linear": LinearSize(rows, shape.hidden, width)},
            {"x": residual, "grad_output": projected},
        )
    )
    if work.rotary:
        rotated_bytes = 2 * rows * (heads + kv_heads) * shape.head_dim * VALUE
        costs.stream(machine, "rotary", rotated_bytes, rotated_bytes, 2)
    costs.add(attention(machine, work, heads, kv_heads, shape.head_dim))
    costs.stream(machine, "copies", 0.0, 2 * projected.size)  # dq, dk and dv become one matrix
    costs.add(
        linears(
            machine,
            "linear",
            {"linear": LinearSize(rows, inner, shape.hidden)},
            {"x": attended, "grad_output": residual},
            mode="row",
        )
    )
    costs.stream(machine, "residuals", 3 * residual.size, 3 * residual.size)
    if shape.experts:
        costs.add(experts(machine, shape, work, residual))
    else:
        costs.add(mlp(machine, shape, rows, residual))
    costs.stream(machine, "residuals", 3 * residual.size, 3 * residual.size)
    costs.forward.saved += 2 * residual.size
    costs.forward.peak = max(costs.forward.peak, costs.forward.saved)
    return costs


_LAYERS: Memory[tuple[RankMachine, ModelShape, MicroBatch], Both] = Memory(_simulate_key, 4096)
