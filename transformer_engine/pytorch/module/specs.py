"""spec = build(call): settings for one call kind in a layer built from linear products.

`ProductsModule.spec` creates the `Call`, which is the key of the layer's cached specs. A layer's `build`
calls `quantizers_of_call` and, for each product, `product_spec`, which creates the `LinearSpec`.
"""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.checks import switch
from ..distributed.tensor_parallel import TensorParallel
from ..fast import run_backward_on_calling_thread
from ..functions.deferred_columns import with_deferred_columns
from ..functions.layer import LayerFunctions, compile_layer
from ..functions.linear_spec import (
    UNQUANTIZED,
    LinearSpec,
    ProductQuantizers,
    build_linear_spec,
    replace_fields,
    with_gathering,
)
from ..functions.precision import estimates, runs_quantized
from ..functions.scale_update import END_OF_PASS, ScaleUpdate
from ..functions.weight_gradient import WeightGradient, WeightGradStore
from ..quantization.delayed_scaling import histories_agree
from ..runtime.warn_once import warn_once
from ..tensor.quantizer import Quantizer
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage
from .arguments import CallSwitches
from .products import ModuleRecipe


class Facts(NamedTuple):
    """Tensor metadata that a spec may depend on."""

    kind: type
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def is_quantized(self) -> bool:
        return issubclass(self.kind, QuantizedTensorStorage)


# The fields of a tensor's `Facts` as a plain tuple, which is faster to create. torch.compile cannot trace it.
tensor_facts = operator.attrgetter("__class__", "shape", "dtype", "device", "requires_grad")
_is_given = functools.partial(operator.is_not, None)


def metadata_facts(tensor: Tensor) -> Facts:
    """Tensor `Facts`, in a form that torch.compile can trace."""
    return Facts(type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)


