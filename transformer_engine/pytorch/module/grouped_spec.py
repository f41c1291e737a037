"""Spec for a GroupedLinear call kind, and why a call is computed in a loop over the groups."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...common.recipe import recipe_described_as, recipe_description
from ..distributed.tensor_parallel import TensorParallel
from ..functions.caller_buffers import NO_BUFFERS
from ..functions.grouped_call import GroupedCall, GroupedQuantizers, GroupedSpec, StackMember
from ..functions.grouped_linear import (
    group_tensors,
    grouped_linear_backward,
    grouped_linear_forward,
    separate_gradients,
)
from ..functions.grouped_operators import (
    GroupedKernel,
    TracedGroups,
    forward_in_graph,
    register,
)
from ..functions.grouped_request import (
    CALIBRATION,
    DELAYED_WEIGHT_GRADIENTS,
    IRREGULAR,
    OTHER_BACKWARD,
    OTHER_PARAMETERS,
    QUANTIZED_PARAMETERS,
    SAVED_INPUT,
    SINGLE_QUANTIZERS,
    TABLE,
    TOGETHER,
    GroupedRequest,
    environment_request,
)
from ..functions.linear_spec import (
    UNQUANTIZED,
    LinearSpec,
    ProductQuantizers,
    replace_fields,
)
from ..quantization.autocast import AutocastState, current, reinstate, snapshot
from ..runtime.device import autocast_dtype
from ..runtime.tracing import constant_while_tracing
from .arguments import CallSwitches
from .numerics import module_of_key
from .specs import Call, Facts, check_call, product_spec, scale_update


def grouped_spec_of_call(call: Call) -> GroupedSpec:
    """Settings for a call kind, which do not depend on the groups' row counts."""
    config: Any = call.config
    check_call(call, config.in_features)
    parameters = call.parameters
    of_weights, of_biases = (
        parameters[: len(config.weight_names)],
        parameters[len(config.weight_names) :],
    )
    groups = _groups(call, call.active.products, of_weights, of_biases)
    quantizes = call.active.quantizes
    features, quantizers, request, in_one_launch = (), GroupedQuantizers(), None, False
    if not call.traced:
        if quantizes:
            products = call.active.products
            quantizers = GroupedQuantizers.merged(
                [product.input for product in products],
                [product.weight for product in products],
                [product.grad_output for product in products],
            )
        features = _features(call, of_weights, of_biases, quantizers, groups[0].backward_operands)
        request = _request(call, features, of_weights[0], quantizers)
        in_one_launch = TABLE.name_of(request) == TOGETHER
    # A gradient is computed if some group needs it.
    first = groups[0]
    first = replace_fields(
        first,
        needs_grad_weight=any(group.needs_grad_weight for group in groups),
        needs_grad_bias=any(group.needs_grad_bias for group in groups),
        is_unquantized=all(group.is_unquantized for group in groups),
    )
    return GroupedSpec(
        groups,
        _groups(call, call.active.unquantized_products, of_weights, of_biases) if quantizes else (),
        first,
        (config.out_features, config.in_features),
        config.single_grouped_weight,
        config.single_grouped_bias and config.use_bias and not config.return_bias,
        in_one_launch,
        request,
        quantizers,
        call.needs_grad,
        scale_update(call, call.needs_grad),
        tuple({name for group in groups if group.inspector for name in group.inspector.results}),
    )


def _groups(
    call: Call,
    products: tuple[ProductQuantizers, ...],
    of_weights: Sequence[Facts | None],
    of_biases: Sequence[Facts | None],
) -> tuple[LinearSpec, ...]:
    """Return the product spec per group. Communication is the caller's."""
    config: Any = call.config
    count = config.num_gemms
    weights = list(of_weights) * count if config.single_grouped_weight else of_weights
    biases = list(of_biases) * count if config.single_grouped_bias else of_biases
    first_weight = weights[0]
    assert first_weight is not None
    first = product_spec(
        call,
        quantizers=products[0],
        parallel=TensorParallel(),
        needs=(False, False, False),
        update=None,
        weight=first_weight,
    )
    specs: list[LinearSpec] = []
    for i, (product, weight, bias) in enumerate(zip(products, weights, biases, strict=True)):
        assert weight is not None
        gradient = first.weight_gradient
        if call.targets is not None:
            (target,) = call.targets[i]
            member = StackMember(target, i) if config.single_grouped_weight else target
            gradient = replace(gradient, parameters=(member,))
        specs.append(
            replace_fields(
                first,
                input_quantizer=product.input,
                weight_quantizer=product.weight,
                grad_output_quantizer=product.grad_output,
                weight_gradient=gradient,
                needs_grad_input=call.records and call.input.requires_grad,
                needs_grad_weight=call.records and weight.requires_grad,
                needs_grad_bias=call.records
                and bias is not None
                and bias.requires_grad
                and not config.return_bias,
                is_unquantized=product is UNQUANTIZED
                and not (weight.is_quantized or call.input.is_quantized),
                inspector=product.inspector,
            )
        )
    return tuple(specs)


def _features(
    call: Call,
    of_weights: Sequence[Facts | None],
    of_biases: Sequence[Facts | None],
    quantizers: GroupedQuantizers,
    backward: str,
) -> tuple[str, ...]:
    """Return the features in every call of this kind that one launch per step does not support."""
    config: Any = call.config
    kinds = {facts.kind for facts in (*of_weights, *of_biases) if facts is not None}
    found = {
        DELAYED_WEIGHT_GRADIENTS: call.store is not None,
        SAVED_INPUT: config.save_original_input,
        QUANTIZED_PARAMETERS: config.primary_weights_in_fp8,
        CALIBRATION: not call.active.quantizes and call.active.recipe is not None,
        OTHER_PARAMETERS: not kinds <= {torch.nn.Parameter, *_plain_stacks(config)},
        IRREGULAR: len(set(of_weights)) > 1 or len(set(of_biases)) > 1,
        SINGLE_QUANTIZERS: quantizers.input is None
        and (call.active.quantizes or any(product.inspector for product in call.active.products)),
        OTHER_BACKWARD: backward != "quantized",
    }
    return tuple([feature for feature, used in found.items() if used])


