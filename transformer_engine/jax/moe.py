"""y = sum over the chosen experts of weight * (act(x @ gate[e]) * (x @ up[e])) @ wo[e]: a mixture of experts.

The gate and up kernels are the two halves of wi.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ..common.checks import described, number, switch, text_or_none, whole
from ..common.formats import ceil_div, round_up
from .activation import check_activation
from .ep import bootstrap_capacity, check_sizes_of_bootstrap
from .functions.ep_exchange import EpConfig, dispatch_tokens, returned
from .functions.moe_experts import ALIGN_SIZE, ExpertMlp, Routing
from .permutation import (
    align_counts,
    routing_map_to_selected_experts,
    token_combine,
    token_dispatch,
)
from .quantize.grouped import GroupedQuantizer
from .quantize.quantizers import QuantizerSet, noop_quantizer_set
from .quantize.settings import random_key
from .quantize.sharing import share_over_devices
from .runtime.checks import (
    check_axis_names,
    check_floating,
    check_instance,
    check_shaped,
    check_values,
)
from .runtime.explicit_axes import explicit_entries, unique_axes, with_automatic_axes
from .sharding import (
    automatic_axes,
    check_axis,
    get_mesh_axis_size,
    mesh_in_use,
    with_sharding_constraint_by_logical_axes,
)

__all__ = ["get_moe_recv_capacity_per_rank", "moe"]

Axes = tuple[str | None, ...]
_ALIGN_SIZE = ALIGN_SIZE  # which code for NVIDIA's engine reads here


def _with_halves(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `moe` to also accept the kernels wi_0 and wi_1 [E, h, f] in place of wi.

    The positional arguments are then x, gate_kernel, wi_0, wi_1, wo, wi_0_bias, wi_1_bias, wo_bias and expert_bias.
    They are recognized by wo, a three-axis array where otherwise a bias is, or by keywords.
    """

    @functools.wraps(function)
    def moe(*arguments: Any, **options: Any) -> Any:
        halves = options.keys() & {"wi_0", "wi_1", "wi_0_bias", "wi_1_bias"}
        of_three_axes = len(arguments) > 4 and len(getattr(arguments[4], "shape", ())) == 3
        if not halves and not of_three_axes and not (len(arguments) == 4 and "wo" in options):
            return function(*arguments, **options)
        names = (
            "x",
            "gate_kernel",
            "wi_0",
            "wi_1",
            "wo",
            "wi_0_bias",
            "wi_1_bias",
            "wo_bias",
            "expert_bias",
        )
        if len(arguments) > len(names):
            raise TypeError(
                f"moe() takes {len(names)} positional arguments, {len(arguments)} were given"
            )
        both = {names[index] for index in range(len(arguments))} & options.keys()
        if both or "wi" in options or "wi_bias" in options:
            raise TypeError(
                f"moe() got {', '.join(sorted(both)) or 'wi'} twice; pass wi, or wi_0 and wi_1, each once"
            )
        keywords = dict(zip(names, arguments, strict=False)) | options
        kernels = keywords.pop("wi_0", None), keywords.pop("wi_1", None)
        if None in kernels:
            raise TypeError("moe() got one of wi_0 and wi_1; pass both, or wi")
        biases = keywords.pop("wi_0_bias", None), keywords.pop("wi_1_bias", None)
        keywords.setdefault("quantizer_sets", (noop_quantizer_set,) * 3)
        return function(wi=kernels, wi_bias=biases, **keywords)

    return moe


