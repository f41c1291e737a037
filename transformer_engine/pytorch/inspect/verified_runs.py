"""A forward and backward pass of a model that records module outputs and their gradients.

A run with noise multiplies the first tensor in each module output, and its gradient, by 1 + u eps with u uniform in
[-1, 1]: a rounding in the run's dtype at each module boundary. Differences between several such runs measure how far
the summation order can move each tensor in this model (stochastic arithmetic), also tensors that are differences
between nearly equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..functions.scale_update import is_backward_pass
from ..tensor.quantized_tensor import QuantizedTensor

WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
Batch = Tensor | tuple[Any, ...] | list[Any] | dict[str, Any]
LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class RecordKey:
    """A tensor in a run: module, its call number, and "output", "grad_output" or "grad_input".

    Attributes:
        module: Qualified module name.
        call: Number of the module's call in the run.
        kind: "output", "grad_output" or "grad_input".
    """

    module: str
    call: int
    kind: str

    @property
    def tensor(self) -> str:
        """Tensor name; later calls to a module are numbered."""
        return self.kind if self.call == 0 else f"{self.kind}[{self.call}]"


@dataclass
class RunRecord:
    """Tensors of a run in float32, in the order in which they were computed.

    Attributes:
        forward: Module outputs.
        backward: Module output and input gradients, in backward order.
        loss: Loss of this rank.
        gradients: {name: parameter gradient}; empty until `verification` adds them.
    """

    forward: dict[RecordKey, Tensor] = field(default_factory=dict)
    backward: dict[RecordKey, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module that DistributedDataParallel or FullyShardedDataParallel wraps, or the model itself."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    wrapper = isinstance(model, (DistributedDataParallel, FullyShardedDataParallel))
    return model.module if wrapper else model


def original_name(name: str) -> str:
    """Return a module or parameter name without wrapper prefixes."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "").removesuffix(wrapper[:-1])
    return name.rstrip(".")


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Call a model with a tensor, an argument tuple or a keyword argument dictionary."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def first_tensor(value: Any) -> Any:
    """Return the first tensor in an output, or the output itself if it has none."""
    return next((leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)), value)


def convert_to_float32(batch: Batch) -> Batch:
    """Return a batch whose floating-point tensors are float32."""
    leaves, tree = tree_flatten(batch)
    widened = [
        leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        for leaf in leaves
    ]
    return tree_unflatten(widened, tree)


def record_run(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction,
    block: Callable[[], AbstractContextManager[Any]] = nullcontext,
    steps: int = 1,
    scale: float = 1.0,
    noise: tuple[float, int] | None = None,
) -> RunRecord:
    """Run forward and backward passes without updates, and record the last one.

    Args:
        model: The model; its gradients are replaced.
        batch: Model arguments. The first floating-point tensor gets a gradient.
        loss_fn: Function (output, batch) -> scalar.
        block: Context manager for the forward pass, such as `autocast` with a recipe.
        steps: Pass count; delayed scaling has its scales from the second one on.
        scale: Loss factor in the backward pass.
        noise: (eps, seed) for a run with noise; None: a run without noise.
    """
    record = RunRecord()
    leaves, tree = tree_flatten(batch)
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        differentiable = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for leaf in differentiable:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf.requires_grad_()
                break
        arguments: Any = tree_unflatten(differentiable, tree)
        with _Recorder(unwrap_model(model), record if step == steps - 1 else RunRecord(), noise):
            with block():
                output = call_model(model, arguments)
            loss = loss_fn(output, arguments)
            (loss * scale).backward()
        record.loss = float(loss.detach())
    return record


class _Recorder:
    """Hooks of one pass on all modules of a model."""

    def __init__(
        self, model: nn.Module, record: RunRecord, noise: tuple[float, int] | None
    ) -> None:
        self._model, self._record = model, record
        self._eps, self._seed = noise if noise is not None else (0.0, 0)
        self._generator: torch.Generator | None = None
        self._calls: dict[str, int] = {}
        self._recomputations: dict[str, int] = {}
        # {id(tensor): (tensor, its keys)}; holding the tensor keeps its id unique.
        self._labels: dict[int, tuple[Tensor, list[RecordKey]]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._hooks.append(
                module.register_forward_hook(partial(self._on_forward, original_name(name)))
            )

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._labels.clear()

    def _on_forward(self, name: str, module: nn.Module, arguments: Any, output: Any) -> Any:
        recomputed = is_backward_pass()  # a checkpointed module runs its forward again
        call = self._number_call(name, recomputed)
        result = first_tensor(output)
        if not isinstance(result, Tensor):
            return None
        replaced = None
        if self._eps and not recomputed and not isinstance(result, QuantizedTensor):
            noisy = self._add_noise(result) if result.is_floating_point() else result
            replaced, result = _replace_tensor(output, result, noisy), noisy
        if not recomputed:
            self._record.forward[RecordKey(name, call, "output")] = _copy(result)
        self._watch(first_tensor(arguments), RecordKey(name, call, "grad_input"))
        self._watch(result, RecordKey(name, call, "grad_output"))
        return replaced

    def _number_call(self, name: str, recomputed: bool) -> int:
        """Return the number of a module's call; recomputations run from the last call to the first."""
        calls = self._calls.get(name, 0)
        if not recomputed:
            self._calls[name] = calls + 1
            return calls
        recomputations = self._recomputations.get(name, 0)
        self._recomputations[name] = recomputations + 1
        return max(calls - 1 - recomputations, 0)

    def _add_noise(self, tensor: Tensor) -> Tensor:
        if self._generator is None:
            self._generator = torch.Generator(tensor.device).manual_seed(self._seed)
        noise = torch.empty_like(tensor, dtype=torch.float32)
        noise.uniform_(-1, 1, generator=self._generator)
        return tensor * (1 + self._eps * noise).to(tensor.dtype)

    def _watch(self, tensor: Any, key: RecordKey) -> None:
        """Record the gradient of a tensor.

        If a tensor is the output of one module and the input to others, its gradient is recorded under all their keys:
        inputs first, innermost module first, because the backward pass of the modules that read it has computed it.
        """
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return
        existing = self._labels.get(id(tensor))
        if existing is not None:
            inputs = sum(label.kind == "grad_input" for label in existing[1])
            existing[1].insert(inputs if key.kind == "grad_input" else len(existing[1]), key)
            return
        labels = [key]
        self._labels[id(tensor)] = (tensor, labels)

        def record_gradient(gradient: Tensor) -> None:
            for label in labels:
                self._record.backward[label] = _copy(gradient)

        tensor.register_hook(record_gradient)


def _replace_tensor(output: Any, tensor: Tensor, replacement: Tensor) -> Any:
    """Return a module output with one of its tensors replaced."""
    leaves, tree = tree_flatten(output)
    return tree_unflatten([replacement if leaf is tensor else leaf for leaf in leaves], tree)


def _copy(tensor: Tensor) -> Tensor:
    if isinstance(tensor, QuantizedTensor):
        tensor = tensor.dequantize()
    return tensor.detach().float().clone()
