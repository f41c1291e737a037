"""o = attention(q, k, v) on FP8 tensors, where a recipe asks for it: fp8_dpa, or fp8_mha with o in FP8 as well.

The recipe state of an attention has three products' slots, of which it uses six: see `fp8_call`. What the backward
pass computes in is a choice of its own. On Hopper the FP8 backward is slower than the one in 16 bits (H200, batch 2,
8192 tokens, 32 query and 8 key heads of 128, causal: 7.5 ms, 5.0 ms), so that it runs only when
NVTE_FP8_DPA_BWD=1 asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common import env
from ....common.bounded import Bounded
from ....common.dispatch import Backend, Table, undisturbed
from ....common.recipe import DelayedScaling, Format, Recipe
from ...double_backward import once_differentiable
from ...functions.scale_update import ScaleUpdate
from ...quantization.autocast import AutocastState
from ...quantization.family import all_families, family_of
from ...tensor.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, storage_of
from . import choose, fp8_cudnn, fp8_emulation
from .autograd import Kernels, backward_of
from .backends import cudnn, cudnn_fp8
from .fp8_call import Call, Rounded, Slots, values_of
from .request import Attended, AttentionInputs, AttentionRequest, AttentionResult, Gradients

if TYPE_CHECKING:
    from ...module.layernorm_linear import LayerNormLinear
    from ...module.linear import Linear
    from .dot_product_attention import DotProductAttention


@dataclass(frozen=True)
class BackwardRequest:
    """What the choice of a backward pass depends on; asked: for FP8 (True), high precision (False), the faster."""

    attention: AttentionRequest
    forward: str
    asked: bool | None


def _never(request: object) -> None:
    return None


def _refuses_cudnn_forward(request: AttentionRequest) -> str | None:
    if request.fp8 == "block":
        return "the recipe scales blocks; it takes one scale a tensor"
    return cudnn_fp8.refuses(request)


FORWARD: Table[AttentionRequest] = Table(
    "fp8_attention",
    (
        Backend("cudnn", fp8_cudnn.forward, _refuses_cudnn_forward),
        Backend("emulated", fp8_emulation.forward, _never),
    ),
)


def _refuses_cudnn_backward(request: BackwardRequest) -> str | None:
    if request.asked is False:
        return "high precision is asked for (NVTE_FP8_DPA_BWD=0, or bf16_backward)"
    if request.forward != "cudnn":
        return f"the forward pass is {request.forward!r}"
    if request.attention.fp8 != "delayed":
        return "it needs the scale of dP before dP; only delayed scaling has one"
    if request.asked is None:
        return "slower than 16 bits on compute capability 9.0; NVTE_FP8_DPA_BWD=1 asks for it"
    return cudnn_fp8.refuses_backward(request.attention)


def _refuses_high_precision(request: BackwardRequest) -> str | None:
    return "NVTE_FP8_DPA_BWD=1 asks for FP8" if request.asked else None


def _high_precision(call: Call, inputs: AttentionInputs, rounded: Rounded, grad_output: Tensor) -> Gradients:
    """Gradients at the unrounded tensors, with the statistics of the forward pass."""
    r = call.request
    q, k, v = (x.decode(r.dtype) if isinstance(x, QuantizedTensorStorage) else x for x in inputs[:3])
    output = values_of(rounded.codes, r.dtype, r.heads) if rounded.output is None else rounded.output
    attended = Attended(output, rounded.lse, rounded.rng_state)
    return backward_of(call.kernels, r, inputs._replace(q=q, k=k, v=v), attended, grad_output)


BACKWARD: Table[BackwardRequest] = Table(
    "fp8_attention_backward",
    (
        Backend("cudnn", fp8_cudnn.backward, _refuses_cudnn_backward),
        Backend("high_precision", _high_precision, _refuses_high_precision),
        Backend("emulated", fp8_emulation.backward, _never),
    ),
)


@functools.lru_cache(maxsize=64)
def _from_environment(texts: tuple[str | None, ...]) -> Recipe | None:
    """The recipe that NVTE_DPA_FP8_RECIPE names for attention; None for F16. texts: those of _VARIABLES, the key."""
    kind = env.get("NVTE_DPA_FP8_RECIPE")
    common: dict[str, Any] = {
        "fp8_format": Format[str(env.get("NVTE_DPA_FP8_FORMAT"))],
        "fp8_dpa": env.flag("NVTE_DPA_FP8_RECIPE_DPA"),
        "fp8_mha": env.flag("NVTE_DPA_FP8_RECIPE_MHA"),
    }
    if kind == "DelayedScaling":
        return DelayedScaling(
            amax_history_len=int(env.get("NVTE_DPA_FP8DS_AMAX_HISTLEN") or 1),
            amax_compute_algo=str(env.get("NVTE_DPA_FP8DS_AMAX_ALGO")),
            reduce_amax=env.flag("NVTE_DPA_FP8DS_REDUCE_AMAX"),
            **common,
        )
    chosen: list[Any] = [family.recipe for family in all_families() if family.recipe.__name__ == kind]
    return chosen[0](**common) if chosen else None


_VARIABLES = (
    "NVTE_DPA_FP8_RECIPE",
    "NVTE_DPA_FP8_FORMAT",
    "NVTE_DPA_FP8_RECIPE_DPA",
    "NVTE_DPA_FP8_RECIPE_MHA",
    "NVTE_DPA_FP8DS_AMAX_HISTLEN",
    "NVTE_DPA_FP8DS_AMAX_ALGO",
    "NVTE_DPA_FP8DS_REDUCE_AMAX",
)


def attention_recipe(recipe: Recipe | None) -> Recipe | None:
    """The recipe of the attention under a recipe of the layers round it; None: no FP8 attention."""
    if recipe is None:
        return None
    if env.get("NVTE_DPA_FP8_RECIPE"):
        recipe = _from_environment(env.texts(_VARIABLES))
    # A recipe from outside need not have the two fields.
    if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        return recipe
    return None


def outputs_codes(state: AutocastState) -> bool:
    """Do the projections round an attention hand it codes, and take its output as codes (fp8_mha)?

    A compiled graph has no quantized tensors at the borders of its modules.
    """
    if not state.enabled or not getattr(state.recipe, "fp8_mha", False) or torch.compiler.is_compiling():
        return False
    recipe = attention_recipe(state.recipe)
    return recipe is not None and recipe is state.recipe and family_of(recipe).kind == "fp8"


def projects_codes(projection: Linear | LayerNormLinear, state: AutocastState, x: Tensor) -> bool:
    """Does a projection of x compute in FP8, so that its output slot can make codes? Then of rows alone.

    Not under delayed scaling, whose scales follow what a slot has seen: compiled calls and those with a cache use the
    attention's own slot, so all have to. Not in training with a backward in 16 bits, which has to turn the codes into
    values again: on an H200 (2 sequences of 2048, 32 query and 8 key heads of 128) both passes of the layer then take
    1.94 ms instead of 1.76, while a forward alone takes 0.50 instead of 0.55.
    """
    assert state.recipe is not None
    if family_of(state.recipe).follows_history or (projection.training and not env.flag("NVTE_FP8_DPA_BWD")):
        return False
    extents = (projection.in_features, projection.out_features)
    (product,) = projection.quantizable_products(state, x, (extents,))
    if product.output.is_identity:
        return False
    # Attention contracts the sizes of heads: no product reads these codes by columns.
    product.output.set_usage(columnwise=False)
    return True


def scaling_of(recipe: Recipe) -> str:
    """ "delayed", "current" or "block"; ValueError for recipes whose tensors are not FP8."""
    scaling = family_of(recipe).attention
    if scaling is not None:
        return scaling
    raise ValueError(
        f"{type(recipe).__name__} has no FP8 attention; set NVTE_DPA_FP8_RECIPE=DelayedScaling or "
        "Float8CurrentScaling with NVTE_DPA_FP8_RECIPE_DPA=1, or leave fp8_dpa and fp8_mha False"
    )


@dataclass(frozen=True)
class Attention:
    """The FP8 attention of one call, in the place of a backend."""

    call: Call
    passes: Passes
    fp8_output: bool
    scale_update: ScaleUpdate | None

    def run(self, request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
        """o [.., h * d_v], differentiable in q, k, v, bias and sink."""
        if request.needs_gradient:
            return AttentionResult(*_Attention.apply(self, *inputs))
        rounded = self.passes.forward(self.call, inputs)
        return AttentionResult(self.result(rounded), rounded.max_logit)

    def result(self, rounded: Rounded) -> Tensor:
        if self.fp8_output:
            return self.call.slots.output.wrap(rounded.codes)
        assert rounded.output is not None
        return rounded.output.flatten(-2)


def chosen(
    module: DotProductAttention,
    state: AutocastState,
    request: AttentionRequest,
    fp8_output: bool,
    bf16_backward: bool | None,
    recompute: bool,
) -> Attention | Recomputed:
    """The FP8 attention of a request under an autocast state whose recipe asks for one.

    fp8_output      return o as a Float8Tensor
    bf16_backward   True: gradients in high precision; None: as NVTE_FP8_DPA_BWD says, unset the faster
    recompute       the attention runs again in the backward pass
    """
    recipe = attention_recipe(state.recipe)
    assert recipe is not None
    kind = scaling_of(recipe)
    if recipe is not state.recipe:
        state = replace(state, recipe=recipe)
    products = module._product_quantizers(state)
    slots = Slots(
        qkv=products[0].output,
        output=products[1].input,
        softmax=products[2].output,
        grad_qkv=products[0].grad_output,
        grad_output=products[1].grad_input,
        grad_softmax=products[2].grad_input,
    )
    asked = False if bf16_backward else env.get("NVTE_FP8_DPA_BWD")
    passes = _passes(request, kind, asked)  # pyright: ignore[reportArgumentType]
    active = module._module_recipe
    direct = kind == "delayed" and active is not None and products is active.products
    call = Call(
        request,
        kind,
        slots,
        module.fp8_meta["scaling_fwd"] if direct else None,
        passes.kernels,
        wants_values=not fp8_output,
    )
    update = module._scale_update(state, request.needs_gradient)
    attention = Attention(call, passes, fp8_output, update)
    return Recomputed(attention) if recompute else attention


@dataclass(frozen=True)
class Passes:
    """The implementations that were chosen; kernels: the attention in the request's own dtype beside them."""

    forward: Callable[..., Rounded]
    backward: Callable[..., Gradients]
    kernels: Kernels
    high_precision: bool