def count_repeated_facts(
    tensors: tuple[Tensor | None, ...],
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Facts of consecutive tensors of the same kind, once, and their count."""
    present = list(filter(_is_given, tensors))
    found: list[tuple[Any, int]] = [
        (facts, len(list(members)))
        for facts, members in itertools.groupby(map(tensor_facts, present))
    ]
    if len(present) < len(tensors):  # a layer without biases
        found.append((None, len(tensors) - len(present)))
    facts, counts = zip(*found, strict=True)
    return facts, counts


class Call(NamedTuple):
    """One call kind of a layer. Calls that are equal have the same spec.

    Attributes:
        config: Module settings.
        active: Module quantizers, and the recipe.
        switches: Call switches.
        gradients: Whether autograd records; None if it does not, but a second run of the call may record.
        autocast: torch.autocast dtype, if it is active.
        environment: `env.generation()`.
        store: Delayed weight gradient queue, or None.
        targets: Parameters in each product's weight, compared by identity, if gradients are accumulated into them.
        input: Input metadata.
        parameters: Metadata for the parameters named by `config._tensors`; None for absent parameters.
        make_update: Returns the scale update after a backward pass that does not update all scales: in a traced
            graph, or for a call within a backward pass. The spec for such a call is not cached.
        traced: Whether a compiler is tracing.
    """

    config: Any
    active: ModuleRecipe
    switches: CallSwitches
    gradients: bool | None
    autocast: torch.dtype | None
    environment: int
    store: WeightGradStore | None
    targets: tuple[tuple[torch.nn.Parameter, ...], ...] | None
    input: Facts
    parameters: tuple[Facts | None, ...]
    make_update: Callable[[], ScaleUpdate | None] | None = None
    traced: bool = False

    @property
    def rows(self) -> int:
        """Row count: the product of all input dimensions but the last."""
        shape = self.input.shape
        rows = 1
        for size in shape[:-1]:
            rows = rows * size
        return rows if shape[-1] else 0

    @property
    def records(self) -> bool:
        """Whether autograd records."""
        return self.gradients is True

    @property
    def needs_grad(self) -> bool:
        """Whether the input or a parameter requires a gradient."""
        return self.records and any(
            facts is not None and facts.requires_grad for facts in (self.input, *self.parameters)
        )


def build_from_key(build: Callable[[Call], Any], key: tuple[Any, ...]) -> Any:
    """Build the spec for an eager call from the key of the cache, which is faster to create than a `Call`.

    Args:
        build: A layer's `build`.
        key: The first `Call` fields, up to `targets`; `tensor_facts` for the input; `tensor_facts` per parameter, None
            for an absent one; and the parameter count per entry, None for one each.
    """
    *settings, x, tensors, counts = key
    facts = [None if fields is None else Facts._make(fields) for fields in tensors]
    if counts is not None:
        facts = [fact for fact, count in zip(facts, counts, strict=True) for _ in range(count)]
    return build(Call._make((*settings, Facts._make(x), tuple(facts), None, False)))


def check_call(call: Call, features: int) -> None:
    """Check forward-pass arguments; raise TypeError, ValueError or RuntimeError."""
    x = call.input
    if not x.dtype.is_floating_point:
        raise TypeError(
            f"the input is {x.dtype}; give floating-point values, for example x.float()"
        )
    if len(x.shape) == 0 or x.shape[-1] != features:
        raise ValueError(
            f"{call.config._kind} takes [.., {features}], the input is {list(x.shape)}; "
            "its last dimension must be the layer's input features"
        )
    for name, parameter in zip(call.config._tensors, call.parameters, strict=True):
        if parameter is not None and parameter.kind.__name__ == "DTensor":
            raise NotImplementedError(
                f"parameter {name} of {call.config._kind} is a DTensor, which Linear, LayerNormLinear and norms "
                f"support; shard {call.config._kind} with tp_group, or with fully_shard"
            )
        if parameter is not None and parameter.device != x.device:
            if parameter.device.type == "meta":
                raise RuntimeError(
                    f"parameter {name} is on the meta device; call reset_parameters() first"
                )
            raise ValueError(
                f"the input is on {x.device}, parameter {name} on {parameter.device}; move one of them with .to()"
            )
    for name, value in zip(CallSwitches._fields, call.switches, strict=True):
        switch(name, value)
    for name in ("return_bias", "return_layernorm_output"):
        switch(name, getattr(call.config, name))
    computing_dtype(call)


def computing_dtype(call: Call) -> torch.dtype:
    """Return the dtype in which a layer computes: torch.autocast's if active, otherwise the input's and parameters'."""
    x = call.input
    if x.is_quantized:
        return x.dtype
    named = [
        (name, parameter.dtype)
        for name, parameter in zip(call.config._tensors, call.parameters, strict=True)
        if parameter is not None
    ]
    return common_dtype(x.dtype, call.autocast, named)


def common_dtype(
    x: torch.dtype, autocast: torch.dtype | None, parameters: Sequence[tuple[str, torch.dtype]]
) -> torch.dtype:
    """Return torch.autocast's dtype if active, otherwise the common dtype; raise TypeError if dtypes differ."""
    if autocast is not None:
        return autocast
    for name, dtype in parameters:
        if dtype != x:
            raise TypeError(
                f"the input is {x}, parameter {name} is {dtype}; convert one of them, "
                "or run under torch.autocast"
            )
    return x


def quantizers_of_call(
    call: Call, shapes: Sequence[tuple[int, int]], parallel: TensorParallel | None = None
) -> tuple[ProductQuantizers, ...]:
    """Quantizers per product, or no quantizers if a product is not quantized; see `precision.runs_quantized`.

    A size that does not fit the format causes a warning.

    Args:
        call: The call.
        shapes: (in_features, out_features) of each product's weight.
        parallel: Boundary of the first product, which may gather input rows.
    """
    active = call.active
    if not active.quantizes:
        return active.products
    rows = call.rows
    if parallel is not None and parallel.gathers_input:
        rows = rows * parallel.size
    estimated = estimates(call.input.device, call.traced, call.config.primary_weights_in_fp8)
    recipe = active.recipe if estimated else None
    warn = functools.partial(_warn_of_high_precision, call)
    for product, (k, n) in zip(active.products, shapes, strict=True):
        if not runs_quantized(product, (rows, k, n), warn, recipe):
            return active.unquantized_products
    return active.products


def _warn_of_high_precision(call: Call, reason: str) -> None:
    if not call.traced and call.config not in _warned_configs:
        _warned_configs.add(call.config)
        warnings.warn(
            f"{call.config._kind} runs in high precision, not under {type(call.active.recipe).__name__}: {reason}",
            stacklevel=7,
        )


# Configurations of layers that have warned, so that sizes that vary do not repeat the warning.
_warned_configs: weakref.WeakSet[Any] = weakref.WeakSet()


def quantized_results(
    product: ProductQuantizers, quantized_output: Any, quantized_grad: Any
) -> tuple[Quantizer | None, Quantizer | None]:
    """Return the quantizers for a product's output and input gradient; None for results in high precision.

    A result that cannot be quantized in this call is returned in high precision, with a warning once.
    """
    found: list[Quantizer | None] = []
    for name, requested, quantizer in (
        ("fp8_output", quantized_output, product.output),
        ("fp8_grad", quantized_grad, product.grad_input),
    ):
        if requested and quantizer.is_identity:
            warn_once(
                name,
                f"{name}={requested!r} has no effect: this call does not quantize that result, which is "
                f"returned in high "
                "precision; enter te.autocast with a delayed or current scaling recipe, or leave it False",
            )
        found.append(quantizer if requested and not quantizer.is_identity else None)
    return found[0], found[1]


def rows_of_shard(call: Call, parallel: TensorParallel) -> int:
    """Return the rows on this rank of the matrix that a linear layer shards along its rows.

    Raises:
        ValueError: The ranks cannot share the output rows.
    """
    if not (parallel.mode == "row" and parallel.sequence and parallel.size > 1):
        return call.rows
    rows, size = call.rows, parallel.size
    if not call.traced and rows % size:
        raise ValueError(
            f"{call.config._kind} with sequence_parallel=True scatters {rows} rows over tp_size={size} ranks, which "
            f"does not divide them; pad the sequence so that there are {-(-rows // size) * size} rows"
        )
    return rows // size


def keeps_input(call: Call) -> bool:
    """Return save_original_input, which delayed scaling does not support: the scale changes before the backward."""
    if not call.config.save_original_input or not call.active.quantizes:
        return False
    if call.active.follows_history:
        raise ValueError(
            "save_original_input=True does not work with DelayedScaling, whose scale changes before the backward; "
            "use Float8CurrentScaling or a block scaling recipe, or leave it False"
        )
    return True


# Weight classes that are in memory in any case; memory plan parameters are fake tensors.
_PARAMETERS = (torch.nn.Parameter, torch._subclasses.FakeTensor)


def scale_update(call: Call, needs_grad: bool) -> ScaleUpdate | None:
    """Return the delayed-scaling update that follows this call's backward pass; None without one."""
    if not needs_grad or not call.active.has_state:
        return None
    return END_OF_PASS if call.make_update is None else call.make_update()


def weight_gradient(call: Call, product: int) -> WeightGradient:
    """Return the destination for a product's weight gradient."""
    if call.targets is None:
        return WeightGradient()
    return WeightGradient(
        call.targets[product],
        call.config.fuse_wgrad_accumulation,
        bool(call.switches.is_first_microbatch),
        call.store,
    )


def product_spec(
    call: Call,
    *,
    quantizers: ProductQuantizers,
    parallel: TensorParallel,
    needs: tuple[bool, bool, bool],
    update: ScaleUpdate | None,
    weight: Facts,
    number: int = 0,
    results: tuple[Any, Any] = (False, False),
    local_rows: int | None = None,
) -> LinearSpec:
    """Settings for one product in a call.

    Args:
        call: The call.
        quantizers: Its quantizers.
        parallel: Its boundary to the tensor-parallel group.
        needs: Which gradients are needed: for its input, its weight and the bias that it adds.
        update: What delayed scaling updates after the backward pass.
        weight: Facts of the weight, or of one weight in a group.
        number: Product number in its layer.
        results: Which results are quantized: its output and its input's gradient.
        local_rows: Rows in its sharded matrix on this rank, with sequence parallelism.
    """
    output_quantizer, grad_input_quantizer = quantized_results(quantizers, *results)
    active, inp = call.active, call.input
    if not call.traced and inp.device.type == "cuda":
        run_backward_on_calling_thread()
    spec = build_linear_spec(
        computing_dtype(call),
        quantizers,
        active.recipe if active.quantizes else None,
        parallel,
        weight_gradient(call, number),
        needs,
        output_quantizer=output_quantizer,
        grad_input_quantizer=grad_input_quantizer,
        grad_weight_dtype=weight.dtype,
        keep_input=keeps_input(call),
        scale_update=update,
        traced=call.traced,
        is_unquantized=(
            quantizers is UNQUANTIZED and not (weight.is_quantized or inp.is_quantized)
        ),
        may_run_again=call.gradients is None,
    )
    is_parameter = weight.kind in _PARAMETERS and len(call.config._weights[number]) == 1
    is_shared = call.config._shares_input and not inp.is_quantized
    caches = call.switches.is_first_microbatch is not None
    spec = with_deferred_columns(spec, call.rows, weight.shape, is_parameter, is_shared, caches)
    if local_rows is None or not (spec.communicates and parallel.sequence):
        return spec
    agree = (
        active.follows_history
        and parallel.group is not None
        and histories_agree(active.recipe, active.group, parallel.group)
    )
    return with_gathering(spec, local_rows, inp.kind if inp.is_quantized else None, agree)


def with_compiled_passes(call: Call, functions: LayerFunctions, spec: Any) -> Any:
    """The layer spec with its compiled passes, if the call may be repeated."""
    if call.make_update is not None:
        return spec
    return replace_fields(spec, compiled=compile_layer(functions, spec, call.input.device))
