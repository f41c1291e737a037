"""FP8 attention over ranks that share a sequence: q, k and v codes travel, under one scale for all ranks.

Delayed scaling has one scale if the recipe reduces amaxes over a group that contains the ranks; otherwise the ranks
use their smallest scale. Current scaling takes the maximum over the ranks. Caller codes have the scale of one rank:
delayed scaling rounds them to the largest scale, current scaling quantizes their values again. Values travel
instead under recipes that scale blocks, which quantize afterwards. Partial outputs are merged as values in float32, and
gradients travel as values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....distributed.common_scale import rescale_codes
from ....distributed.faults import check_backward
from ....primitives.attention.call import (
    Attended,
    AttentionCall,
    AttentionInputs,
    AttentionResult,
    Gradients,
)
from ....quantization.autocast import AutocastState
from ....quantization.delayed_scaling import histories_agree
from ....runtime.autograd import Function
from ....runtime.double_backward import once_differentiable
from ....runtime.tracing import run_eagerly
from ....tensor.elements import float8_dtype
from ....tensor.float8_tensor import Float8Tensor, Float8TensorStorage
from ....tensor.quantized_tensor import QuantizedTensor
from ....tensor.quantizer import Quantizer
from ..autograd import attend
from ..fp8 import choose_fp8
from ..fp8_attention import AttentionQuantizers, FP8Attention, Rounded, quantize_heads
from .all_to_all import HeadExchange, exchange_tokens
from .attention import ContextParallelAttention
from .blocks import BlockPlan, BoundBlock
from .passes import BlockAttention, BlockPasses, backward, forward, of_inputs

# Scaling kinds with one scale per tensor, whose codes can travel.
TENSOR_SCALING = ("delayed", "current")


@dataclass(frozen=True, eq=False)
class FP8ContextAttention:
    """FP8 attention for one context-parallel call, in place of a backend.

    Attributes:
        shared: The attention over the ranks.
        fp8: FP8 attention over this rank's heads, `shared.inner_call`.
        requested: Requested backward pass, see `BackwardRequest`.
        state: The autocast block, with the attention recipe.
    """

    shared: ContextParallelAttention
    fp8: FP8Attention
    requested: bool | None
    state: AutocastState

    @property
    def quantizers(self) -> AttentionQuantizers:
        return self.fp8.quantizers

    def with_quantizers(self, quantizers: AttentionQuantizers) -> FP8ContextAttention:
        """Return the attention with other quantizers."""
        return replace(self, fp8=self.fp8.with_quantizers(quantizers))

    @run_eagerly("attention of context-parallel ranks communicates")
    def __call__(self, call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
        """Return o [.., h * d_v], differentiable in q, k, v, bias and sink."""
        shared, groups = self.shared, self.shared.groups
        shared.check_lengths(call, inputs)
        # In a head exchange the tensors that travel depend on the backward pass.
        with_gradient = self.fp8.call.needs_gradient if groups.heads_size > 1 else None
        shared.check_settings(
            call, inputs, {"recipe": self.state.recipe, "needs_gradient": with_gradient}
        )
        # Caller codes have a scale from this rank alone. Delayed scaling rescales them, see `_shared_codes`.
        inputs = _dequantize_inputs(inputs, Float8Tensor if self.fp8.scaling == "delayed" else ())
        if groups.heads_size == 1:
            return self._in_blocks(inputs)
        exchange = shared.exchange(call, inputs)
        only_codes = _are_codes(inputs)
        if isinstance(shared.inner, BlockAttention):
            # Ranks that exchange heads share no quantizer scale, so they exchange values that have no codes yet.
            local = (
                _codes_of_heads(exchange, self.quantizers.qkv, inputs)
                if only_codes
                else exchange.enter(_dequantize_inputs(inputs))
            )
            result = self._in_blocks(local)
            output = exchange.leave(_values(result.output))
        elif self.fp8.scaling not in TENSOR_SCALING:
            fp8 = replace(
                self._with_shared_scales(exchange.group, ("qkv", "output")), fp8_output=False
            )
            result = attend(fp8, shared.inner_call, exchange.enter(_dequantize_inputs(inputs)))
            output = exchange.leave(result.output)
        else:
            fp8 = replace(
                self._with_shared_scales(exchange.group, ("qkv", "output")), fp8_output=True
            )
            local = _codes_of_heads(exchange, fp8.quantizers.qkv, inputs)
            result = attend(fp8, shared.inner_call, local)
            output: Any = _LeavingCodes.apply(exchange, self.fp8.fp8_output, result.output)
        max_logit = None if result.max_logit is None else exchange.all_heads(result.max_logit)
        return AttentionResult(self._returned(output), max_logit)

    def _with_shared_scales(self, group: Any, names: Sequence[str]) -> FP8Attention:
        """Return the attention whose quantizers with these names have one scale for all ranks in a group."""
        quantizers: Any = self.fp8.quantizers
        if self.fp8.scaling == "current":
            shared = {name: getattr(quantizers, name).with_reduction_group(group) for name in names}
        elif self.fp8.scaling == "delayed" and not histories_agree(
            self.state.recipe, self.state.group, group
        ):
            shared = {name: getattr(quantizers, name).sharing_scale(group) for name in names}
        else:
            shared = {}
        return self.fp8.with_quantizers(quantizers._replace(**shared))

    def _in_blocks(self, inputs: AttentionInputs) -> AttentionResult:
        assert isinstance(self.shared.inner, BlockAttention)
        plan = self.shared.inner.plan
        fp8 = self._with_shared_scales(plan.groups.ring_group, ("qkv",))
        output, max_logit = _FP8BlockAttention.apply(plan, fp8, self.requested, *inputs)
        return AttentionResult(self._returned(output), max_logit)

    def _returned(self, output: Tensor) -> Tensor:
        """Return the output as codes if the caller requests them."""
        if not self.fp8.fp8_output or isinstance(output, QuantizedTensor):
            return output
        return _Quantized.apply(self.fp8.quantizers.output, output)


def _values(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _dequantize_inputs(
    inputs: AttentionInputs, unchanged: type | tuple[()] = ()
) -> AttentionInputs:
    """Return the inputs with dequantized q, k and v, except tensors with class `unchanged`."""
    q, k, v = (x if isinstance(x, unchanged) else _values(x) for x in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)


def _are_codes(inputs: AttentionInputs) -> bool:
    """Return whether the caller quantized q, k and v: both passes then read their codes, in every precision."""
    return all(isinstance(x, Float8Tensor) and x._data is not None for x in inputs[:3])


def _split_heads(storage: Any, heads: int) -> Tensor:
    """Return codes [.., h * d] as uint8 [.., h, d]."""
    return storage._data.unflatten(-1, (heads, -1))


def _shared_codes(tensors: Sequence[Tensor], quantizer: Quantizer, group: Any) -> list[Any]:
    """Quantize tensors [.., h, d] to codes [.., h * d]; caller codes are rescaled to one scale for the group."""
    storages: list[Any] = [quantize_heads(x, quantizer) for x in tensors]
    quantized = [i for i, x in enumerate(tensors) if isinstance(x, QuantizedTensor)]
    if quantized:
        dtypes = [float8_dtype(storages[i]._fp8_dtype) for i in quantized]
        shards = [
            (storages[i]._data.view(dtype), storages[i]._scale_inv)
            for i, dtype in zip(quantized, dtypes, strict=True)
        ]
        for i, (codes, scale) in zip(quantized, rescale_codes(shards, group), strict=True):
            storages[i] = Float8TensorStorage(
                codes.view(torch.uint8), scale, **storages[i].constants()
            )
    return storages


def _wrap_codes(codes: Tensor, like: Any) -> Float8Tensor:
    """Return codes as a tensor with the scale and settings of a storage."""
    return Float8Tensor.from_storage(
        Float8TensorStorage(codes, like._scale_inv, **like.constants())
    )


class _Quantized(Function):
    """A quantized output; its gradient passes through."""

    @staticmethod
    def forward(ctx: Any, quantizer: Quantizer, x: Tensor) -> Tensor:
        return quantizer.wrap(quantizer.encode(x, True, False))

    @staticmethod
    @once_differentiable("FP8 attention")
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, _values(grad)


class _EnteringCodes(Function):
    """Quantization of q, k and v, whose codes ranks exchange for the codes of their heads."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, quantizer: Quantizer, *qkv: Tensor) -> Any:
        ctx.exchange = exchange
        ctx.set_materialize_grads(True)
        storages = _shared_codes(qkv, quantizer, exchange.group)
        codes = tuple(
            _split_heads(storage, x.shape[-2]) for storage, x in zip(storages, qkv, strict=True)
        )
        moved = exchange_tokens(exchange, exchange.orders, True, codes)
        return tuple(_wrap_codes(x, storage) for x, storage in zip(moved, storages, strict=True))

    @staticmethod
    @once_differentiable("FP8 attention")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        exchange = ctx.exchange
        plain = tuple(_values(grad) for grad in grads)
        return None, None, *exchange_tokens(exchange, exchange.orders, False, plain)