_remembered: Bounded[tuple[Any, ...], Passes] = Bounded(1024)


def _passes(request: AttentionRequest, scaling: str, asked: bool | None) -> Passes:
    """Both passes of a request, looked up where it was met before."""
    if torch.compiler.is_compiling():
        return _choose_when_traced(request, scaling, asked)
    if not undisturbed():
        return _choose(request, scaling, asked)
    key = (request, scaling, asked)
    found = _remembered.get(key)
    if found is None:
        found = _remembered.keep(key, _choose(request, scaling, asked))
    return found


def _choose(request: AttentionRequest, scaling: str, asked: bool | None) -> Passes:
    described = replace(request, fp8=scaling)
    forward = FORWARD.select(described)
    backward = (
        BACKWARD.select(BackwardRequest(described, forward.name, asked)) if request.needs_gradient else None
    )
    # After cuDNN's FP8 kernel its own 16-bit backward, whose statistics are the same.
    by_cudnn = forward.name == "cudnn" and cudnn.refuses(request) is None
    return Passes(
        forward.run,
        _high_precision if backward is None else backward.run,
        cudnn.KERNELS if by_cudnn else choose.kernels(request),
        backward is None or backward.name == "high_precision",
    )


def _choose_when_traced(request: AttentionRequest, scaling: str, asked: bool | None) -> Passes:
    """Emulation, which a tracing compiler sees through; cuDNN's FP8 kernels write the state in place."""
    backward = fp8_emulation.backward if asked else _high_precision
    return Passes(fp8_emulation.forward, backward, choose.kernels_when_traced(request), not asked)


