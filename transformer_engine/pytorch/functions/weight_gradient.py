"""dw [N, K] = dy.T [N, M] @ x [M, K]: returned, accumulated into weight.main_grad, or delayed until `pop`."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...common.memory import Memory
from ..distributed_weight import ShardGroup, is_distributed_weight
from ..primitives.gemm import Epilogue, multiply
from ..primitives.operand import Operand
from ..runtime.capture import is_capturing
from ..runtime.device_tables import keep_if_captured
from .main_grad import find_main_grad

_OUTSIDE = -1  # autograd's number outside backward passes


class _Pass:
    """A backward pass, and whether it is complete."""

    __slots__ = ("is_complete", "number")

    def __init__(self, number: int, is_complete: bool) -> None:
        self.number = number
        self.is_complete = is_complete

    @staticmethod
    def running() -> _Pass:
        """Return the pass that this thread runs; outside autograd, a pass that is complete at once."""
        number = torch._C._current_graph_task_id()
        if number == _OUTSIDE or torch.compiler.is_compiling():
            return _Pass(_OUTSIDE, True)
        started = _Pass(number, False)
        torch.autograd.Variable._execution_engine.queue_callback(started.end)
        return started

    def end(self) -> None:
        self.is_complete = True


class WeightGradStore:
    """Queue for weight gradients that a backward pass delays until `backward_dw()`.

    Autograd does not report a pass that raises; it only omits the pass's callbacks. Gradients in such a pass are
    dropped, with a warning: `backward_dw()` would otherwise return them in place of the next pass's gradients.

    Args:
        delay_wgrad_compute: Queue gradients; otherwise `put` and `pop` raise RuntimeError.
        ub_bulk_wgrad: Must be False when gradients are delayed: communication cannot overlap a product that runs later.

    Attributes:
        shards: Distributed weight groups in the layer's last forward pass, see `ShardGroup`.
    """

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        if delay_wgrad_compute and ub_bulk_wgrad:
            raise ValueError(
                "delay_wgrad_compute=True and ub_bulk_wgrad=True exclude each other; set one of them to False"
            )
        self.enabled = delay_wgrad_compute
        self.shards: Sequence[ShardGroup] = ()
        self.context: deque[tuple[Sequence[Any], Callable[..., Any]]] = deque()
        self._passes: deque[_Pass] = deque()  # the pass that queued each entry of `context`
        self._last = _Pass(_OUTSIDE, True)

    def delay_wgrad_compute(self) -> bool:
        """Whether weight gradients are delayed."""
        return self.enabled

    def put(self, tensor_list: Sequence[Any], func: Callable[..., Any]) -> None:
        """Queue func(*tensor_list) as a product in the running backward pass.

        Raises:
            RuntimeError: The store was made with delay_wgrad_compute=False.
        """
        if not self.enabled:
            raise RuntimeError(
                "this WeightGradStore delays nothing; make it with delay_wgrad_compute=True"
            )
        if self._last.number == _OUTSIDE or self._last.number != torch._C._current_graph_task_id():
            self._last = _Pass.running()
        self.context.append((tensor_list, func))
        self._passes.append(self._last)

    def pop(self) -> tuple[Any, Sequence[Any]]:
        """Compute the oldest queued gradient.

        Returns:
            The result of the function, and the tensors that it was queued with.

        Raises:
            RuntimeError: The queue is empty.
        """
        self._drop_failed()
        if not self.context:
            raise RuntimeError(
                "no weight gradient waits; call backward_dw() once after each backward pass"
            )
        tensor_list, func = self.context.popleft()
        self._passes.popleft()
        self._drop_failed()
        return func(*tensor_list), tensor_list

    def _drop_failed(self) -> None:
        """Drop entries from failed passes at the head of the queue, so that each entry is examined once."""
        if torch._C._current_graph_task_id() != _OUTSIDE:
            return  # entries from a pass that still runs are not complete either
        dropped = 0
        while self._passes and not self._passes[0].is_complete:
            self._passes.popleft()
            self.context.popleft()
            dropped += 1
        if dropped:
            warnings.warn(
                f"{dropped} delayed weight gradients of a backward pass that raised are dropped; "
                "call backward_dw() after backward passes that succeed",
                stacklevel=4,
            )

    def assert_empty(self) -> None:
        """Raise AssertionError unless every queued gradient has been computed."""
        if self.context:
            raise AssertionError(
                f"{len(self.context)} delayed weight gradients were not computed; call backward_dw() after each "
                "backward pass"
            )

    def __len__(self) -> int:
        return len(self.context)


# Parameters whose next gradient overwrites main_grad: {weight index, 0 unless the weights are stacked: id of the
# captured backward pass that has already added to main_grad, or _OUTSIDE if none has}.
_unwritten: WeakIdKeyDictionary = WeakIdKeyDictionary()


def begin_first_microbatch(parameters: Sequence[Any]) -> None:
    """Let the next gradient of each weight overwrite its main_grad; later gradients add to it.

    The backward function order decides which gradient is the next one. A module that is called several times,
    tied modules and several forward passes before a backward pass therefore accumulate the gradients from all
    calls, and so do modules with separate parameters whose main_grad is the same memory.

    Args:
        parameters: The parameter per weight; the parameter of a stack occurs once per weight.
    """
    for parameter in parameters:
        _unwritten.pop(parameter, None)
    for parameter in parameters:
        indices: dict[int, int] = _unwritten.setdefault(parameter, {})  # pyright: ignore[reportAssignmentType]
        indices[len(indices)] = _OUTSIDE
    if torch.compiler.is_compiling():
        return
    for parameter in dict.fromkeys(parameters):
        memory = _memory_of_main_grad(parameter)
        if memory is None:
            continue
        other = _parameters.get(memory)
        _parameters[memory] = parameter
        if other is None or other is parameter or _memory_of_main_grad(other) != memory:
            continue
        entry: Any = _unwritten.get(other)
        if entry and len(entry) == len(_unwritten[parameter]):
            _unwritten[parameter] = entry


def _memory_of_main_grad(parameter: Any) -> tuple[torch.device, int] | None:
    """A parameter's main_grad device and address; None if wrappers may use its memory for another weight next."""
    main_grad = getattr(parameter, "main_grad", None)
    if (
        not isinstance(main_grad, Tensor)
        or is_distributed_weight(parameter)
        or hasattr(parameter, "__fsdp_param__")
    ):
        return None
    return main_grad.device, main_grad.data_ptr()


