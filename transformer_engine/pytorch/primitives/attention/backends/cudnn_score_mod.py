"""Score functions inside cuDNN's graphs: supported calls, their tensors and callbacks.

A function is score_mod(graph, score, tensors), or the softcap of a call.

The library calls back with its own graph while it builds a plan. The callbacks repeat the recorded program,
and never call the user's functions: a plan depends on the program, the attention and the tensor metadata.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....common.score_program import (
    FIRST_OPERAND,
    GRADIENT,
    SCORE,
    RecordedScoreMod,
    ScoreProgram,
    record,
    run_calls,
)
from ..call import AttentionCall
from .cudnn_graph import MOST_SCORE_MOD_TENSORS, Description, Strides, contiguous_strides

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ScoreModTensor(NamedTuple):
    """Metadata of a score_mod tensor; shape and strides have 4 dimensions, which broadcast with [b, h, s_q, s_kv].

    Attributes:
        number: Number of the tensor in the program.
        on_host: Whether it is one number in host memory, which the library reads when it launches a kernel.
    """

    number: int
    shape: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype
    on_host: bool

    @property
    def role(self) -> str:
        """Name of the tensor among the roles of a plan."""
        return f"score_mod_{self.number - FIRST_OPERAND}"


class Modifier(NamedTuple):
    """A program with its tensor metadata: everything that a plan with a score_mod depends on."""

    program: ScoreProgram
    operands: tuple[ScoreModTensor, ...]

    def callbacks(
        self, description: Description, with_gradient: bool
    ) -> dict[str, Callable[..., Any]]:
        """Describe the tensors that one pass reads; return the arguments score_mod and score_mod_bprop of the pass."""
        program = self.program.needed(with_gradient)
        read = program.operands()
        operands: dict[int, Any] = {}
        for operand in self.operands:
            if operand.number in read:
                operands[operand.number] = description.tensor(
                    operand.role,
                    operand.shape,
                    operand.strides,
                    operand.dtype,
                    on_host=operand.on_host,
                )
        # The gradient reads values that the function has computed in the same graph.
        values: dict[int, Any] = {}

        def modify(graph: Any, score: Any) -> Any:
            values.clear()
            values.update(operands)
            values[SCORE] = score
            return run_calls(program.modify, program.modified, graph, values, setters=True)

        def differentiate(graph: Any, gradient: Any) -> Any:
            assert program.gradient is not None
            values[GRADIENT] = gradient
            return run_calls(program.differentiate, program.gradient, graph, values, setters=True)

        functions: dict[str, Callable[..., Any]] = {"score_mod": modify}
        if program.gradient is not None:
            functions["score_mod_bprop"] = differentiate
        return functions


def _record_score(call: AttentionCall) -> RecordedScoreMod | None:
    """Recorded softcap or score_mod of a call; None for functions of indices, which are plain callables."""
    if call.softcap != 0.0:
        return _softcap(call.softcap)
    return getattr(call.score_mod, "recorded", None)


@functools.lru_cache(maxsize=64)
def _softcap(limit: float) -> RecordedScoreMod:
    """Record limit * tanh(score / limit) and its derivative."""

    class Softcap:
        def forward(self, graph: Any, score: Any, tensors: Any) -> Any:
            self.ratio = graph.div(a=score, b=tensors["softcap"])
            return graph.mul(a=graph.tanh(input=self.ratio), b=tensors["softcap"])

        def backward(self, graph: Any, gradient: Any, tensors: Any) -> Any:
            return graph.tanh_backward(loss=gradient, input=self.ratio)

    function = Softcap()
    program = record(function.forward, ("softcap",), function.backward, ())
    with torch.inference_mode(False):  # later calls may save the tensor for a backward pass
        number = torch.tensor(limit, dtype=torch.float32, device="cpu")
    return RecordedScoreMod(program, {"softcap": number}, {})


def unsupported_score_mod(call: AttentionCall) -> str | None:
    """Return the reason why the softcap or score_mod of a call, or a call with it, is unsupported, or None."""
    function = "score_mod" if call.softcap == 0.0 else "softcap"
    if call.score_mod is None and call.softcap == 0.0:
        return None
    if call.score_mod is not None and call.softcap != 0.0:
        return "softcap together with score_mod"
    score_mod = _record_score(call)
    if score_mod is None:
        return "score_mod takes indices; supported: score_mod(graph, score, tensors)"
    program = score_mod.program
    if isinstance(program, str):
        return program
    # The library crashes on such graphs.
    if not program.depends_on(SCORE, program.modified):
        return "a score_mod whose result does not depend on the scores"
    if program.gradient is not None and not program.depends_on(GRADIENT, program.gradient):
        return "a score_mod_bprop whose result does not depend on the gradient"
    graph_calls = program.needed(call.needs_gradient)
    operands = graph_calls.operands()
    for step in (*graph_calls.modify, *graph_calls.differentiate):
        if step.reads() <= operands:
            return f"graph.{step.method} of score_mod_tensors alone; compute it before the call"
    for name, setting, supported in (
        ("attn_mask_type", call.mask.name, "no_mask"),
        ("window_size", call.mask.window, (-1, -1)),
        ("core_attention_bias_type", call.bias, "no_bias"),
        ("softmax_type", call.softmax, "vanilla"),
        ("attention_dropout", call.dropout, 0.0),
        ("return_max_logit", call.max_logit, False),
        ("page_size", call.page_size, 0),
    ):
        if setting != supported:
            return f"{function} with {name}={setting!r}; supported: {supported!r}"
    if call.packed or call.cached:
        return f"{function} with packed sequences or a cache of keys and values"
    if call.needs_gradient and program.gradient is None:
        if not program.adds_only():
            return "gradients of a score_mod that does more than add to the scores; give score_mod_bprop"
        if any(tensor.requires_grad for tensor in score_mod.operands()):
            return "gradients of score_mod_tensors"
    return _unsupported_tensors(call, score_mod)


def _unsupported_tensors(call: AttentionCall, score_mod: RecordedScoreMod) -> str | None:
    """Return the reason why score_mod tensors are unsupported, or None."""
    tensors = score_mod.operands()
    if len(tensors) > MOST_SCORE_MOD_TENSORS:
        return f"{len(tensors)} tensors of a score_mod; supported: at most {MOST_SCORE_MOD_TENSORS}"
    names = (
        *(f"score_mod_tensors[{name!r}]" for name in score_mod.tensors),
        *(f"score_mod_bprop_tensors[{name!r}]" for name in score_mod.bprop_tensors),
    )
    scores = (call.batch, call.heads, call.seqlen_q, call.seqlen_kv)
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype not in _DTYPES:
            return f"{name} is {tensor.dtype}; supported: float32, bfloat16 and float16"
        if tensor.numel() == 1:
            continue
        broadcasts = tensor.dim() == 4 and all(
            size in (1, full) for size, full in zip(tensor.shape, scores, strict=True)
        )
        if not broadcasts:
            return f"{name} is {list(tensor.shape)}, which does not broadcast to the scores {list(scores)}"
        one_row = tensor.shape[2] == 1 or tensor.stride(2) == 0
        columns = tensor.shape[3] > 1 and tensor.stride(3) != 0
        if call.needs_gradient and call.seqlen_q > 1 and one_row and columns:
            # cuDNN 9.19 on an H200: gradients with relative error 0.9, while the output is correct.
            return f"gradients with {name} {list(tensor.shape)}, one row for all queries; give a row for each"
        if tensor.shape[0] > 1 and tensor.stride(0) != 0 and one_row and not columns:
            # cuDNN 9.19 on an H200: values with relative errors from 0.1 to 0.9.
            return f"{name} {list(tensor.shape)}, one number for each sequence; give one for each query"
    return None


def bound_tensors(
    call: AttentionCall, device: torch.device
) -> tuple[Modifier | None, tuple[Tensor, ...]]:
    """Return the modifier for a supported call, and the tensors in operand order.

    A one-element tensor on the host stays there, in float32; other tensors on the host are copied to the device.
    """
    score_mod = _record_score(call)
    if score_mod is None:
        return None, ()
    assert isinstance(score_mod.program, ScoreProgram)
    operands: list[ScoreModTensor] = []
    tensors: list[Tensor] = []
    for number, tensor in enumerate(score_mod.operands(), FIRST_OPERAND):
        tensor = tensor.detach()
        on_host = tensor.numel() == 1 and tensor.device.type == "cpu"
        if tensor.numel() == 1:
            tensor = tensor.reshape(1, 1, 1, 1)
        # A number on the host becomes float32, the dtype of the scores.
        tensor = tensor.to(torch.float32) if on_host else tensor.to(device)
        # An expanded dimension, whose stride is zero, is one element that broadcasts.
        for axis, stride in enumerate(tensor.stride()):
            if stride == 0:
                tensor = tensor.narrow(axis, 0, 1)
        tensor = tensor.contiguous()
        # The library reads the strides of one-element dimensions too, where tensor.stride() is arbitrary.
        strides = contiguous_strides(tensor.shape)
        operands.append(ScoreModTensor(number, tuple(tensor.shape), strides, tensor.dtype, on_host))
        tensors.append(tensor)
    return Modifier(score_mod.program, tuple(operands)), tuple(tensors)
