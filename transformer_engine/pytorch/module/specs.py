"""spec = build(key): the settings of a call of a layer made of linear products, as a function of its key.

The key is a plain tuple with the fields of `Call`: the module's settings, the quantizers of its recipe, torch's modes,
and the facts of input and parameters. `ProductsModule.spec` makes the key and looks it up; the layers' builders read
it here. `product_spec` makes the spec of every linear product.
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
from ..functions.linear_spec import LinearSpec, gathering
from ..functions.scale_update import END_OF_PASS, ScaleUpdate
from ..functions.weight_gradient import WeightGradient, WeightGradStore
from ..quantization.delayed_scaling import histories_agree
from ..runtime.autograd import run_backward_on_calling_thread
from ..runtime.warn_once import warn_once
from ..tensor.quantizer import Quantizer
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage
from ..functions.precision import quantizes
from .products import UNQUANTIZED, ModuleRecipe, ProductQuantizers


class Facts(NamedTuple):
    """The metadata of a tensor that a spec may depend on."""

    kind: type
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def is_quantized(self) -> bool:
        return issubclass(self.kind, QuantizedTensorStorage)


class EqualFacts(NamedTuple):
    """Facts that consecutive parameters have in common, in the form of a key; see `ProductsModule.spec`."""

    facts: tuple[Any, ...] | None
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]


_is_given = functools.partial(operator.is_not, None)
_facts = operator.attrgetter("__class__", "shape", "dtype", "device", "requires_grad")


def runs_of(tensors: tuple[Tensor | None, ...]) -> tuple[EqualFacts, ...]:
    """Return the facts of the tensors, with one entry for consecutive tensors of the same kind."""
    given = list(filter(_is_given, tensors))
    found = itertools.groupby(map(_facts, given))
    runs = [EqualFacts(facts, len(list(members))) for facts, members in found]
    if len(given) < len(tensors):  # a layer without biases
        runs.append(EqualFacts(None, len(tensors) - len(given)))
    return tuple(runs)


class AccumulationTarget:
    """A parameter that a gradient accumulates into, as part of a key: it is compared by identity and kept alive."""

    __slots__ = ("parameter",)

    def __init__(self, parameter: Any):
        self.parameter = parameter

    def __hash__(self) -> int:
        return id(self.parameter)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AccumulationTarget) and self.parameter is other.parameter


class Call(NamedTuple):
    """The parts of a key.

    Attributes:
        config: Settings of the module.
        active: Quantizers of the module, and the recipe's options for products.
        options: Switches of `forward`, named by `config._options`.
        gradients: Whether autograd records; None if it does not, but a second run of the call may record.
        autocast: Dtype of torch.autocast, if it is active.
        environment: `env.generation()`.
        store: Queue of delayed weight gradients, or None.
        holders: Parameters of each product's weight, if gradients are accumulated into them.
        x: Facts of the input.
        tensors: Facts of the parameters named by `config._tensors`; None for absent parameters.
        begin: Scale update of a backward pass that does not update all scales: in a traced graph, or for a call within
            a backward pass. Such a key is not looked up.
        traced: Whether a compiler is tracing.
    """

    config: Any
    active: ModuleRecipe
    options: tuple[Any, ...]
    gradients: bool | None
    autocast: torch.dtype | None
    environment: int
    store: WeightGradStore | None
    holders: tuple[tuple[AccumulationTarget, ...], ...] | None
    x: tuple[Any, ...]
    tensors: tuple[tuple[Any, ...] | None, ...]
    begin: Callable[[], ScaleUpdate | None] | None = None
    traced: bool = False

    @property
    def input(self) -> Facts:
        return Facts._make(self.x)

    @property
    def parameters(self) -> list[Facts | None]:
        return [None if facts is None else Facts._make(facts) for facts in self.tensors]

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions of the input but the last."""
        shape = self.x[1]
        rows = 1
        for size in shape[:-1]:
            rows = rows * size
        return rows if shape[-1] else 0

    @property
    def records(self) -> bool:
        """Whether autograd records."""
        return self.gradients is True

    @property
    def wants(self) -> bool:
        """Whether the input or a parameter requires a gradient."""
        return self.records and (self.x[4] or any(facts is not None and facts[4] for facts in self.tensors))