# The last parameter whose first microbatch began with each main_grad.
_parameters: weakref.WeakValueDictionary[tuple[torch.device, int], Any] = (
    weakref.WeakValueDictionary()
)


def overwrite_once(gradients: Iterable[WeightGradient]) -> None:
    """Make weights with one main_grad overwrite it once: the first gradient overwrites, the others are added.

    The function is called before the gradients are accumulated. The weights then share one entry in `_unwritten`,
    which the first gradient empties.
    """
    if not len(_unwritten):
        return
    entries: dict[tuple[torch.device, int], dict[int, int]] = {}
    for parameter in [gradient.parameter for gradient in gradients]:
        entry: Any = _unwritten.get(parameter)
        memory = _memory_of_main_grad(parameter) if entry else None
        if memory is not None:  # a delayed gradient may get main_grad later
            _unwritten[parameter] = entries.setdefault(memory, entry)


def restart_sums(parameters: Iterable[Any]) -> None:
    """Clear the main_grad that the next gradient of a parameter would overwrite, for gradients that only add."""
    if len(_unwritten):
        for parameter in parameters:
            if _unwritten.pop(parameter, None):
                find_main_grad(parameter).zero_()


class Inspector(Protocol):
    """Reads or replaces product results in a linear layer.

    Attributes:
        results: The inspected results: "output", "grad_input" and "grad_weight".
    """

    @property
    def results(self) -> tuple[str, ...]: ...

    def inspect(self, result: str, value: Tensor) -> Tensor:
        """Return the value, or its replacement."""
        ...