@_with_halves
def moe(
    x: Array,
    gate_kernel: Array,
    wi: Array,
    wo: Array,
    wi_bias: Array | None = None,
    wo_bias: Array | None = None,
    expert_bias: Array | None = None,
    *,
    num_experts: int,
    num_experts_per_tok: int,
    activation_type: str = "silu",
    score_function: Any = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    aux_loss_coeff: float = 0.0,
    apply_topk_weights_early: bool = False,
    ep_axis: str | None = None,
    data_parallelism_axes: tuple[str, ...] = (),
    input_axes: Axes = (),
    gate_kernel_axes: Axes = (),
    wi_kernel_axes: Axes = ("exp", "embed", "mlp"),
    wo_kernel_axes: Axes = ("exp", "mlp", "embed"),
    quantizer_sets: tuple[QuantizerSet, ...] = (noop_quantizer_set,) * 2,
    dtype: Any = None,
    recv_capacity_per_rank: int | None = None,
) -> tuple[Array, Array | None, Array]:
    """Mixture of experts: (y [b, s, h], the balancing loss or None, rows that this device's experts received).

    The former kernels wi_0 and wi_1 [E, h, f], with biases wi_0_bias and wi_1_bias and three quantizer_sets, are also
    accepted in place of wi.

    Args:
        x: Input [b, s, h].
        gate_kernel: Router kernel [h, E].
        wi: Kernels [E, h, 2 f]: the activation's kernels, then the kernels of the other factor.
        wo: Kernels [E, f, h].
        wi_bias: Biases [E, 2 f], or None.
        wo_bias: Biases [E, h], or None.
        expert_bias: Bias [E] for the scores that are compared, or None.
        num_experts: Number E of experts.
        num_experts_per_tok: Experts per token.
        activation_type: Activation for the first f hidden features.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        use_pre_softmax: Take the weights from a softmax over all experts.
        num_groups: Expert groups; None or a number below 1 disables the limit.
        group_topk: Groups that the experts of a token come from.
        scaling_factor: Factor of the weights.
        aux_loss_coeff: Factor for the balancing loss; 0 returns None.
        apply_topk_weights_early: Multiply the hidden features by the weights of a token, not the output.
        ep_axis: Mesh axis over which experts and tokens are sharded.
        data_parallelism_axes: Further mesh axes over which tokens are sharded.
        input_axes: Logical axis names of x.
        gate_kernel_axes: Logical axis names of gate_kernel.
        wi_kernel_axes: Logical axis names of wi.
        wo_kernel_axes: Logical axis names of wo.
        quantizer_sets: Quantizers for wi and wo, created with n_groups.
        dtype: dtype of the computation, by default the dtype of x.
        recv_capacity_per_rank: Rows in a device's receive buffer, a multiple of 128; see
            `get_moe_recv_capacity_per_rank`. Rows beyond it are dropped. None receives all rows. Without an exchange
            over ep_axis, no row is dropped.

    Raises:
        ValueError: A shape, a number of experts or recv_capacity_per_rank does not fit.
    """
    _check_tokens(x, gate_kernel, num_experts, num_experts_per_tok)
    for name, value in (("scaling_factor", scaling_factor), ("aux_loss_coeff", aux_loss_coeff)):
        number(name, value)
    switch("apply_topk_weights_early", apply_topk_weights_early)
    check_activation((activation_type, "linear"), (2, 1))
    names = ("wi_0", "wi_1", "wo") if isinstance(wi, tuple) else ("wi", "wo")
    if not isinstance(quantizer_sets, (tuple, list)) or len(quantizer_sets) != len(names):
        raise ValueError(
            f"quantizer_sets={described(quantizer_sets)}; give one for {', '.join(names)}"
        )
    for quantizer_set in quantizer_sets:
        check_instance("quantizer_sets", quantizer_set, QuantizerSet)
    for name, axes, ndim in (
        ("input_axes", input_axes, x.ndim),
        ("gate_kernel_axes", gate_kernel_axes, 2),
        ("wi_kernel_axes", wi_kernel_axes, 3),
        ("wo_kernel_axes", wo_kernel_axes, 3),
    ):
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
    _check_capacity(recv_capacity_per_rank)
    routing = Routing(
        num_experts,
        num_experts_per_tok,
        use_pre_softmax,
        -1 if num_groups is None else num_groups,
        -1 if group_topk is None else group_topk,
        float(scaling_factor),
        score_function,
        float(aux_loss_coeff),
    )
    kernels, biases = (*wi, wo) if isinstance(wi, tuple) else (wi, wo), (wi_bias, wo_bias)
    if isinstance(wi_bias, tuple):
        biases = (*wi_bias, wo_bias)
    params = dict(zip(names, kernels, strict=True))
    params |= {f"{name}_bias": bias for name, bias in zip(names, biases, strict=True)}
    _check_kernels(params, num_experts, x.shape[-1])
    kernel_axes = {name: wo_kernel_axes if name == "wo" else wi_kernel_axes for name in names}

    def mixture(x: Array, gate_kernel: Array, bias: Array | None, params: Any, sets: Any) -> Any:
        x = with_sharding_constraint_by_logical_axes(
            x if dtype is None else x.astype(dtype), input_axes or None
        )
        gate_kernel = with_sharding_constraint_by_logical_axes(
            gate_kernel, gate_kernel_axes or None
        )
        experts = ExpertMlp(activation_type, apply_topk_weights_early, sets)
        if ep_axis is None or devices == 1:
            return _run_on_one_device(
                x, gate_kernel, bias, _constrain_kernels(params, kernel_axes), routing, experts
            )
        cfg = EpConfig(num_experts, devices, ep_axis)
        return _run_on_several_devices(
            x,
            gate_kernel,
            bias,
            params,
            routing,
            experts,
            cfg,
            tuple(data_parallelism_axes),
            recv_capacity_per_rank,
        )

    replicated = PartitionSpec()
    return with_automatic_axes(
        mixture,
        x,
        gate_kernel,
        expert_bias,
        params,
        tuple(quantizer_sets),
        out=lambda: (
            unique_axes(explicit_entries(x)),
            replicated if routing.aux_loss_coeff else None,
            replicated,
        ),
    )


