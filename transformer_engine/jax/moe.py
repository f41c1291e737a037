"""y = sum over the chosen experts of weight * (act(x @ wi_0[e]) * (x @ wi_1[e])) @ wo[e]: a mixture of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ..common.checks import described, number, switch, text_or_none, whole
from .activation import activation, check_activation
from .checks import check_axis_names, check_floating, check_instance, check_values
from .ep import EpConfig, dispatched, returned
from .explicit_axes import explicit_entries, unique_axes, with_automatic_axes
from .grouped_dense import RowsSpec, checked_kernel, plus_bias, product
from .permutation import aligned, routing_map_to_selected_experts, token_combine, token_dispatch
from .quantize.grouped import GroupedQuantizer, group_of_rows
from .quantize.quantizers import QuantizerSet, noop_quantizer_set
from .quantize.settings import key_of
from .quantize.sharing import over_devices
from .router import fused_moe_aux_loss, fused_topk_with_score_function
from .sharding import (
    automatic_axes,
    check_axis,
    get_mesh_axis_size,
    mesh_in_use,
    with_sharding_constraint_by_logical_axes,
)

__all__ = ["moe"]

_ALIGN_SIZE = (
    128  # rows of an expert are a multiple; it is divisible by all formats' blocks and kernels' tiles
)
Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Routing:
    """The choice of experts; see `fused_topk_with_score_function`."""

    num_experts: int
    topk: int
    use_pre_softmax: bool
    num_groups: int
    group_topk: int
    scaling_factor: float
    score_function: Any
    aux_loss_coeff: float

    def __call__(self, logits: Array, expert_bias: Array | None) -> tuple[Array, Array]:
        return fused_topk_with_score_function(
            logits, self.topk, self.use_pre_softmax, self.num_groups, self.group_topk, self.scaling_factor,
            self.score_function, expert_bias,
        )  # fmt: skip

    def aux_loss(self, logits: Array, chosen: Array, axes: tuple[str, ...]) -> Array | None:
        """Return the loss of all tokens, including those on other devices along `axes`."""
        if self.aux_loss_coeff == 0.0:
            return None
        scores, _ = fused_topk_with_score_function(
            logits, self.topk, score_function=self.score_function, compute_aux_scores=True
        )
        if axes:
            chosen = lax.all_gather(chosen, axes, axis=0, tiled=True)
            scores = lax.all_gather(scores, axes, axis=0, tiled=True)
        return fused_moe_aux_loss(scores, chosen.sum(axis=0), self.topk, self.aux_loss_coeff)


@dataclass(frozen=True)
class Experts:
    """The computation of the experts.

    Attributes:
        activation_type: Activation of wi_0's output.
        weights_early: Multiply the hidden features by the weights of a token, not the output.
        quantizer_sets: Quantizers of wi_0, wi_1 and wo.
        over: Axes whose devices hold other rows of the same experts.
    """

    activation_type: str
    weights_early: bool
    quantizer_sets: tuple[QuantizerSet, ...] = field(hash=False, compare=False)
    over: tuple[str, ...] = ()

    def __call__(self, params: Any, rows: Array, weights: Array, counts: Array) -> Array:
        """Compute rows [rows, h] -> [rows, h]; with `weights_early`, weights multiply the hidden values.

        Args:
            params: Kernels and biases.
            rows: Rows of the experts.
            weights: Weight of each row.
            counts: Tokens of every expert, whose rows begin at multiples of _ALIGN_SIZE, expert 0 first. The rows
                between them stay zero up to the last product, because otherwise their biases would count in maxima.
        """
        sizes = aligned(counts, _ALIGN_SIZE)
        experts = _expert_of_rows(sizes, counts, rows.shape[0])

        def linear(rows: Array, name: str, quantizers: QuantizerSet) -> Array:
            kernel = checked_kernel(rows, params[name], sizes)
            y = product(rows, kernel, sizes, quantizers, RowsSpec(self.over, aligned=True))
            bias = params[f"{name}_bias"]
            return y if bias is None else plus_bias(y, bias, experts)

        first, second, last = self.quantizer_sets
        halves = linear(rows, "wi_0", first), linear(rows, "wi_1", second)
        hidden = activation(jnp.stack(halves, axis=-2), (self.activation_type, "linear"))
        if self.weights_early:
            hidden = hidden * weights[:, None].astype(hidden.dtype)
        return linear(hidden, "wo", last)


def _expert_of_rows(sizes: Array, counts: Array, rows: int) -> Array:
    """Return int32 [rows]: the expert of each row's token; the number of experts for a row without a token.

    Args:
        sizes: Rows of every expert.
        counts: Tokens of every expert, which are its first rows.
        rows: Number of rows.
    """
    expert = group_of_rows(sizes, rows)
    ends = jnp.append(jnp.cumsum(sizes) - sizes + counts, 0)
    return jnp.where(jnp.arange(rows) < ends[expert], expert, sizes.shape[0])


def moe(
    x: Array, gate_kernel: Array, wi_0: Array, wi_1: Array, wo: Array, wi_0_bias: Array | None = None,
    wi_1_bias: Array | None = None, wo_bias: Array | None = None, expert_bias: Array | None = None, *,
    num_experts: int, num_experts_per_tok: int, activation_type: str = "silu", score_function: Any = "softmax",
    use_pre_softmax: bool = False, num_groups: int = -1, group_topk: int = -1, scaling_factor: float = 1.0,
    aux_loss_coeff: float = 0.0, apply_topk_weights_early: bool = False, ep_axis: str | None = None,
    data_parallelism_axes: tuple[str, ...] = (), input_axes: Axes = (), gate_kernel_axes: Axes = (),
    wi_kernel_axes: Axes = ("exp", "embed", "mlp"), wo_kernel_axes: Axes = ("exp", "mlp", "embed"),
    quantizer_sets: tuple[QuantizerSet, ...] = (noop_quantizer_set,) * 3, dtype: Any = None,
) -> tuple[Array, Array | None, Array]:  # fmt: skip
    """Mixture of experts: (y [b, s, h], the balancing loss or None, rows that the experts of this device received).

    Args:
        x: Input [b, s, h].
        gate_kernel: Kernel [h, E] of the router.
        wi_0: Kernels [E, h, f] of the activation.
        wi_1: Kernels [E, h, f] that the activation's output is multiplied with.
        wo: Kernels [E, f, h].
        wi_0_bias: Biases [E, f], or None.
        wi_1_bias: Biases [E, f], or None.
        wo_bias: Biases [E, h], or None.
        expert_bias: Bias [E] of the scores that are compared, or None.
        num_experts: Number E of experts.
        num_experts_per_tok: Experts of each token.
        activation_type: Activation of wi_0's output.
        score_function: "softmax" or "sigmoid".
        use_pre_softmax: Take the weights of a softmax over all experts.
        num_groups: Groups of experts; a number below 1 disables the limit.
        group_topk: Groups that the experts of a token come from.
        scaling_factor: Factor of the weights.
        aux_loss_coeff: Factor of the balancing loss; 0 returns None.
        apply_topk_weights_early: Multiply the hidden features by the weights of a token, not the output.
        ep_axis: Mesh axis over which experts and tokens are sharded.
        data_parallelism_axes: Further mesh axes over which tokens are sharded.
        input_axes: Logical names of the axes of x.
        gate_kernel_axes: Logical names of the axes of gate_kernel.
        wi_kernel_axes: Logical names of the axes of wi_0 and wi_1.
        wo_kernel_axes: Logical names of the axes of wo.
        quantizer_sets: Quantizers of wi_0, wi_1 and wo, created with n_groups.
        dtype: Dtype of the computation, by default that of x.
    """
    check_values("x", x)
    check_values("gate_kernel", gate_kernel)
    for name, value in (("num_experts", num_experts), ("num_experts_per_tok", num_experts_per_tok)):
        whole(name, value)
    if x.ndim != 3 or gate_kernel.shape != (x.shape[-1], num_experts):
        raise ValueError(
            f"x {x.shape} and gate_kernel {gate_kernel.shape}; give [b, s, h] and [h, {num_experts}]"
        )
    for name, value in (("scaling_factor", scaling_factor), ("aux_loss_coeff", aux_loss_coeff)):
        number(name, value)
    switch("apply_topk_weights_early", apply_topk_weights_early)
    check_activation((activation_type, "linear"), (2, 1))
    if not isinstance(quantizer_sets, (tuple, list)) or len(quantizer_sets) != 3:
        raise ValueError(f"quantizer_sets={described(quantizer_sets)}; give three, of wi_0, wi_1 and wo")
    for quantizer_set in quantizer_sets:
        check_instance("quantizer_sets", quantizer_set, QuantizerSet)
    for name, axes, ndim in (
        ("input_axes", input_axes, x.ndim), ("gate_kernel_axes", gate_kernel_axes, 2),
        ("wi_kernel_axes", wi_kernel_axes, 3), ("wo_kernel_axes", wo_kernel_axes, 3),
    ):  # fmt: skip
        check_axis_names(name, axes, ndim)
    text_or_none("ep_axis", ep_axis)
    check_axis("ep_axis", ep_axis)
    for axis in data_parallelism_axes:
        check_axis("data_parallelism_axes", axis)
    dtype = None if dtype is None else check_floating("dtype", dtype)
    devices = get_mesh_axis_size(ep_axis)
    if num_experts % devices:
        raise ValueError(
            f"ep_axis={ep_axis!r} has {devices} devices, which do not divide num_experts={num_experts}"
        )
    routing = Routing(
        num_experts, num_experts_per_tok, use_pre_softmax, num_groups, group_topk, float(scaling_factor),
        score_function, float(aux_loss_coeff),
    )  # fmt: skip
    params = {
        "wi_0": wi_0, "wi_1": wi_1, "wo": wo, "wi_0_bias": wi_0_bias, "wi_1_bias": wi_1_bias, "wo_bias": wo_bias,
    }  # fmt: skip
    names = {"wi_0": wi_kernel_axes, "wi_1": wi_kernel_axes, "wo": wo_kernel_axes}

    def mixture(x: Array, gate_kernel: Array, bias: Array | None, params: Any, sets: Any) -> Any:
        x = with_sharding_constraint_by_logical_axes(
            x if dtype is None else x.astype(dtype), input_axes or None
        )
        gate_kernel = with_sharding_constraint_by_logical_axes(gate_kernel, gate_kernel_axes or None)
        experts = Experts(activation_type, apply_topk_weights_early, sets)
        if ep_axis is None or devices == 1:
            return _on_one_device(x, gate_kernel, bias, _constrained(params, names), routing, experts)
        cfg = EpConfig(num_experts, devices, ep_axis)
        return _on_several_devices(
            x, gate_kernel, bias, params, routing, experts, cfg, tuple(data_parallelism_axes)
        )

    replicated = PartitionSpec()
    return with_automatic_axes(
        mixture, x, gate_kernel, expert_bias, params, tuple(quantizer_sets),
        out=lambda: (unique_axes(explicit_entries(x)), replicated if routing.aux_loss_coeff else None, replicated),
    )  # fmt: skip


def _constrained(params: dict[str, Any], names: dict[str, Axes]) -> dict[str, Any]:
    """Constrain the kernels of experts that have a logical axis with a rule of Flax."""
    from flax import linen

    ruled = {axis for axis, _ in linen.get_logical_axis_rules()}
    return params | {
        name: with_sharding_constraint_by_logical_axes(params[name], axes)
        for name, axes in names.items()
        if ruled & set(axes)
    }


def _on_one_device(
    x: Array, gate_kernel: Array, expert_bias: Array | None, params: Any, routing: Routing, experts: Experts
) -> tuple[Array, Array | None, Array]:
    """Choose experts for all tokens, and compute the experts without an exchange of tokens."""
    tokens = x.reshape(-1, x.shape[-1])
    logits, weights, chosen = _routed(tokens, gate_kernel, expert_bias, routing)
    slots = tokens.shape[0] * routing.topk
    rows, row_weights, row_id_map, pads, _ = token_dispatch(tokens, chosen, slots, weights, _ALIGN_SIZE)
    assert row_weights is not None
    outputs = experts(params, rows, row_weights, chosen.sum(axis=0, dtype=jnp.int32))
    y = token_combine(outputs, row_id_map, None if experts.weights_early else weights, pads)
    return y.reshape(x.shape), routing.aux_loss(logits, chosen, ()), jnp.asarray(slots, jnp.int32)


def _routed(
    x: Array, gate_kernel: Array, expert_bias: Array | None, routing: Routing
) -> tuple[Array, Array, Array]:
    """Return (logits, weights, choice) [T, E] of tokens [T, h], in float32: rounding must not change the choice."""
    logits = jnp.matmul(
        x.astype(jnp.float32), gate_kernel.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return logits, *routing(logits, expert_bias)


def _on_several_devices(
    x: Array,
    gate_kernel: Array,
    expert_bias: Array | None,
    params: Any,
    routing: Routing,
    experts: Experts,
    cfg: EpConfig,
    data_axes: tuple[str, ...],
) -> tuple[Array, Array | None, Array]:
    """Choose experts for the tokens of every device, exchange the tokens, and sum the returned results.

    An expert's rows are sharded over data_axes, those of all experts over cfg.axis too. XLA shards over other axes.
    """
    data_axes = tuple(axis for axis in data_axes if axis != cfg.axis)
    batch = (*data_axes, cfg.axis)

    def local(
        place: Array, x: Array, gate_kernel: Array, bias: Array | None, params: Any, sets: Any
    ) -> tuple[Array, Any, Array]:
        sets = jax.tree.map(
            lambda leaf: (
                leaf
                if jnp.issubdtype(leaf.dtype, jnp.floating)
                else jax.random.key_data(jax.random.fold_in(key_of(leaf), place[0]))
            ),
            sets,
        )
        own = replace(
            experts,
            quantizer_sets=tuple(_of_own(s, cfg.local_experts, data_axes) for s in sets),
            over=data_axes,
        )
        tokens = x.reshape(-1, x.shape[-1])
        logits, weights, chosen = _routed(tokens, gate_kernel, bias, routing)
        picked, of_picked = routing_map_to_selected_experts(weights, chosen, routing.topk)
        capacity = tokens.shape[0] * cfg.devices * min(routing.topk, cfg.local_experts)
        rows, row_weights, handle, counts, total = dispatched(
            cfg, picked, tokens, of_picked, capacity, _ALIGN_SIZE
        )
        made = returned(cfg, handle, own(params, rows, row_weights, counts)).astype(jnp.float32)
        if not experts.weights_early:
            made = made * of_picked[..., None].astype(jnp.float32)
        y = made.sum(axis=1).astype(x.dtype)
        return y.reshape(x.shape), routing.aux_loss(logits, chosen, batch), total[None]

    whole_axes, by_expert = PartitionSpec(), PartitionSpec(cfg.axis)
    # States are sharded by expert; random keys are replicated.
    # The leaves of a quantizer are floating-point states and random keys.
    of_sets = jax.tree.map(
        lambda leaf: by_expert if jnp.issubdtype(leaf.dtype, jnp.floating) else whole_axes,
        experts.quantizer_sets,
    )
    # The device's index is an argument: lax.axis_index is not lowered if an outer shard_map has part of the mesh.
    places = jnp.arange(math.prod(get_mesh_axis_size(axis) for axis in batch), dtype=jnp.int32)
    # A shard_map of a part of the mesh's axes runs in compiled programs only, and hides the sharding over the other
    # axes from kernels; therefore it includes the axes with one device.
    mapped = jax.shard_map(
        local,
        mesh=mesh_in_use(),
        in_specs=(PartitionSpec(batch), PartitionSpec(batch), whole_axes, whole_axes, by_expert, of_sets),
        out_specs=(PartitionSpec(batch), whole_axes, PartitionSpec(batch)),
        axis_names={*batch, *(name for name, size in automatic_axes().items() if size == 1)},
        check_vma=False,
    )
    return jax.jit(mapped)(places, x, gate_kernel, expert_bias, params, experts.quantizer_sets)


def _of_own(quantizers: QuantizerSet, count: int, axes: tuple[str, ...]) -> QuantizerSet:
    """Return the part of a set for this device's experts, whose states the devices along axes share."""
    parts = (quantizers.x, quantizers.kernel, quantizers.dgrad)
    own = [None if part is None else GroupedQuantizer(part.quantizer, count) for part in parts]
    return over_devices(QuantizerSet(*own), axes, merges=False)