class Recomputed:
    """An attention that runs again in its backward pass, with the scales that it had at first."""

    def __init__(self, attention: Attention):
        self.attention = attention
        self.again: Attention | None = None

    def run(self, request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
        if self.again is not None:
            return self.again.run(request, inputs)
        call = self.attention.call
        slots = Slots(  # pyright: ignore[reportCallIssue]
            *(quantizer.replaying(quantizer.replay_state()) for quantizer in call.slots[:3]), *call.slots[3:]
        )
        self.again = replace(self.attention, call=call._replace(slots=slots, state=None))
        return self.attention.run(request, inputs)


class _Attention(torch.autograd.Function):
    """Autograd shell of the two passes."""

    @staticmethod
    def forward(ctx: Any, attention: Attention, *tensors: Any) -> Any:
        inputs = AttentionInputs(*tensors)
        rounded = attention.passes.forward(attention.call, inputs)
        ctx.attention = attention
        keep_inputs = attention.passes.high_precision
        saved = _Saved()
        for x in inputs[:3]:
            saved.add(x if keep_inputs else None)
        for x in inputs[3:]:
            saved.add(x)
        for x in rounded[:3]:
            saved.add(None if keep_inputs else x)
        saved.add(None if keep_inputs and rounded.output is not None else rounded.codes)
        saved.add(rounded.output if keep_inputs else None)
        for x in rounded[5:]:
            saved.add(x)
        ctx.forms = saved.forms
        ctx.save_for_backward(*saved.tensors)
        result = attention.result(rounded)
        if rounded.max_logit is not None:
            ctx.mark_non_differentiable(rounded.max_logit)
        return result, rounded.max_logit

    @staticmethod
    @once_differentiable("FP8 attention")
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        attention: Attention = ctx.attention
        call = attention.call
        values = _restored(ctx.saved_tensors, ctx.forms)
        count = len(AttentionInputs._fields)
        inputs, rounded = AttentionInputs(*values[:count]), Rounded(*values[count:])
        if isinstance(grad_output, QuantizedTensor):
            grad_output = grad_output.dequantize()
        shape = (call.request.heads, call.request.head_dim_v)
        gradients = attention.passes.backward(call, inputs, rounded, grad_output.unflatten(-1, shape))
        if attention.scale_update is not None:
            attention.scale_update.run()
        given: list[Tensor | None] = [None] * count
        given[:3] = gradients[:3]
        given[AttentionInputs._fields.index("bias")] = gradients.bias
        given[AttentionInputs._fields.index("sink")] = gradients.sink
        return None, *given


class _Saved:
    """Tensors and storages on their way through save_for_backward."""

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] = []
        self.forms: list[tuple[int, Any]] = []

    def add(self, x: Any) -> None:
        if isinstance(x, QuantizedTensorStorage):
            tensors, rebuild = QuantizedTensorStorage.flatten(
                storage_of(x) if isinstance(x, QuantizedTensor) else x
            )
            self.tensors += tensors
            self.forms.append((len(tensors), rebuild))
        else:
            self.tensors.append(x)
            self.forms.append((1, None))


def _restored(tensors: Sequence[Tensor | None], forms: Sequence[tuple[int, Any]]) -> list[Any]:
    """What was added to a _Saved."""
    values: list[Any] = []
    start = 0
    for count, rebuild in forms:
        part = tensors[start : start + count]
        values.append(part[0] if rebuild is None else rebuild(part))
        start += count
    return values