def get_moe_recv_capacity_per_rank(
    *,
    num_experts: int,
    num_experts_per_tok: int,
    max_tokens_per_rank: int,
    ep_size: int,
    recv_capacity_factor: float | None = None,
    alignment: int = ALIGN_SIZE,
) -> int:
    """Compute the row count for a device's receive buffer, a multiple of `alignment`.

    A device receives at most min(k, L) rows for each of the T * ep_size tokens, for L = num_experts / ep_size local
    experts, each of which begins at a multiple of `alignment`.

    Args:
        num_experts: Number of experts on all devices, a multiple of ep_size.
        num_experts_per_tok: Experts k per token.
        max_tokens_per_rank: Tokens T per device.
        ep_size: Number of devices along the expert axis.
        recv_capacity_factor: Multiple, at least 1, of a balanced routing's rows; never more than the worst case.
            None: the worst case's rows, without any dropped row.
        alignment: Number whose multiples the rows of each expert fill.

    Raises:
        ValueError: ep_size does not divide num_experts, or recv_capacity_factor is below 1 or not finite.
    """
    sizes = {
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "ep_size": ep_size,
        "max_tokens_per_rank": max_tokens_per_rank,
        "alignment": alignment,
    }
    for name, value in sizes.items():
        whole(name, value)
    if num_experts % ep_size:
        raise ValueError(
            f"ep_size={ep_size} does not divide num_experts={num_experts}; choose a divisor"
        )
    if num_experts_per_tok > num_experts:
        raise ValueError(
            f"num_experts_per_tok={num_experts_per_tok} of {num_experts} experts; choose at most {num_experts}"
        )
    local, tokens = num_experts // ep_size, ep_size * max_tokens_per_rank
    rows = tokens * min(num_experts_per_tok, local)
    padded_rows = round_up(rows + (alignment - 1) * min(local, rows), alignment)
    worst = min(local * round_up(tokens, alignment), padded_rows)
    if recv_capacity_factor is None:
        return worst
    number("recv_capacity_factor", recv_capacity_factor)
    if recv_capacity_factor < 1:
        raise ValueError(
            f"recv_capacity_factor={recv_capacity_factor} is below 1, the rows of a balanced routing; give at least 1"
        )
    balanced = local * round_up(
        ceil_div(max_tokens_per_rank * num_experts_per_tok, local), alignment
    )
    return min(round_up(math.ceil(balanced * recv_capacity_factor), alignment), worst)


def _check_tokens(x: Array, gate_kernel: Array, num_experts: int, num_experts_per_tok: int) -> None:
    """Raise an error unless tokens [b, s, h] and the router's kernel [h, E] fit together."""
    check_values("x", x)
    check_values("gate_kernel", gate_kernel)
    for name, value in (("num_experts", num_experts), ("num_experts_per_tok", num_experts_per_tok)):
        whole(name, value)
    if x.ndim != 3 or gate_kernel.shape != (x.shape[-1], num_experts):
        raise ValueError(
            f"x {x.shape} and gate_kernel {gate_kernel.shape}; give [b, s, h] and [h, {num_experts}]"
        )


