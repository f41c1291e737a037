"""RecordedStep: a training step that has been recorded once, and its replay for other data.

The recording reads static inputs, and leaves outputs and gradients in static memory. Everything
else that it reads or writes (parameters, optimizer and recipe states) is the memory of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ..quantization import delayed_scaling
from ..runtime.capture import Recorder, Recording
from .caching import flagged
from .signature import CONSTANTS, ArgumentLeaves
from .step_state import SavedHostState, StepState


class _WatchedGradient(Tensor):
    """A gradient from an earlier call, which notes its reads while a step is recorded."""

    read = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, _WatchedGradient):
                leaf.read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class EntryGradients:
    """The gradients that exist before a step, and what the step does with them.

    A step that sets them to None and computes others does not read their memory. A step that adds
    to them, or clears them in place, uses the same memory in every replay.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters = parameters
        self.before = [parameter.grad for parameter in parameters]
        self._watched: dict[int, _WatchedGradient] = {}
        self.replaced: list[bool] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note gradient reads inside the block.

        Raises:
            RuntimeError: The step reads a gradient from an earlier call and then replaces it.
        """
        for parameter, gradient in zip(self.parameters, self.before, strict=True):
            if gradient is not None:
                parameter.grad = self._watched[id(parameter)] = gradient.as_subclass(
                    _WatchedGradient
                )
        handle = register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: self._unwatch(optimizer)
        )
        try:
            yield
        finally:
            handle.remove()
        for parameter, gradient, replaced in zip(
            self.parameters, self.before, self.replaced, strict=True
        ):
            watched = self._watched.get(id(parameter))
            if not replaced:
                parameter.grad = gradient
            elif watched is not None and watched.read:
                raise RuntimeError(
                    "the step reads a gradient of the previous call before it sets the gradients to None; set them to "
                    "None at the end of the step, or clear them with zero_grad(set_to_none=False)"
                )

    def results(self) -> list[Tensor | None]:
        """Return the gradients after the step, None for gradients in the earlier memory; called inside `watched`."""
        if not self.replaced:
            self.replaced = [
                parameter.grad is not gradient
                and parameter.grad is not self._watched.get(id(parameter), gradient)
                for parameter, gradient in zip(self.parameters, self.before, strict=True)
            ]
        return [
            p.grad if new else None for p, new in zip(self.parameters, self.replaced, strict=True)
        ]

    def _unwatch(self, optimizer: torch.optim.Optimizer) -> None:
        """Return the plain gradients to an optimizer, whose step reads them."""
        parameter_ids = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        for parameter, gradient in zip(self.parameters, self.before, strict=True):
            watched = self._watched.get(id(parameter))
            if id(parameter) in parameter_ids and watched is not None and parameter.grad is watched:
                watched.read = True
                parameter.grad = gradient


class RecordedStep:
    """A recorded training step.

    Attributes:
        constants: Result leaves that are not tensors; None at tensor positions.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: ArgumentLeaves,
        state: StepState,
        recorder: Recorder,
    ):
        """Record the step; the device computes nothing.

        Raises:
            Exception: The step cannot be recorded. Gradients, buffers and optimizers are unchanged.
        """
        self._inputs = [tensor.detach().clone() for tensor in leaves.tensors]
        self._parameters = state.parameters
        arguments = list(leaves.constants)
        for position, tensor in zip(leaves.positions, self._inputs, strict=True):
            arguments[position] = tensor
        args, kwargs = pytree.tree_unflatten(arguments, leaves.structure)
        gradients = EntryGradients(state.parameters)
        saved = SavedHostState(state)
        self.constants: tuple[Any, ...] = ()
        self._structure: Any = None
        self._outputs = 0
        # Scale updates write to the states of all modules, also to modules that other models own.
        self._scales = [
            (member.scale_in_place, member.amax_history)
            for pool in delayed_scaling.registry.pools.values()
            for member in pool.states
        ]

        def step() -> list[Tensor | None]:
            with flagged(False):
                result = function(*args, **kwargs)
            results, self._structure = pytree.tree_flatten(result)
            self.constants = plain_leaves(results)
            tensors = [leaf.detach() for leaf in results if isinstance(leaf, Tensor)]
            self._outputs = len(tensors)
            return [*tensors, *gradients.results()]

        try:
            with gradients.watched():
                self._recording: Recording = recorder.record(step)
        except BaseException:
            saved.restore()
            raise
        self._kept = [
            (parameter, gradient.data_ptr())
            for parameter, gradient, new in zip(
                state.parameters, gradients.before, gradients.replaced, strict=True
            )
            if gradient is not None and not new
        ]
        self._replaced = [i for i, new in enumerate(gradients.replaced) if new]
        for index in self._replaced:  # until the first replay, which computes the others
            self._parameters[index].grad = gradients.before[index]

    @property
    def is_stale(self) -> bool:
        """Whether a gradient that the step accumulates in has other memory than during the recording."""
        return any(p.grad is None or p.grad.data_ptr() != address for p, address in self._kept)

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Compute the step for input tensors with the recorded shapes; the result belongs to the caller."""
        moved_tensors = [
            (static, tensor)
            for static, tensor in zip(self._inputs, tensors, strict=True)
            if static.data_ptr() != tensor.data_ptr()
        ]
        if moved_tensors:
            torch._foreach_copy_(
                [static for static, _ in moved_tensors], [tensor for _, tensor in moved_tensors]
            )
        self._recording.replay()
        results = self._recording.results
        for index in self._replaced:
            self._parameters[index].grad = results[self._outputs + index]
        outputs = iter(
            [result.clone() for result in results[: self._outputs] if result is not None]
        )
        leaves = [next(outputs) if leaf is _TENSOR else leaf for leaf in self.constants]
        return pytree.tree_unflatten(leaves, self._structure)

    def reset(self) -> None:
        """Free the graph. Gradients in its memory stay valid."""
        self._recording.reset()


_TENSOR = object()


def plain_leaves(results: Sequence[Any]) -> tuple[Any, ...]:
    """Return the leaves of a result with a mark in place of each tensor.

    Raises:
        RuntimeError: A leaf is neither a tensor nor a constant.
    """
    for leaf in results:
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            raise RuntimeError(
                f"the step returns an object of type {type(leaf).__name__}, which a replay would not renew; return "
                "tensors"
            )
    return tuple([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in results])
