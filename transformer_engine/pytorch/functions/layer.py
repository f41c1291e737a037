"""Run the passes of linear layers in autograd functions, and save the operands for their backward passes.

A layer kind has two functions without autograd (`LayerFunctions`) and an autograd function, whose methods
call `run_and_save` and `run_backward`. `run_without_saving` runs a call that needs no gradient. All three run the
compiled passes `spec.compiled` (`fast/compiled.py`) if there are any; otherwise `forward_results` and
`backward_results` call the two functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fast.compiled import CompiledLayer, CompiledPass, compiles_on
from ..offload.marks import active as offloading
from ..offload.marks import mark_ready
from ..runtime.autograd import check_transforms, disable_autocast
from ..runtime.tracing import reshape_result
from ..tensor.quantizer import Quantizer, TransposedValues
from .linear_spec import RECOMPUTED, SAVED, LayerSpec, LinearSpec
from .saving import pack, save_tensors, take_saved, unpack


class LayerFunctions(NamedTuple):
    """Forward and backward function of one layer kind, without autograd.

    Attributes:
        name: Layer name in messages.
        forward: Function (*tensors, spec) -> (*results [M, N], *saved values). A saved value that no gradient
            needs is None.
        backward: Function (operands, spec) -> gradients of the tensors. `operands` is a list, which the
            function empties: the output gradients, one per result; in norm layers the gradient of the
            residual, or None; then the saved values.
        num_results: Number of results of `forward`.
        num_gradients: Number of operands of `backward` before the saved values.
    """

    name: str
    forward: Callable[..., Sequence[Any]]
    backward: Callable[..., Sequence[Any]]
    num_results: int
    num_gradients: int


# Stack of interceptors. If it is not empty, the last one calls each pass function: runner(pass name,
# function, arguments, result count) returns what the function returns. The count separates the results of a
# forward pass from its saved values; it is None for a backward pass. `te.explain` adds a runner.
runners: list[Callable[[str, Callable[..., Any], tuple[Any, ...], int | None], Any]] = []


def run_without_saving(
    functions: LayerFunctions, spec: LayerSpec, tensors: Sequence[Any]
) -> Sequence[Any]:
    """Run the forward pass without saving; return its results."""
    check_transforms(functions.name, tensors)
    if spec.compiled is not None:
        return spec.compiled.forward([*tensors], spec, spec.cached_tensors)[0]
    return _forward_without_autocast(functions, spec, tensors)[0]


def run_and_save(
    functions: LayerFunctions, ctx: Any, spec: LayerSpec, tensors: Sequence[Any]
) -> Sequence[Any]:
    """Run the forward pass of a node, save the operands for its backward pass, and return the results.

    Args:
        functions: The passes.
        ctx: The node.
        spec: Call settings.
        tensors: Input and parameters; None for absent ones.
    """
    ctx.spec, ctx.input_shape = spec, tensors[0].shape
    if spec.compiled is not None:
        outputs, kind = spec.compiled.forward([*tensors], spec, spec.cached_tensors)
        save_tensors(ctx, outputs[functions.num_results :])
        spec.compiled.save_kind(ctx, kind)
        return outputs[: functions.num_results]
    results, saved = forward_results(functions, spec, tensors)
    saved_tensors, ctx.forms = pack(*saved)
    save_tensors(ctx, saved_tensors)
    return results


def run_backward(
    functions: LayerFunctions, ctx: Any, grads: Sequence[Tensor | None]
) -> Sequence[Any]:
    """Run the backward pass of a node; return the gradients of its tensors.

    With delayed scaling, `scale_update` queues a callback for the end of the backward pass through
    the whole graph, which updates the multipliers for dy.
    """
    spec: LayerSpec = ctx.spec
    if spec.compiled is not None:
        gradients = spec.compiled.backward(ctx, [*grads, *take_saved(ctx, False)], len(grads), spec)
    else:
        operands = [*grads, *unpack(take_saved(ctx, False), ctx.forms)]
        gradients = backward_results(functions, spec, operands, ctx.input_shape)
    if spec.scale_update is not None:
        spec.scale_update.run()
    return gradients


def backward_results(
    functions: LayerFunctions, spec: LayerSpec, operands: list[Any], shape: torch.Size
) -> Sequence[Any]:
    """Gradients for a layer's tensors; the input gradient gets the input's shape. `operands` is emptied."""
    if runners:
        dx, *gradients = runners[-1](
            f"backward pass of {functions.name}", functions.backward, (operands, spec), None
        )
    else:
        dx, *gradients = functions.backward(operands, spec)
    return [dx if dx is None or dx.shape == shape else dx.view(shape), *gradients]


def forward_results(
    functions: LayerFunctions, spec: LayerSpec, tensors: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Forward-pass results with the leading input dimensions, and the buffers to save."""
    x: Any = tensors[0]
    if offloading.synchronizer is not None:
        mark_ready(x)
    count = functions.num_results
    if runners:
        outputs = runners[-1](
            f"forward pass of {functions.name}", functions.forward, (*tensors, spec), count
        )
    else:
        outputs = functions.forward(*tensors, spec)
    if len(x.shape) == 2 and not torch.compiler.is_compiling():
        return outputs[:count], outputs[count:]  # results are matrices
    return _restore_shape([*outputs[:count]], outputs[count:], tuple(x.shape[:-1]))