@dataclass(frozen=True)
class WeightGradient:
    """Destination for a weight gradient.

    Attributes:
        parameters: Parameters that make up the weight along its rows. With `fused`, the single parameter's
            main_grad receives the gradient; if the gradient is delayed, the .grad of each parameter does.
        fused: Accumulate into main_grad instead of returning a gradient.
        overwrite: The call belongs to the first microbatch of a step, whose first gradient overwrites main_grad.
        store: Queue the product until `store.pop()`.
    """

    parameters: tuple[Any, ...] = ()
    fused: bool = False
    overwrite: bool = False
    store: WeightGradStore | None = None

    @property
    def parameter(self) -> Any:
        """The weight, if it is a single parameter."""
        return self.parameters[0] if self.parameters else None

    def compute(
        self,
        dy: Operand,
        x: Operand,
        exact: bool,
        dtype: torch.dtype,
        inspector: Inspector | None = None,
    ) -> Tensor | None:
        """Compute dw [N, K] = dy.T @ x in dtype; the operands hold dy.T [N, M] and x.T [K, M].

        An inspector gets the gradient in its destination dtype before it is accumulated.

        Returns:
            The gradient; a placeholder or None with `fused`; None if it is delayed without `fused`.
        """
        if inspector is not None and "grad_weight" in inspector.results:
            dtype = find_main_grad(self.parameter).dtype if self.fused else dtype
            return self.place(
                inspector.inspect("grad_weight", multiply(dy, x, Epilogue(dtype, exact=exact)))
            )
        if self.fused or self.store is not None:
            return self._accumulate_or_delay(dy, x, exact, dtype)
        return multiply(dy, x, Epilogue(dtype, exact=exact))

    def _accumulate_or_delay(
        self, dy: Operand, x: Operand, exact: bool, dtype: torch.dtype
    ) -> Tensor | None:
        if self.store is not None:
            self.store.put((dy, x, exact, dtype), self._late)
            return self._placeholder(dtype) if self.fused else None
        self._accumulate(dy, x, exact)
        return self._placeholder(dtype)

    def place(self, gradient: Tensor) -> Tensor | None:
        """Store a given dw [N, K] where `compute` stores its result."""
        if self.store is not None:
            self.store.put((gradient,), self._place_late)
            return self._placeholder(gradient.dtype) if self.fused else None
        if not self.fused:
            return gradient
        self._add_to_main(gradient)
        return self._placeholder(gradient.dtype)

    def _place_late(self, gradient: Tensor) -> tuple[tuple[Any, ...], Tensor] | None:
        with torch.no_grad():
            if self.fused:
                self._add_to_main(gradient)
            return self._deliver(gradient)

    def _add_to_main(self, gradient: Tensor) -> None:
        main_grad = find_main_grad(self.parameter)
        (main_grad.copy_ if self.begins_accumulation() else main_grad.add_)(gradient)

    def begins_accumulation(self) -> bool:
        """Return whether this gradient overwrites main_grad, and record that the next one in the step adds to it.

        In a graph that is being captured, only gradients from calls with is_first_microbatch=True overwrite:
        the graph replays the decision, in steps whose microbatches may come in another order.

        Raises:
            RuntimeError: In a captured backward pass, a gradient that overwrites follows one that adds.
        """
        parameter = self.parameter
        if getattr(parameter, "overwrite_main_grad", False):
            return True
        if torch.compiler.is_compiling():
            return self.overwrite
        owner, index = getattr(parameter, "position", (parameter, 0))
        indices = _unwritten.get(owner) if len(_unwritten) else None
        if indices is None or index not in indices:
            return False
        running = torch._C._current_graph_task_id()
        if not self.overwrite and is_capturing(find_main_grad(parameter).device):
            indices[index] = running
            return False
        if running != _OUTSIDE and indices[index] == running:
            raise RuntimeError(
                "a captured backward pass adds the gradient of a call with is_first_microbatch=False to main_grad "
                "before the gradient of a call with True overwrites it; pass True to both calls"
            )
        del indices[index]
        if not indices:
            del _unwritten[owner]
        return True

    def _late(
        self, dy: Operand, x: Operand, exact: bool, dtype: torch.dtype
    ) -> tuple[tuple[Any, ...], Tensor] | None:
        with torch.no_grad():
            if self.fused:
                self._accumulate(dy, x, exact)
                return self._deliver(None)
            return self._deliver(multiply(dy, x, Epilogue(dtype, exact=exact)))

    def _deliver(self, gradient: Tensor | None) -> tuple[tuple[Any, ...], Tensor] | None:
        """Add a delayed gradient to .grad, unless it is in main_grad.

        Returns:
            For distributed weights the parameters and the whole-weight gradient, which their group
            finalizes; otherwise None.
        """
        if is_distributed_weight(self.parameter):
            result = find_main_grad(self.parameter) if self.fused else gradient
            assert result is not None
            return self.parameters, result
        if not self.fused:
            assert gradient is not None
            _add_to_grads(self.parameters, gradient)
        return None

    def _accumulate(self, dy: Operand, x: Operand, exact: bool) -> None:
        main_grad = find_main_grad(self.parameter)
        overwrite = self.begins_accumulation()
        multiply(
            dy, x, Epilogue(main_grad.dtype, out=main_grad, accumulate=not overwrite, exact=exact)
        )

    def _placeholder(self, dtype: torch.dtype) -> Tensor | None:
        """Return a placeholder for a gradient that was accumulated into main_grad, or None.

        Data-parallel wrapper hooks fire only if autograd receives a tensor. These wrappers set the attribute below.
        """
        if not hasattr(self.parameter, "grad_added_to_main_grad") or is_distributed_weight(
            self.parameter
        ):
            return None
        if not torch.compiler.is_compiling():
            self.parameter.grad_added_to_main_grad = True
        zero = getattr(self.parameter, "zero_out_wgrad", False)
        return dummy_gradient(tuple(self.parameter.shape), dtype, self.parameter.device, zero)


def _add_to_grads(parameters: tuple[Any, ...], grad: Tensor) -> None:
    """Add a gradient [N, K] to the .grad of the parameters that make up a weight."""
    parts = (
        (grad,)
        if len(parameters) == 1
        else grad.split([parameter.shape[0] for parameter in parameters])
    )
    for parameter, part in zip(parameters, parts, strict=True):
        if parameter.requires_grad:
            parameter.grad = part if parameter.grad is None else parameter.grad + part


Placeholder = tuple[tuple[int, ...], torch.dtype, torch.device]


def _empty(key: Placeholder) -> Tensor:
    shape, dtype, device = key
    return torch.empty(shape, dtype=dtype, device=device)


# The placeholders are as large as the weights, so only recently used shapes are cached.
_KEPT = 32
_dummy_wgrads: Memory[Placeholder, Tensor] = Memory(_empty, _KEPT)


def dummy_gradient(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, zero: bool = False
) -> Tensor:
    """Return a shared tensor per shape, dtype and device, whose values are never read (zeros if requested)."""
    if torch.compiler.is_compiling():
        return torch.zeros(shape, dtype=dtype, device=device)
    dummy = keep_if_captured(_dummy_wgrads[shape, dtype, device], device)
    if zero:
        dummy.zero_()
    return dummy.detach()
