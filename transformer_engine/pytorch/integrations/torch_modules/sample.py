"""A recorded forward pass of the sample: the calls to convertible modules and attention, and the output layers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...runtime.checks import is_distributed
from .attention import unsupported_call
from .grouped_calls import GROUPED_PRODUCTS
from .grouped_calls import unsupported_call as unsupported_experts

# A model call, or its arguments.
Sample = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | Callable[[nn.Module], Any]


class SampleCall(NamedTuple):
    """Metadata of the tensors that a module or an attention reads in one call.

    Attributes:
        shapes: Tensor shapes.
        dtype: Dtype of the first tensor.
        device: Device of the first tensor.
        needs_grad: Whether the first tensor requires a gradient.
        trains: Whether parameters require gradients.
        causal: Whether an attention is causal.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    trains: bool = False
    causal: bool = False


@dataclass
class SampleCalls:
    """The calls of a forward pass.

    Attributes:
        calls: Calls to each module, by its name.
        attention: scaled_dot_product_attention calls in the innermost module that runs, by its name.
        attention_reasons: Reasons why the attention of a module cannot be replaced, by its name.
        experts: grouped_mm calls in the innermost module that runs, by its name.
        experts_reasons: Reasons why the grouped_mm of a module cannot be replaced, by its name.
        outputs: Names of modules whose output is a model output, or cross-entropy logits.
        routers: Names of modules whose output chooses experts by `topk`.
    """

    calls: dict[str, Counter[SampleCall]] = field(default_factory=dict)
    attention: dict[str, Counter[SampleCall]] = field(default_factory=dict)
    attention_reasons: dict[str, str] = field(default_factory=dict)
    experts: dict[str, Counter[SampleCall]] = field(default_factory=dict)
    experts_reasons: dict[str, str] = field(default_factory=dict)
    outputs: set[str] = field(default_factory=set)
    routers: set[str] = field(default_factory=set)


def run(model: nn.Module, sample: Sample) -> Any:
    """Call the model with a sample: a tensor, positional or keyword arguments, or a function that takes the model."""
    if isinstance(sample, Tensor):
        return model(sample)
    if isinstance(sample, Mapping):
        return model(**sample)
    if isinstance(sample, (tuple, list)):
        return model(*sample)
    return sample(model)


def record(model: nn.Module, sample: Sample, modules: Mapping[str, nn.Module]) -> SampleCalls:
    """Run the sample once, in eager mode, and record the calls to `modules`.

    A model in shards runs without gradients, and its inputs count as if they required gradients.

    Random states, buffers, such as batch norm statistics, and gradients have their values from before afterwards.
    """
    recorder = _SampleMode(model, modules)
    eager = torch.compiler.set_stance("force_eager")
    with (
        recorder.hooked(),
        preserve_state(model),
        torch.set_grad_enabled(not is_sharded(model)),
        eager,
        recorder,
    ):
        outputs = run(model, sample)
    for module in model.modules():
        # After a forward pass without a backward pass, parameters that `fully_shard` keeps
        # gathered, such as the root parameters, would miss the next optimizer step.
        reshard = getattr(module, "reshard", None)
        if hasattr(module, "set_reshard_after_forward") and callable(reshard):
            reshard()
    recorder.mark_outputs(outputs)
    return recorder.recorded


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters of a model are DTensors."""
    return any(is_distributed(parameter) for parameter in model.parameters())


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore random states, the model's buffers and the gradients of its parameters on exit.

    Within the context parameters have no gradients, so that a backward pass adds to none.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {
        tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda
    }
    with torch.random.fork_rng(devices=sorted(device.index for device in devices)):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, saved in buffers:
                    buffer.copy_(saved)


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from iterate_tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from iterate_tensors(part)


class _SampleMode(TorchFunctionMode):
    """Records modules by hooks, and functions as a mode."""

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.model, self.modules = model, modules
        self.recorded = SampleCalls()
        self._running: list[str] = []
        # The last output of each module, and its copies in other dtypes or as scores, such as float32 logits.
        self._last: dict[str, list[weakref.ref[Tensor]]] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Observe the forward passes of all modules."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                enter = module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
                leave = module.register_forward_hook(self._leave(name), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(name)
            x = next(iterate_tensors((*args, *kwargs.values())), None)
            if name in self.modules and x is not None:
                trains = any(parameter.requires_grad for parameter in module.parameters())
                call = SampleCall((tuple(x.shape),), x.dtype, x.device, _needs_grad(x), trains)
                self.recorded.calls.setdefault(name, Counter())[call] += 1

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._running.pop()
            if name in self.modules and isinstance(output, Tensor):
                self._last[name] = [weakref.ref(output)]

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self._running:
            self._record_attention(*args, **kwargs)
        elif func in GROUPED_PRODUCTS and self._running:
            self._record_experts(*args, **kwargs)
        elif func is F.cross_entropy:
            self.mark_outputs(kwargs["input"] if "input" in kwargs else args[0])
        elif func in _CHOICES:
            self.recorded.routers |= self._sources(
                kwargs["input"] if "input" in kwargs else args[0]
            )
        result = func(*args, **kwargs)
        if func in _FOLLOWED and args and isinstance(result, Tensor):
            for copies in self._last.values():
                if _share_memory(copies, {_storage(args[0])} - {0}):
                    copies.append(weakref.ref(result))
        return result

    def _record_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        name = self._running[-1]
        shapes = tuple([tuple(tensor.shape) for tensor in (query, key, value)])
        call = SampleCall(shapes, query.dtype, query.device, _needs_grad(query), causal=is_causal)
        self.recorded.attention.setdefault(name, Counter())[call] += 1
        reason = unsupported_call(query, key, value, attn_mask, dropout_p, enable_gqa)
        if reason is not None:
            self.recorded.attention_reasons[name] = reason

    def _record_experts(self, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> None:
        name = self._running[-1]
        shapes = (tuple(x.shape), tuple(weight.shape))
        call = SampleCall(shapes, x.dtype, x.device, _needs_grad(x))
        self.recorded.experts.setdefault(name, Counter())[call] += 1
        reason = unsupported_experts(x, weight, *args, **kwargs)
        if reason is not None:
            self.recorded.experts_reasons[name] = reason

    def mark_outputs(self, outputs: Any) -> None:
        """Record the modules whose last output shares memory with any of `outputs`."""
        self.recorded.outputs |= self._sources(outputs)

    def _sources(self, tensors: Any) -> set[str]:
        """Names of the modules whose last output, or a copy of it, shares memory with any of some tensors."""
        memory = {_storage(tensor) for tensor in iterate_tensors(tensors)} - {0}
        return {name for name, copies in self._last.items() if _share_memory(copies, memory)}


_SCORES = (torch.softmax, F.softmax, Tensor.softmax, torch.sigmoid, F.sigmoid, Tensor.sigmoid)
# Functions whose results count as copies of their arguments.
_FOLLOWED = (Tensor.float, Tensor.to, Tensor.type, *_SCORES)
_CHOICES = (torch.topk, Tensor.topk)


def _share_memory(references: list[weakref.ref[Tensor]], memory: set[int]) -> bool:
    """Whether one of the tensors that still exist has one of the storages."""
    return any(
        tensor is not None and _storage(tensor) in memory for tensor in [r() for r in references]
    )


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad or not torch.is_grad_enabled()


def _storage(tensor: Tensor) -> int:
    """A tensor's storage identity, with or without memory; 0 for a DTensor."""
    return 0 if is_distributed(tensor) else tensor.untyped_storage()._cdata