# Autograd nodes run without torch.autocast; calls without gradients have no node.
_forward_without_autocast = disable_autocast(forward_results)


def compile_layer(
    functions: LayerFunctions, spec: LayerSpec, device: torch.device
) -> CompiledLayer | None:
    """Create the compiled passes of a layer; None on a CPU, in a graph and for quantized results.

    A compiled pass repeats launches of kernels, products and collectives. It is compiled in the second call
    of each kind (`CompiledPass`).
    """
    if not compiles_on(device):
        return None
    linears = spec.linears()
    for linear in linears:
        if (
            linear.traced
            or linear.output_quantizer is not None
            or linear.grad_input_quantizer is not None
        ):
            return None

    def forward(tensors: list[Any], spec: LayerSpec) -> tuple[tuple[Any, ...], list[Any]]:
        results, saved = _forward_without_autocast(functions, spec, tensors)
        saved_tensors, metadata = pack(*saved) if spec.needs_grad else ([], [])
        return (*results, *saved_tensors), metadata

    def backward(tensors: list[Any], spec: LayerSpec, ctx: Any) -> tuple[tuple[Any, ...], None]:
        count = functions.num_gradients
        operands = tensors[:count] + unpack(tensors[count:], ctx.forms)
        tensors.clear()
        return tuple(backward_results(functions, spec, operands, ctx.input_shape)), None

    return compiled_passes(linears, device, forward, backward)


def compiled_passes(
    linears: Collection[LinearSpec],
    device: torch.device,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
) -> CompiledLayer:
    """Create the compiled passes of a layer, or of a chain in `te.ops`.

    Args:
        linears: Specs of its linear products, whose quantizers belong to the cache key.
        device: Tensor device.
        forward, backward: Functions that run the steps of the passes, on tensors or on symbols.
    """
    forward_quantizers = [
        quantizer
        for linear in linears
        for quantizer in (linear.input_quantizer, linear.weight_quantizer)
    ]
    backward_quantizers = [
        quantizer for linear in linears for quantizer in _backward_quantizers(linear)
    ]
    # A gradient that is delayed, or added to main_grad, has effects that a compiled pass would not repeat.
    returns_gradients = all(
        not linear.weight_gradient.fused and linear.weight_gradient.store is None
        for linear in linears
    )
    return CompiledLayer(
        CompiledPass(forward, device, forward_quantizers),
        CompiledPass(backward, device if returns_gradients else None, backward_quantizers),
    )


def _backward_quantizers(linear: LinearSpec) -> Iterator[Quantizer]:
    """Quantizers that the backward pass of a linear layer calls."""
    yield linear.grad_output_quantizer
    if linear.keep_input or linear.input_columns != SAVED:
        yield linear.input_quantizer
    if linear.weight_columns == RECOMPUTED:
        yield linear.weight_quantizer


def leading_shape(leading: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Leading dimensions of a result with `rows` rows, for an input whose leading dimensions are `leading`.

    Sequence parallelism multiplies or divides the row count. The first dimension then changes by the same
    factor.
    """
    input_rows = 1
    for size in leading:
        input_rows = input_rows * size
    if rows == input_rows or not leading:
        return leading
    return (leading[0] * rows // input_rows, *leading[1:])


def _restore_shape(
    results: list[Any], saved: Sequence[Any], leading: tuple[int, ...]
) -> tuple[list[Any], Sequence[Any]]:
    """Results with the leading input dimensions, and the saved buffers."""
    # Results get the leading dimensions of the input. If a result is also saved, the returned tensor itself
    # is saved, so that autograd detects writes by the caller. A saved view of the returned tensor would keep
    # its node alive.
    traced = torch.compiler.is_compiling()
    result: Any
    for i, result in enumerate(results):
        if result is None:
            continue
        shape = (*leading_shape(leading, result.shape[0]), result.shape[-1])
        # torch 2.11 traces a zero backward for an output that is the product itself.
        if result.shape == shape and not traced:
            continue
        # A quantized result without autograd (`Quantizer.internal`) is a storage, not a tensor.
        # A compiler saves the result itself: only a view keeps callers from writing to it.
        is_view = not isinstance(result, Tensor) or (traced and _is_saved(result, saved))
        results[i] = result.view(shape) if is_view else reshape_result(result, shape)
        if not traced:
            saved = [_replace_result(value, result, results[i]) for value in saved]
    return results, saved


def _is_saved(result: Any, saved: Sequence[Any]) -> bool:
    """Whether a result, or `TransposedValues` of it, is among the saved values."""
    return any(
        value is result or (isinstance(value, TransposedValues) and value.values is result)
        for value in saved
    )


def _replace_result(saved: Any, result: Any, returned: Any) -> Any:
    """Replace a saved value that is the result, or `TransposedValues` of it, by `returned`; return other values."""
    value: Any = saved
    if saved is result:
        value = returned
    elif isinstance(saved, TransposedValues) and saved.values is result:
        value = TransposedValues(returned)
    if value is not saved:
        mark_ready(value)
    return value