def facts_of(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Return the fields of Facts, in the form of a key."""
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def check_call(call: Call, features: int) -> None:
    """Check the arguments of a forward pass; raise TypeError, ValueError or RuntimeError."""
    x = call.input
    if not x.dtype.is_floating_point:
        raise TypeError(f"the input is {x.dtype}; give floating-point values, for example x.float()")
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
                raise RuntimeError(f"parameter {name} is on the meta device; call reset_parameters() first")
            raise ValueError(
                f"the input is on {x.device}, parameter {name} on {parameter.device}; move one of them with .to()"
            )
    for name, value in zip(call.config._options, call.options, strict=True):
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


def unsupported_product_reason(product: ProductQuantizers | LinearSpec, m: int, k: int, n: int) -> str | None:
    """Return why a format does not support x [m, k], w [n, k] or dy [m, n]; None if it supports all three."""
    for quantizer, extents in (
        (product.input, (m, k)),
        (product.weight, (n, k)),
        (product.grad_output, (m, n)),
    ):
        reason = quantizer.unsupported_shape_reason(extents, True, True)
        if reason is not None:
            return reason
    return None


def quantizable(
    call: Call, shapes: Sequence[tuple[int, int]], parallel: TensorParallel | None = None
) -> tuple[ProductQuantizers, ...]:
    """Return the quantizers of each product, or no quantizers (with a warning) if a size does not fit the format.

    Args:
        call: The call.
        shapes: (in_features, out_features) of each product's weight.
        parallel: The boundary of the first product, which may gather the rows of the input.
    """
    active = call.active
    if not active.quantizes:
        return active.products
    rows = call.rows
    if parallel is not None and parallel.gathers_input:
        rows = rows * parallel.size
    for product, (k, n) in zip(active.products, shapes, strict=True):
        reason = unsupported_product_reason(product, rows, k, n)
        if reason is not None:
            if not call.traced and call.config not in _warned_configs:
                _warned_configs.add(call.config)
                warnings.warn(
                    f"{call.config._kind} runs in high precision, not under {type(active.recipe).__name__}: {reason}",
                    stacklevel=5,
                )
            return active.unquantized_products
    return active.products if _pays(call, rows, shapes) else active.unquantized_products


# Configurations of the layers that have warned, so that sizes that vary do not repeat the warning.
_warned_configs: weakref.WeakSet[Any] = weakref.WeakSet()


def _pays(call: Call, rows: int, shapes: Sequence[tuple[int, int]]) -> bool:
    """Return whether quantization saves time in every product; True where no time is estimated."""
    if call.x[3].type != "cuda" or call.config.primary_weights_in_fp8 or call.traced:
        return True
    assert call.active.recipe is not None
    return all(quantizes(call.active.recipe, rows, n, k) for k, n in shapes)


def quantized_results(
    product: ProductQuantizers, quantized_output: Any, quantized_grad: Any
) -> tuple[Quantizer | None, Quantizer | None]:
    """Return the quantizers of a product's output and of its input's gradient; None for results in high precision.

    A result that cannot be quantized in this call is returned in high precision, with a warning once.
    """
    found: list[Quantizer | None] = []
    for name, wanted, quantizer in (
        ("fp8_output", quantized_output, product.output),
        ("fp8_grad", quantized_grad, product.grad_input),
    ):
        if wanted and quantizer.is_identity:
            warn_once(
                name,
                f"{name}={wanted!r} has no effect: this call does not quantize that result, which is returned in high "
                "precision; enter te.autocast with a delayed or current scaling recipe, or leave it False",
            )
        found.append(quantizer if wanted and not quantizer.is_identity else None)
    return found[0], found[1]


def rows_of_shard(call: Call, parallel: TensorParallel) -> int:
    """Return the rows on this rank of the matrix that a linear layer shards along its rows.

    Raises:
        ValueError: The ranks cannot share the rows of the output.
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


def scale_update(call: Call, needs_grad: bool) -> ScaleUpdate | None:
    """Return the scale update of delayed scaling that follows this call's backward pass; None without one."""
    if not needs_grad or not call.active.has_state:
        return None
    return END_OF_PASS if call.begin is None else call.begin()


def weight_gradient(call: Call, product: int) -> WeightGradient:
    """Return the destination of the gradient of a product's weight."""
    if call.holders is None:
        return WeightGradient()
    return WeightGradient(
        tuple([held.parameter for held in call.holders[product]]),
        call.config.fuse_wgrad_accumulation,
        bool(call.options[0]),
        call.store,
    )


def product_spec(
    call: Call,
    number: int,
    quantizers: ProductQuantizers,
    parallel: TensorParallel,
    needs: tuple[bool, bool, bool],
    update: ScaleUpdate | None,
    weight: Facts | None = None,
    results: tuple[Any, Any] = (False, False),
    shard: int | None = None,
) -> LinearSpec:
    """Return the spec of a call's product.

    Args:
        call: The call.
        number: Number of the product in its layer.
        quantizers: Its quantizers.
        parallel: Its boundary to the tensor-parallel group.
        needs: Which gradients are needed: of its input, its weight and the bias that it adds.
        update: What delayed scaling updates after the backward pass.
        weight: Facts of the weight; None if it is unknown to be one tensor.
        results: Which results are quantized: its output and its input's gradient.
        shard: Rows of its sharded matrix on this rank, with sequence parallelism.
    """
    output, grad_input = quantized_results(quantizers, *results)
    needs_grad_input, needs_grad_weight, needs_grad_bias = needs
    if not call.traced and call.x[3].type == "cuda":
        run_backward_on_calling_thread()
    dtype = computing_dtype(call)
    gradient = weight_gradient(call, number)
    communicates = parallel.mode is not None and parallel.size > 1
    spec = LinearSpec(
        dtype=dtype,
        input=quantizers.input,
        weight=quantizers.weight,
        grad_output=quantizers.grad_output,
        accumulation=call.active.accumulation,
        parallel=parallel,
        weight_gradient=gradient,
        output=output,
        grad_input=grad_input,
        backward=call.active.backward,  # pyright: ignore[reportArgumentType]  # a value of the recipe
        keep_input=keeps_input(call),
        needs_grad_input=needs_grad_input,
        needs_grad_weight=needs_grad_weight,
        needs_grad_bias=needs_grad_bias,
        scale_update=update,
        needs_grad=needs_grad_input or needs_grad_weight or needs_grad_bias,
        traced=call.traced,
        plain=(
            quantizers is UNQUANTIZED
            and weight is not None
            and not (weight.is_quantized or call.input.is_quantized)
        ),
        communicates=communicates,
        inspector=quantizers.inspector,
        may_run_again=call.gradients is None,
    )
    if shard is None or not (communicates and parallel.sequence):
        return spec
    quantized_as = call.input.kind if call.input.is_quantized else None
    active = call.active
    agree = (
        active.follows_history
        and parallel.group is not None
        and histories_agree(active.recipe, active.group, parallel.group)
    )
    return gathering(spec, shard, quantized_as, agree)