def _plain_stacks(config: Any) -> tuple[type, ...]:
    """Class for the values of single parameters, which are plain matrix groups."""
    return (torch.Tensor,) * (config.single_grouped_weight or config.single_grouped_bias)


def _request(
    call: Call, features: tuple[str, ...], weight: Facts | None, quantizers: GroupedQuantizers
) -> GroupedRequest:
    """Return the request to `grouped_request.TABLE` for a call with rows."""
    config: Any = call.config
    x = call.input
    assert weight is not None
    return GroupedRequest(
        features,
        environment_request(),
        x.kind in (torch.Tensor, torch.nn.Parameter),
        True,
        x.shape[-1],
        x.dtype,
        x.device,
        (config.out_features, config.in_features),
        weight.device,
        call.autocast or weight.dtype,
        None if call.active.quantizes else weight.dtype,
        quantizers.multiple,
    )


def traced_call(
    module: Any,
    spec: GroupedSpec,
    x: Tensor,
    rows: Tensor,
    tensors: tuple[Sequence[Tensor], Sequence[Tensor]],
    is_first_microbatch: bool | None,
) -> Tensor:
    """Return y [M, N] for a traced call whose row counts are a tensor, computed by one operator.

    Args:
        module: The layer.
        spec: The call settings while traced.
        x: Input [M, K].
        rows: Rows per group.
        tensors: Weights, and biases to add.
        is_first_microbatch: The call argument.

    Raises:
        NotImplementedError: The call has effects that operators cannot have.
    """
    state = current()
    active = state.enabled or state.calibrating
    if (
        is_first_microbatch is not None
        and state.enabled
        and module.numerics.delayed_states("scaling_fwd")
    ):
        raise NotImplementedError(
            "is_first_microbatch under delayed scaling in a compiled graph needs m_splits as a list; give "
            "m_splits.tolist(), or leave is_first_microbatch None"
        )
    states = [module.numerics.delayed_states(key) if active else () for key in _STATES]
    key = _register_while_tracing(
        module.tracing_key,
        recipe_description(state.recipe) if active else None,
        (state.enabled, state.calibrating, torch.is_grad_enabled(), x.requires_grad),
        state.group,
        is_first_microbatch,
        (x.dtype, x.device, autocast_dtype(x.device.type)),
        (len(tensors[0]), len(tensors[1])),
    )
    operands = [*tensors[0], *tensors[1]]
    if not spec.needs_grad:
        return forward_in_graph(key, x, rows, operands, states[0])[0]
    return TracedGroups.apply(x, rows, key, states, spec.scale_update, *operands)


_STATES = ("scaling_fwd", "scaling_bwd")


@constant_while_tracing
def _register_while_tracing(
    tracing_key: str,
    recipe: str | None,
    flags: tuple[bool, bool, bool, bool],
    group: Any,
    is_first_microbatch: bool | None,
    facts: tuple[torch.dtype, torch.device, torch.dtype | None],
    counts: tuple[int, int],
) -> str:
    """Return the operator key for a call kind; the arguments describe it, see `traced_call`."""
    module = module_of_key(tracing_key)
    enabled, calibrating, grad, grad_input = flags
    dtype, device, autocast = facts
    state = AutocastState(
        enabled, calibrating, None if recipe is None else recipe_described_as(recipe), group
    )
    before = snapshot()
    reinstate((state, False))
    try:
        with (
            torch.set_grad_enabled(grad),
            torch.autocast(device.type, autocast, enabled=autocast is not None),
        ):
            x = torch.empty(
                0, module.in_features, dtype=dtype, device=device, requires_grad=grad_input
            )
            params = module._tensors()
            spec: GroupedSpec = module.spec(
                x, params, CallSwitches(is_first_microbatch), any_rows=True
            )
    finally:
        reinstate(before)
    groups = spec.groups
    weights = [group.needs_grad_weight for group in groups][: counts[0]]
    biases = [group.needs_grad_bias for group in groups][: counts[1]]
    owner = weakref.ref(module)

    def call(spec: GroupedSpec, rows: Tensor, x: Tensor, tensors: Sequence[Tensor]) -> GroupedCall:
        layer: Any = owner()
        return layer._call(spec, x, rows, tuple(tensors[: counts[0]]), None, NO_BUFFERS)

    def group_states(key: str) -> tuple[Any, ...]:
        return module.numerics.delayed_states(key) if recipe is not None else ()

    def forward(call: GroupedCall, inputs: Sequence[Tensor], **options: bool) -> Sequence[Any]:
        x, *tensors = inputs
        operands = group_tensors(x, tensors[: counts[0]], tensors[counts[0] :], call)
        return grouped_linear_forward(*operands, call=call, **options)

    def backward(call: GroupedCall, operands: list[Any]) -> list[Tensor | None]:
        dx, *gradients = grouped_linear_backward(operands, call)
        return [dx, *separate_gradients(gradients, counts)]

    kernel = GroupedKernel(
        spec=spec,
        inference=lambda call, inputs: forward(call, inputs, saves=False)[0],
        again=lambda call, inputs: [*forward(call, inputs, compute_y=False)[1:]],
        backward=backward,
        present=(groups[0].needs_grad_input, *weights, *biases),
        call=call,
        states=(group_states("scaling_fwd"), group_states("scaling_bwd")),
    )
    return register(module, kernel)
