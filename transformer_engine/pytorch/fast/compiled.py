"""Compiled passes on a GPU: launches and products are bound once per call kind, then only started.

Pass functions run on symbols (`fast/symbols.py`), which record launches, products and collective calls. The record
becomes one function (`fast/generated_pass.py`). All choices are made by the pass functions. If a forced backend, an
observer, a dispatch mode or an offloading context is active, the call runs these functions directly.

A call kind is identified by its tensor strides and quantizer settings; the layer spec fixes the
rest. A backward pass also compares the saved tensors that belong to the caller, whose memory may
have changed, and all saved tensors if saved-tensor hooks are active.

Host time gain for a warm forward and backward pass (`benchmarks/fast_pieces.py`): 44 % of a small Linear with
current scaling (199 us instead of 358), 49 % of LayerNormLinear, 57 % of LayerNormMLP, 45 % of an RMSNorm and
Linear chain in `te.ops`, 48 % of a TransformerLayer (1048 us instead of 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.dispatch import requirements
from ...common.memory import Memory
from ..offload.marks import active as offloading
from ..primitives.gemm import products_depend_on_operands_alone
from ..runtime.device import is_current_device
from ..tensor.quantizer import Quantizer
from . import ENABLED
from .generated_pass import Generated, generate
from .symbols import Instructions, NotAligned, NotRecordable

# (inputs, *extra_arguments) -> (results, metadata); the input list is emptied
Evaluate = Callable[..., "tuple[tuple[Any, ...], Any]"]

_COMPILE_AT_CALL = 2  # shapes that occur once are not worth compiling
_MAX_ATTEMPTS = 8  # calls whose tensors may be unaligned before compilation is given up
_MAX_KINDS = 16  # cached kinds per pass
_hooks_on_saved: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]


class Kind:
    """Calls to a pass whose tensors have the same strides.

    Attributes:
        calls: Calls before the pass was compiled.
        given_up: The pass cannot be compiled; every call runs its functions.
        generated: The compiled pass; None before it is compiled, or if it cannot be.
        metadata: Non-tensor results of the pass: metadata of saved operands.
        input_results: Positions of results that are pass inputs, counted from the end (-1 is the last): the saved
            tensors, which are the last results, are also the last inputs of the backward pass.
        reason: Why the pass cannot be compiled; None before the first attempt.
    """

    __slots__ = ("calls", "generated", "given_up", "input_results", "metadata", "reason")

    def __init__(self, metadata: Any = None) -> None:
        self.calls = 0
        self.given_up = False
        self.generated: Generated | None = None
        self.metadata = metadata
        self.input_results: tuple[int, ...] = ()
        self.reason: str | None = None


def _kind(key: tuple[Any, ...]) -> Kind:
    return Kind()  # `Memory` calls this with the key, which a new Kind does not need


class CompiledPass:
    """One pass of a spec on one device.

    Args:
        evaluate: Runs the steps, on tensors or on symbols.
        device: Tensor device; None for a pass with effects that a compiled pass would not repeat.
        quantizers: Quantizers whose settings and states the pass reads.
    """

    __slots__ = ("device", "evaluate", "kinds", "quantizers")

    def __init__(
        self, evaluate: Evaluate, device: torch.device | None, quantizers: Sequence[Quantizer]
    ):
        self.evaluate = evaluate
        self.device = device
        self.quantizers = tuple(
            [quantizer for quantizer in quantizers if not quantizer.is_identity]
        )
        self.kinds: Memory[Any, Kind] = Memory(_kind, _MAX_KINDS)

    def __call__(
        self,
        key: list[Any],
        inputs: list[Any],
        extra_arguments: tuple[Any, ...],
        referenced_tensors: Sequence[Tensor] = (),
    ) -> tuple[tuple[Any, ...], Kind]:
        """Run the pass on its inputs; key and quantizers identify the call kind.

        Args:
            key: Input metadata.
            inputs: The inputs.
            extra_arguments: Arguments to `evaluate` after the inputs.
            referenced_tensors: Tensors that the extra arguments refer to.
        """
        states = [*referenced_tensors]
        for quantizer in self.quantizers:
            state = quantizer.compile_key()
            if state is None:
                return self.run_uncompiled(inputs, extra_arguments)
            key.append(state[0])
            states += state[1]
        kind = self.kinds[tuple(key)]
        if kind.generated is None and not kind.given_up and self.device is not None:
            self._compile(kind, inputs, states, extra_arguments, self.device)
        if kind.generated is not None:
            # One list, which the function empties: no other reference keeps saved tensors alive.
            inputs += states
            results = kind.generated(inputs)
            if results is not None:
                return results, kind
            del inputs[len(inputs) - len(states) :]
        return self.run_uncompiled(inputs, extra_arguments)

    def run_uncompiled(
        self, inputs: list[Any], extra_arguments: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Kind]:
        """Run the pass functions."""
        results, metadata = self.evaluate(inputs, *extra_arguments)
        return results, Kind(metadata)

    def _compile(
        self,
        kind: Kind,
        inputs: list[Any],
        states: list[Tensor],
        extra_arguments: tuple[Any, ...],
        device: torch.device,
    ) -> None:
        """Compile the pass in the second call of a kind; on failure set `kind.reason`."""
        if device.type == "cuda" and not is_current_device(device.index):
            return  # Triton loads kernels on the current device
        kind.calls += 1
        if kind.calls < _COMPILE_AT_CALL or (
            device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):
            return
        try:
            instructions = Instructions([*inputs, *states], device)
            symbols: list[Any] = instructions.symbols()
            results, metadata = self.evaluate(symbols[: len(inputs)], *extra_arguments)
            results_as_symbols = [instructions.symbol(result) for result in results]
            generated = generate(instructions, results_as_symbols)
        except NotRecordable as error:
            kind.reason = str(error)
            # Tensors in later calls may be aligned.
            attempts_left = kind.calls < _COMPILE_AT_CALL + _MAX_ATTEMPTS
            kind.given_up = not (isinstance(error, NotAligned) and attempts_left)
            return
        kind.metadata, kind.generated, kind.reason = metadata, generated, None
        inputs_count, results_count = len(instructions.inputs), len(results_as_symbols)
        kind.input_results = tuple(
            [
                i - results_count
                for i, result in enumerate(results_as_symbols)
                if result is not None and result.buffer < inputs_count
            ]
        )


class CompiledLayer:
    """A layer's two passes.

    Args:
        forward: The forward pass; it returns its results, then the tensors that it saves.
        backward: The backward pass from output gradients and saved tensors.
    """

    __slots__ = ("_backward", "_forward")

    def __init__(self, forward: CompiledPass, backward: CompiledPass):
        self._forward = forward
        self._backward = backward

    @property
    def passes(self) -> tuple[CompiledPass, CompiledPass]:
        return self._forward, self._backward

    def forward(
        self, inputs: list[Any], spec: Any, referenced_tensors: Sequence[Tensor] = ()
    ) -> tuple[tuple[Any, ...], Kind]:
        """Return results and saved tensors, and the call kind.

        Args:
            inputs: The inputs; the spec fixes everything about them but their strides.
            spec: Layer spec.
            referenced_tensors: Tensors in the spec's cached quantized weights.
        """
        if offloading.synchronizer is not None or not products_depend_on_operands_alone():
            return self._forward.run_uncompiled(inputs, (spec,))
        key = [None if tensor is None else tensor.stride() for tensor in inputs]
        if not referenced_tensors:
            return self._forward(key, inputs, (spec,))
        key += [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in referenced_tensors]
        return self._forward(key, inputs, (spec,), referenced_tensors)

    def save_kind(self, ctx: Any, kind: Kind) -> None:
        """Store the forward-pass kind in its node, whose saved tensors it determines."""
        ctx.forms = kind.metadata
        ctx.kind, ctx.hooked = kind, _hooks_on_saved(False) is not None

    def backward(self, ctx: Any, inputs: list[Any], grads: int, spec: Any) -> tuple[Any, ...]:
        """Input gradients.

        Args:
            ctx: The node.
            inputs: Result gradients, then the saved tensors.
            grads: Gradient count.
            spec: Layer spec.
        """
        kind: Kind = ctx.kind
        intervened = offloading.synchronizer is not None or not products_depend_on_operands_alone()
        if kind.generated is None or intervened or (ctx.hooked and offloading.used):
            return self._backward.run_uncompiled(inputs, (spec, ctx))[0]
        key: list[Any] = [kind, requirements.batch_invariant]
        compared = (
            inputs if ctx.hooked else [*inputs[:grads], *[inputs[i] for i in kind.input_results]]
        )
        for tensor in compared:
            if tensor is None:
                key.append(None)
            else:
                key += (type(tensor), tensor.shape, tensor.stride(), tensor.dtype)
        del compared
        return self._backward(key, inputs, (spec, ctx))[0]


def compiles_on(device: torch.device) -> bool:
    """Whether passes on a device are compiled: on a GPU, unless TE_FAST=0."""
    return ENABLED and device.type == "cuda"