def _check_kernels(params: dict[str, Any], experts: int, hidden: int) -> None:
    """Raise an error unless kernels wi [E, h, 2 f] or wi_0, wi_1 [E, h, f], wo [E, f, h] and biases fit together."""
    check_values("wo", params["wo"])
    inner = params["wo"].shape[1] if params["wo"].ndim == 3 else 0
    shapes = {
        "wi": (hidden, 2 * inner),
        "wi_0": (hidden, inner),
        "wi_1": (hidden, inner),
        "wo": (inner, hidden),
    }
    for name in shapes.keys() & params.keys():
        check_shaped(name, params[name], (experts, *shapes[name]))
        if params[f"{name}_bias"] is not None:
            check_shaped(f"{name}_bias", params[f"{name}_bias"], (experts, shapes[name][1]))


def _check_capacity(recv_capacity_per_rank: int | None) -> None:
    """Raise ValueError unless the capacity is None, or a multiple of ALIGN_SIZE and equal to ep_bootstrap's."""
    if recv_capacity_per_rank is None:
        return
    whole("recv_capacity_per_rank", recv_capacity_per_rank)
    if recv_capacity_per_rank % ALIGN_SIZE:
        raise ValueError(
            f"recv_capacity_per_rank={recv_capacity_per_rank} is not a multiple of {ALIGN_SIZE}; "
            "get_moe_recv_capacity_per_rank returns one"
        )
    capacity = bootstrap_capacity()
    if capacity not in (None, recv_capacity_per_rank):
        raise ValueError(
            f"recv_capacity_per_rank={recv_capacity_per_rank}, and ep_bootstrap was called for {capacity}; pass the "
            "same number"
        )


def _constrain_kernels(params: dict[str, Any], names: dict[str, Axes]) -> dict[str, Any]:
    """Constrain the expert kernels that have a logical axis with a Flax rule."""
    from flax import linen

    ruled = {axis for axis, _ in linen.get_logical_axis_rules()}
    return params | {
        name: with_sharding_constraint_by_logical_axes(params[name], axes)
        for name, axes in names.items()
        if ruled & set(axes)
    }


def _run_on_one_device(
    x: Array,
    gate_kernel: Array,
    expert_bias: Array | None,
    params: Any,
    routing: Routing,
    experts: ExpertMlp,
) -> tuple[Array, Array | None, Array]:
    """Choose experts for all tokens, and compute the experts without a token exchange."""
    tokens = x.reshape(-1, x.shape[-1])
    logits, weights, routing_map = _route_tokens(tokens, gate_kernel, expert_bias, routing)
    slots = tokens.shape[0] * routing.topk
    rows, row_weights, row_id_map, pads, _ = token_dispatch(
        tokens, routing_map, slots, weights, ALIGN_SIZE
    )
    assert row_weights is not None
    outputs = experts(params, rows, row_weights, routing_map.sum(axis=0, dtype=jnp.int32))
    y = token_combine(outputs, row_id_map, None if experts.weights_early else weights, pads)
    return (
        y.reshape(x.shape),
        routing.aux_loss(logits, routing_map, ()),
        jnp.asarray(slots, jnp.int32),
    )