def _codes_of_heads(
    exchange: HeadExchange, quantizer: Quantizer, inputs: AttentionInputs
) -> AttentionInputs:
    """Return the inputs for this rank's heads and all tokens in the group, with q, k and v as codes."""
    q, k, v = _EnteringCodes.apply(exchange, quantizer, *inputs[:3])
    return exchange.enter_others(inputs)._replace(q=q, k=k, v=v)


class _LeavingCodes(Function):
    """The output's codes, exchanged for the codes of the rank's tokens; values unless the caller requests codes."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, as_codes: bool, output: Float8Tensor) -> Tensor:
        ctx.exchange = exchange
        codes = (_split_heads(output, exchange.call.heads // exchange.size),)
        (moved,) = exchange_tokens(exchange, exchange.orders[:1], False, codes)
        found = _wrap_codes(moved.flatten(-2), output)
        return found if as_codes else found.dequantize()

    @staticmethod
    @once_differentiable("FP8 attention")
    def backward(ctx: Any, grad: Tensor) -> Any:
        exchange = ctx.exchange
        check_backward(exchange.group, grad)
        by_heads = (_values(grad).unflatten(-1, (exchange.call.heads, -1)),)
        (local,) = exchange_tokens(exchange, exchange.orders[:1], True, by_heads)
        return None, None, local.flatten(-2)


class FP8BlockPasses(BlockPasses):
    """Passes for one block on q, k and v codes, or on values if the recipe scales blocks.

    Args:
        fp8: FP8 attention of the call.
        requested: Requested backward pass, see `BackwardRequest`.
        storages: Settings and scales for the q, k and v codes; None for values.
    """

    def __init__(self, fp8: FP8Attention, requested: bool | None, storages: list[Any] | None):
        self._fp8, self._requested, self._storages = fp8, requested, storages

    def forward(self, bound: BoundBlock, inputs: AttentionInputs) -> Attended:
        fp8 = self._of(bound)
        rounded = fp8.passes.forward(fp8, self._present_inputs(inputs))
        assert rounded.output is not None
        return Attended(rounded.output, rounded.lse, rounded.rng_state, rounded.max_logit)

    def backward(
        self, bound: BoundBlock, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
    ) -> Gradients:
        fp8, inputs = self._of(bound), self._present_inputs(inputs)
        q, k, v, output = None, None, None, None
        if not fp8.passes.quantizes_again:
            q, k, v = (quantize_heads(x, fp8.quantizers.qkv) for x in inputs[:3])
        if not fp8.passes.high_precision:
            output = fp8.quantizers.output.encode(attended.output.flatten(-2), True, False)
        rounded = Rounded(q, k, v, output, attended.output, attended.lse, attended.rng_state)
        return fp8.passes.backward(fp8, inputs, rounded, grad_output.contiguous())

    def _of(self, bound: BoundBlock) -> FP8Attention:
        passes = choose_fp8(bound.call, self._fp8.scaling, self._requested)
        return replace(
            self._fp8,
            call=bound.call,
            passes=passes,
            state=None,
            fp8_output=False,
            scale_update=None,
        )

    def _present_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        if self._storages is None:
            return inputs
        q, k, v = (_wrap_codes(x, like) for x, like in zip(inputs[:3], self._storages, strict=True))
        return inputs._replace(q=q, k=k, v=v)


class _FP8BlockAttention(Function):
    """Autograd node of both passes over the blocks of a rank."""

    @staticmethod
    def forward(
        ctx: Any, plan: BlockPlan, fp8: FP8Attention, requested: bool | None, *tensors: Any
    ) -> Any:
        inputs = AttentionInputs(*tensors)
        values, storages = _dequantize_inputs(inputs), None
        q, k, v = values[:3]
        if fp8.scaling in TENSOR_SCALING:
            # Queries stay on their rank.
            shared = _shared_codes((inputs.k, inputs.v), fp8.quantizers.qkv, plan.groups.ring_group)
            storages = [quantize_heads(inputs.q, fp8.quantizers.qkv), *shared]
            heads = (plan.call.heads, plan.call.groups, plan.call.groups)
            q, k, v = (
                _split_heads(storage, count) for storage, count in zip(storages, heads, strict=True)
            )
        sent = inputs._replace(q=q, k=k, v=v)
        merged, states, max_logit = forward(plan, sent, FP8BlockPasses(fp8, requested, storages))
        output = merged.output.to(plan.call.dtype).flatten(-2)
        ctx.plan, ctx.fp8, ctx.requested = plan, fp8, requested
        ctx.like = None if storages is None else [storage.constants() for storage in storages]
        scales = [] if storages is None else [storage._scale_inv for storage in storages]
        ctx.scales = len(scales)
        ctx.save_for_backward(*sent, *scales, output, merged.lse, *states)
        ctx.mark_non_differentiable(*(x for x in (max_logit,) if x is not None))
        return output, max_logit

    @staticmethod
    @once_differentiable("FP8 attention")
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        plan, fp8, storages = ctx.plan, ctx.fp8, None
        fields = len(AttentionInputs._fields)
        saved, last = ctx.saved_tensors, fields + ctx.scales
        inputs, scales, (output, lse, *states) = (
            AttentionInputs(*saved[:fields]),
            saved[fields:last],
            saved[last:],
        )
        if ctx.like is not None:
            storages = [
                Float8TensorStorage(x, scale, **constants)
                for x, scale, constants in zip(inputs[:3], scales, ctx.like, strict=True)
            ]
        shape = (plan.call.heads, plan.call.head_dim_v)
        found = backward(
            plan,
            inputs,
            output.unflatten(-1, shape),
            lse,
            states,
            _values(grad_output).unflatten(-1, shape),
            FP8BlockPasses(fp8, ctx.requested, storages),
        )
        if fp8.scale_update is not None:
            fp8.scale_update.run()
        return None, None, None, *of_inputs(found)
