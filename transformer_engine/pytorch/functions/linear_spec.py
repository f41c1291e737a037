"""LinearSpec: settings for one linear layer call, and derived decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ...common.dispatch import requirements
from ...common.recipe import Recipe
from ..distributed.tensor_parallel import TensorParallel
from ..tensor.identity_tensor import IdentityQuantizer
from ..tensor.quantized_tensor import QuantizedTensorStorage
from ..tensor.quantizer import Quantizer
from .scale_update import ScaleUpdate
from .weight_gradient import Inspector, WeightGradient

# Operands for the backward products: `LinearSpec.backward_operands`.
QUANTIZED: Literal["quantized"] = "quantized"
HIGH_PRECISION: Literal["high_precision"] = "high_precision"
DEQUANTIZED: Literal["dequantized"] = "dequantized"
# How a matrix whose rows are sharded over ranks is gathered: `LinearSpec.gather_input`.
VALUES: Literal["values"] = "values"
CODES: Literal["codes"] = "codes"
ROW_CODES: Literal["row_codes"] = "row_codes"
ONCE: Literal["once"] = "once"
Gather = Literal["values", "codes", "row_codes", "once"]
# Where the columns of an operand are computed: `LinearSpec.weight_columns`; see `deferred_columns`.
RECOMPUTED, SAVED, PRODUCED = "recomputed", "saved", "produced"
IDENTITY = IdentityQuantizer()


@dataclass(frozen=True)
class Accumulation:
    """Which products promote partial sums to float32 ("split accumulator"): forward, input and weight gradient."""

    forward: bool = False
    grad_input: bool = True
    grad_weight: bool = True


def recipe_accumulation(recipe: Recipe | None) -> Accumulation:
    """Accumulation in a recipe's three products; the defaults without a recipe, and for one without these options."""
    products = [getattr(recipe, f"fp8_gemm_{name}", None) for name in ("fprop", "dgrad", "wgrad")]
    if None in products:
        return Accumulation()
    return Accumulation(*[bool(product.use_split_accumulator) for product in products])  # pyright: ignore


@dataclass(frozen=True)
class ProductQuantizers:
    """The five quantizers for one linear product and its two gradients.

    Attributes:
        inspector: Receives the product results.
    """

    input: Quantizer
    weight: Quantizer
    output: Quantizer
    grad_output: Quantizer
    grad_input: Quantizer
    inspector: Inspector | None = field(default=None, kw_only=True)

    @property
    def forward(self) -> tuple[Quantizer, Quantizer, Quantizer]:
        return self.input, self.weight, self.output

    @property
    def operands(self) -> tuple[Quantizer, Quantizer, Quantizer]:
        return self.input, self.weight, self.grad_output


UNQUANTIZED = ProductQuantizers(IDENTITY, IDENTITY, IDENTITY, IDENTITY, IDENTITY)