def _route_tokens(
    x: Array, gate_kernel: Array, expert_bias: Array | None, routing: Routing
) -> tuple[Array, Array, Array]:
    """Compute (logits, weights, choice) [T, E] for tokens [T, h], in float32: rounding must not change the choice."""
    logits = jnp.matmul(
        x.astype(jnp.float32), gate_kernel.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return logits, *routing(logits, expert_bias)


def _run_on_several_devices(
    x: Array,
    gate_kernel: Array,
    expert_bias: Array | None,
    params: Any,
    routing: Routing,
    experts: ExpertMlp,
    cfg: EpConfig,
    data_axes: tuple[str, ...],
    recv_capacity: int | None,
) -> tuple[Array, Array | None, Array]:
    """Choose experts for the tokens of every device, exchange the tokens, and sum the returned results.

    Each expert's rows are sharded over data_axes, and the experts also over cfg.axis. XLA shards over other axes.
    """
    data_axes = tuple(axis for axis in data_axes if axis != cfg.axis)
    batch = (*data_axes, cfg.axis)

    def local(
        device_index: Array,
        x: Array,
        gate_kernel: Array,
        bias: Array | None,
        params: Any,
        sets: Any,
    ) -> tuple[Array, Any, Array]:
        sets = jax.tree.map(
            lambda leaf: (
                leaf
                if jnp.issubdtype(leaf.dtype, jnp.floating)
                else jax.random.key_data(jax.random.fold_in(random_key(leaf), device_index[0]))
            ),
            sets,
        )
        local_experts = replace(
            experts,
            quantizer_sets=tuple(_local_quantizers(s, cfg.local_experts, data_axes) for s in sets),
            mesh_axes=data_axes,
        )
        tokens = x.reshape(-1, x.shape[-1])
        logits, weights, routing_map = _route_tokens(tokens, gate_kernel, bias, routing)
        selected_experts, selected_weights = routing_map_to_selected_experts(
            weights, routing_map, routing.topk
        )
        capacity = tokens.shape[0] * cfg.devices * min(routing.topk, cfg.local_experts)
        check_sizes_of_bootstrap(tokens.shape[0], recv_capacity or capacity, tokens.shape[1])
        rows, row_weights, handle, counts, total = dispatch_tokens(
            cfg,
            selected_experts,
            tokens,
            selected_weights,
            recv_capacity or capacity,
            ALIGN_SIZE,
            recv_capacity,
        )
        if recv_capacity is not None:
            ends = jnp.minimum(jnp.cumsum(align_counts(counts, ALIGN_SIZE)), recv_capacity)
            counts = jnp.minimum(counts, jnp.diff(ends, prepend=0)).astype(counts.dtype)
        result = returned(cfg, handle, local_experts(params, rows, row_weights, counts)).astype(
            jnp.float32
        )
        if not experts.weights_early:
            result = result * selected_weights[..., None].astype(jnp.float32)
        y = result.sum(axis=1).astype(x.dtype)
        return y.reshape(x.shape), routing.aux_loss(logits, routing_map, batch), total[None]

    whole_axes, by_expert = PartitionSpec(), PartitionSpec(cfg.axis)
    # States are sharded by expert; random keys are replicated.
    # The leaves of a quantizer are floating-point states and random keys.
    of_sets = jax.tree.map(
        lambda leaf: by_expert if jnp.issubdtype(leaf.dtype, jnp.floating) else whole_axes,
        experts.quantizer_sets,
    )
    # The device index is an argument: lax.axis_index is not lowered if an outer shard_map has part of the mesh.
    places = jnp.arange(math.prod(get_mesh_axis_size(axis) for axis in batch), dtype=jnp.int32)
    # A shard_map over part of the mesh axes runs in compiled programs only, and hides the sharding over the other axes
    # from kernels; therefore it includes the axes with one device.
    mapped = jax.shard_map(
        local,
        mesh=mesh_in_use(),
        in_specs=(
            PartitionSpec(batch),
            PartitionSpec(batch),
            whole_axes,
            whole_axes,
            by_expert,
            of_sets,
        ),
        out_specs=(PartitionSpec(batch), whole_axes, PartitionSpec(batch)),
        axis_names={*batch, *(name for name, size in automatic_axes().items() if size == 1)},
        check_vma=False,
    )
    return jax.jit(mapped)(places, x, gate_kernel, expert_bias, params, experts.quantizer_sets)


def _local_quantizers(quantizers: QuantizerSet, count: int, axes: tuple[str, ...]) -> QuantizerSet:
    """Select the part of a set for this device's experts, whose states the devices along axes share."""
    parts = (quantizers.x, quantizers.kernel, quantizers.dgrad)
    local_sets = [
        None if part is None else GroupedQuantizer(part.quantizer, count) for part in parts
    ]
    return share_over_devices(QuantizerSet(*local_sets), axes, merges=False)