@dataclass(frozen=True)
class LayerSpec:
    """Settings for one layer call, apart from its tensors.

    Attributes:
        compiled: `compiled.CompiledLayer` for the layer's passes; None if they are not compiled.
        cached_tensors: The tensors in cached quantized weights (`cached_weight`).
        scale_update: The scales that delayed scaling updates after the backward pass.
        needs_grad: Some layer tensor needs a gradient.
    """

    compiled: Any = field(default=None, kw_only=True)
    cached_tensors: tuple[Tensor, ...] = field(default=(), kw_only=True)
    scale_update: ScaleUpdate | None = field(default=None, kw_only=True)
    needs_grad: bool = field(default=True, kw_only=True)

    def linears(self) -> tuple[LinearSpec, ...]:
        """The linear layers."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearSpec(LayerSpec):
    """Settings for one linear layer call. The layer may be one step of a fused layer or of a `te.ops` chain.

    Defaults are constants: torch 2.11 cannot trace a default that is an object.

    Attributes:
        dtype: Result dtype.
        input_quantizer, weight_quantizer, grad_output_quantizer: Operand quantizers.
        accumulation: Which products promote partial sums to float32.
        parallel: The tensor-parallel group.
        weight_gradient: Where dw goes: returned, accumulated into main_grad, or delayed.
        output_quantizer, grad_input_quantizer: Quantizers for y and dx; None to leave them in `dtype`.
        cached_weight: The quantized weight in the module's cache, from this microbatch or an
            earlier one; None without `is_first_microbatch`.
        backward_operands: "quantized", or the recipe's override: "high_precision" or "dequantized".
        keep_input: Save the unquantized input and quantize it again in the backward pass.
        weight_columns, input_columns: When the column-wise codes are computed. "saved": in the forward pass;
            "recomputed": in the backward pass, from values that are in memory anyway; "produced" (input only): by the
            fused layer's backward pass, which passes them to `linear_backward` by `produce_input`.
        needs_grad_input, needs_grad_weight, needs_grad_bias: Which gradients are needed.
        grad_weight_dtype, grad_bias_dtype: dw and db dtypes, as for the parameters; None: `dtype`.
        traced: A compiler is tracing.
        communicates: The layer is sharded, so that ranks exchange values or codes.
        is_unquantized: Input, weight and gradients are multiplied unquantized.
        gather_input: How the input is gathered where its rows are sharded. "values": in high precision; every
            rank quantizes all rows. "codes": each rank quantizes its rows, and the codes in each direction
            are gathered. "row_codes": the same, and the column direction is the transposed row direction. The
            backward pass gathers the saved shard again. "once": in high precision, and the gathered matrix is
            saved, because it cannot be quantized twice.
        gather_gradient: How the output gradient is gathered where its rows are sharded: "values",
            "codes" or "row_codes".
        inspector: Reads or replaces product results; None by default.
        may_run_again: No gradients are recorded, but a second run of the call may record them. The call then
            uses the kernels of a call with gradients wherever other kernels would round differently.
    """

    dtype: torch.dtype
    input_quantizer: Quantizer
    weight_quantizer: Quantizer
    grad_output_quantizer: Quantizer
    accumulation: Accumulation
    parallel: TensorParallel
    weight_gradient: WeightGradient
    output_quantizer: Quantizer | None = None
    grad_input_quantizer: Quantizer | None = None
    cached_weight: QuantizedTensorStorage | None = None
    backward_operands: Literal["quantized", "high_precision", "dequantized"] = "quantized"
    keep_input: bool = False
    weight_columns: str = SAVED
    input_columns: str = SAVED
    needs_grad_input: bool = True
    needs_grad_weight: bool = True
    needs_grad_bias: bool = False
    grad_weight_dtype: torch.dtype | None = None
    grad_bias_dtype: torch.dtype | None = None
    traced: bool = False
    communicates: bool = True
    is_unquantized: bool = False
    gather_input: Gather = VALUES
    gather_gradient: Literal["values", "codes", "row_codes"] = VALUES
    inspector: Inspector | None = None
    may_run_again: bool = False

    def linears(self) -> tuple[LinearSpec, ...]:
        return (self,)


def build_linear_spec(
    dtype: torch.dtype,
    quantizers: ProductQuantizers,
    recipe: Recipe | None,
    parallel: TensorParallel,
    weight_gradient: WeightGradient,
    needs: tuple[bool, bool, bool],
    **settings: Any,
) -> LinearSpec:
    """Settings for one linear layer call kind. Modules and `te.ops` build their specs here.

    Args:
        dtype: Result dtype.
        quantizers: Operand quantizers; `UNQUANTIZED` for high precision. Result quantizers are
            ignored: pass `output_quantizer` and `grad_input_quantizer` where the caller requests
            quantized results.
        recipe: Recipe in use, which determines the accumulation and the backward pass; None for the defaults.
        parallel: Boundary between the layer and its tensor-parallel group.
        weight_gradient: Weight gradient destination.
        needs: Whether input, weight and bias gradients are needed.
        settings: Other `LinearSpec` fields.
    """
    return LinearSpec(
        dtype=dtype,
        input_quantizer=quantizers.input,
        weight_quantizer=quantizers.weight,
        grad_output_quantizer=quantizers.grad_output,
        accumulation=recipe_accumulation(recipe),
        parallel=parallel,
        weight_gradient=weight_gradient,
        backward_operands=getattr(recipe, "backward_override", None) or "quantized",
        needs_grad_input=needs[0],
        needs_grad_weight=needs[1],
        needs_grad_bias=needs[2],
        needs_grad=any(needs),
        communicates=parallel.mode is not None and parallel.size > 1,
        inspector=quantizers.inspector,
        **settings,
    )


_ANY_ROWS = 128  # a row count that every format supports


def unsupported_product_reason(
    quantizers: tuple[Quantizer, Quantizer, Quantizer], m: int, k: int, n: int
) -> str | None:
    """Reason why the quantizers do not support x [m, k], w [n, k] and dy [m, n]; None if they support all three.

    The precision of a row must not depend on m under te.batch_invariant(): a cast of m rows then raises the error of a
    format that does not support m. Casts along the rows, for a pass without gradients, support every m.
    """
    if requirements.batch_invariant:
        m = _ANY_ROWS
    for quantizer, extents in zip(quantizers, ((m, k), (n, k), (m, n)), strict=True):
        reason = quantizer.unsupported_shape_reason(extents, True, True)
        if reason is not None:
            return reason
    return None


Spec = TypeVar("Spec")


def replace_fields(spec: Spec, **fields: Any) -> Spec:
    """Return `dataclasses.replace` on a frozen spec in 1 us instead of 10, traced in 20 ms instead of 150."""
    if torch.compiler.is_compiling():
        # torch 2.11 does not trace the __dict__ of a frozen dataclass.
        cls: Any = type(spec)
        return cls(**{**{name: getattr(spec, name) for name in cls.__dataclass_fields__}, **fields})
    result = object.__new__(type(spec))
    result.__dict__.update({**spec.__dict__, **fields})
    return result


def with_gathering(
    spec: LinearSpec, shard: int, quantized_as: type | None = None, histories_agree: bool = False
) -> LinearSpec:
    """Return the spec for a layer whose input or output gradient is gathered as codes where the format allows it.

    Quantizers for gathered codes take maxima over the tensor-parallel group, so that codes and
    scales belong to the gathered matrix.

    Args:
        spec: The spec.
        shard: Row count of the sharded matrix on this rank.
        quantized_as: Input class if it is a quantized tensor. Each pass gathers the code direction that it reads.
            If code shards cannot be joined, or values are saved, both passes gather the quantized tensor.
        histories_agree: Delayed-scaling updates take maxima over all ranks in the tensor-parallel group.
    """
    parallel = spec.parallel
    if parallel.gathers_input:
        as_tensor = quantized_as is not None and (
            spec.backward_operands != "quantized"
            or spec.keep_input
            or not spec.input_quantizer.can_join_shards(quantized_as)
        )
        way = plan_gather(
            spec.input_quantizer, shard, spec.needs_grad_weight, spec.traced or as_tensor
        )
        return replace_fields(
            spec,
            gather_input=way,
            input_quantizer=_shard_quantizer(spec.input_quantizer, way, parallel, histories_agree),
        )
    if parallel.gathers_gradient and not spec.needs_grad_bias:
        way = plan_gather(spec.grad_output_quantizer, shard, spec.needs_grad_weight, spec.traced)
        if way != ONCE:
            quantizer = _shard_quantizer(spec.grad_output_quantizer, way, parallel, histories_agree)
            return replace_fields(spec, gather_gradient=way, grad_output_quantizer=quantizer)
    return spec


def plan_gather(quantizer: Quantizer, rows: int, columnwise: bool, as_values: bool) -> Gather:
    """Choose how a row-sharded matrix is gathered: as codes, as values, or as values that are saved (ONCE).

    Args:
        quantizer: The quantizer.
        rows: Rows per shard.
        columnwise: The column direction is needed too.
        as_values: The matrix is gathered before it is quantized.
    """
    granularity = None if as_values else quantizer.shard_granularity(columnwise)
    if granularity is not None and rows % granularity == 0:
        return ROW_CODES if quantizer.supports_only_rowwise_all_gather() else CODES
    return VALUES if quantizer.is_requantization_safe() else ONCE


def _shard_quantizer(
    quantizer: Quantizer, way: Gather, parallel: TensorParallel, histories_agree: bool
) -> Quantizer:
    """Return the quantizer for one rank's rows."""
    agrees = histories_agree and quantizer.stateful
    if way in (CODES, ROW_CODES) and parallel.group is not None and not agrees:
        return quantizer.with_reduction_group(parallel.group)
    return quantizer


def gathers_values(spec: LinearSpec) -> bool:
    """Return whether the input is gathered before it is quantized."""
    return spec.communicates and spec.parallel.gathers_input and not gathers_codes(spec)


def gathers_codes(spec: LinearSpec) -> bool:
    """Return whether each rank quantizes its input rows, whose codes are gathered."""
    return spec.gather_input in (CODES, ROW_CODES) and spec.parallel.gathers_input


def gathers_gradient_codes(spec: LinearSpec) -> bool:
    """Return whether each rank quantizes its output gradient rows, whose codes are gathered."""
    return spec.gather_gradient in (CODES, ROW_CODES) and spec.parallel.gathers_gradient


def sums_over_ranks(parallel: TensorParallel, mode: str) -> bool:
    """Return whether a product is a partial sum over ranks: "row" in the forward pass, "column" in the backward."""
    return parallel.mode == mode and parallel.size > 1


def inspects(spec: LinearSpec, result: str) -> bool:
    """Whether an inspector reads or replaces a result: "output" or "grad_input"."""
    return spec.inspector is not None and result in spec.inspector.results
