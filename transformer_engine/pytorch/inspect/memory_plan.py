"""memory_plan(model, recipe, tokens): peak memory for a forward and backward pass, before any is allocated."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...common.checks import described, number, switch, whole
from ...common.numbers import with_article
from ...common.recipe import Recipe
from ..attention import DotProductAttention, MultiheadAttention
from ..module.base import TransformerEngineBaseModule
from ..module.numerics import Numerics
from ..ops.recipe_slots import RecipeSlots
from ..optimizers import FusedAdam
from ..primitives.quantize import Quantized
from ..quantization import autocast, emulate
from ..quantization.support import check_block
from ..runtime import launching
from ..runtime.device import has_cuda
from ..tensor.quantized_tensor import QuantizedTensor
from .memory_budget import Options, cheapest, norm_mlps
from .memory_ledger import Ledger, scratch_bytes
from .planned_backends import PlannedAttention, planning

MIB = 2**20
# cuBLAS workspace: torch allocates 32 MiB on compute capability 9.0.
WORKSPACE = 32 * MIB


@dataclass(frozen=True)
class ModuleMemory:
    """Bytes in one module without its children: parameters, and tensors that its forward pass saves.

    Attributes:
        name: Name of the module.
        kind: Class of the module.
        parameters: Its parameters.
        saved: Activations, quantized or not, that its forward pass allocated. An activation that the next module saves
            as well is counted once, here.
        weight_copies: Quantized copies of its parameters.
    """

    name: str
    kind: str
    parameters: int
    saved: int
    weight_copies: int


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory in bytes; str() is a readable table.

    Attributes:
        peak: Maximum allocated memory: the sum of `parameters` to `workspace`, and `optimizer`, at that moment.
        parameters: Parameters, buffers and the recipe state.
        gradients: Parameter gradients.
        weight_copies: Weights as quantized for the products.
        activations: Tensors between their save in the forward pass and their release in the backward pass.
        boundary: The model's input and output, and their gradients.
        transient: All other memory: results and operands of running operations.
        workspace: Workspaces in matrix product libraries.
        saved: All activations after the forward pass.
        modules: Figures per module.
        options: With a budget, the options with which the model is planned; empty if it fits without any, or if none
            lowers its peak.
        fits: With a budget, whether the peak is within the budget; None without one.
        optimizer: States of the optimizer, if one is planned.
    """

    peak: int
    parameters: int
    gradients: int
    weight_copies: int
    activations: int
    boundary: int
    transient: int
    workspace: int
    saved: int
    modules: tuple[ModuleMemory, ...]
    options: tuple[str, ...] = ()
    fits: bool | None = None
    optimizer: int = 0

    def __str__(self) -> str:
        width = max((len(module.name) for module in self.modules), default=6)
        lines = [
            f"{'module':{width}}  {'kind':20} {'parameters':>12} {'saved':>12} {'weight copies':>14}  MiB"
        ]
        for m in self.modules:
            figures = (
                f"{m.parameters / MIB:12.1f} {m.saved / MIB:12.1f} {m.weight_copies / MIB:14.1f}"
            )
            lines.append(f"{m.name:{width}}  {m.kind:20} {figures}")
        lines.append("")
        lines.append(f"saved after the forward pass {self.saved / MIB:.1f} MiB; at the peak:")
        parts = (
            "parameters",
            "gradients",
            "weight_copies",
            "activations",
            "boundary",
            "transient",
            "workspace",
            *(("optimizer",) if self.optimizer else ()),
        )
        lines += [
            f"  {part.replace('_', ' '):14} {getattr(self, part) / MIB:12.1f} MiB" for part in parts
        ]
        lines.append(f"  {'peak':14} {self.peak / MIB:12.1f} MiB")
        if self.fits is not None:
            lines += ["", f"{'within' if self.fits else 'above'} the budget with these options:"]
            lines += [f"  {option}" for option in self.options or ("none",)]
        return "\n".join(lines)


def memory_plan(
    model: nn.Module,
    recipe: Recipe | None,
    tokens: int,
    *,
    inputs: tuple[Any, ...] | None = None,
    input_gradient: bool = True,
    budget: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    step_in_backward: bool = False,
    **keywords: Any,
) -> MemoryPlan:
    """Predict the peak memory of model(*inputs, **keywords).backward(..) under a recipe (None: high precision).

    The plan describes a warm step: recipe states exist and every .grad is None before it. The model runs on fake
    tensors without changing its state; it may be larger than the device or on the meta device. Attention is planned
    without a score matrix. Allocator fragmentation and temporary memory of the optimizer are not included. Quantized
    parameters count as codes and scales; te.checkpoint and LayerNormMLP(checkpoint=True) include their second run.

    Args:
        model: A module of one rank.
        recipe: The recipe, or None.
        tokens: Input rows, [tokens, features] or the shape that TransformerLayer takes; unused with inputs.
        inputs: The model's arguments, for models that do not begin with a module from this package.
            Tensors may be on the meta device.
        input_gradient: Whether the first input receives a gradient, as in a model with preceding layers.
        budget: GiB for the peak; subtract the states of an optimizer that is not planned. The plan has the cheapest
            `options` that fit, otherwise the options with the lowest peak: columns of weights and of norm outputs that
            the backward pass computes again, quantized activation inputs in LayerNormMLPs, and as few checkpointed
            LayerNormMLPs as possible. The model is not changed.
        optimizer: Count the states of this optimizer, also before they exist if it is a `FusedAdam`.
        step_in_backward: Each gradient is freed once it is complete, as in `FusedAdam.step_in_backward`.
        keywords: Model keyword arguments.

    Raises:
        ValueError: The input's shape does not follow from the model, the budget is not positive, or the optimizer has
            no states yet.
        NotImplementedError: A module is tensor-parallel.
    """
    if inputs is None:
        whole("tokens", tokens)
    elif not isinstance(inputs, tuple):
        raise TypeError(
            f"inputs={described(inputs)} is {with_article(type(inputs))}; give a tuple of arguments, or None"
        )
    switch("input_gradient", input_gradient)
    switch("step_in_backward", step_in_backward)
    states = 0 if optimizer is None else _state_bytes(optimizer)
    check_block(True, recipe)
    _check(model)
    call = _Call(recipe, tokens, inputs, input_gradient, keywords, states, step_in_backward)
    plan_with = functools.partial(_plan_copy, model, call)
    if budget is None:
        return plan_with(Options())
    number("budget", budget)
    if budget <= 0:
        raise ValueError(
            f"budget={budget} GiB is not positive; give the memory of the GPU, without optimizer states unless the "
            "optimizer is planned"
        )
    layers, most = len(list(norm_mlps(model))), int(budget * 1024 * MIB)
    plan, options = cheapest(plan_with, layers, most)
    return replace(plan, options=options.lines(model), fits=plan.peak <= most)


class _Call(NamedTuple):
    """Arguments of `memory_plan`; states: bytes of the optimizer's states."""

    recipe: Recipe | None
    tokens: int
    inputs: tuple[Any, ...] | None
    input_gradient: bool
    keywords: dict[str, Any]
    states: int
    step_in_backward: bool


def _plan_copy(model: nn.Module, call: _Call, options: Options) -> MemoryPlan:
    """Plan a model copy with these options."""
    device = _device(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    planned = _copy_without_memory(model, device, mode)
    options.apply(planned)
    with mode:
        arguments = _example(planned, call.tokens, device) if call.inputs is None else call.inputs
        arguments = tuple(_empty_like(x, device) if isinstance(x, Tensor) else x for x in arguments)
        keywords = {
            k: _empty_like(v, device) if isinstance(v, Tensor) else v
            for k, v in call.keywords.items()
        }
        first = arguments[0]
        if call.input_gradient and isinstance(first, Tensor) and first.is_floating_point():
            first.requires_grad_()
        if call.step_in_backward:
            for parameter in planned.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_free_gradient)
        multiprocessors = launching.processors(device.index).count if device.type == "cuda" else 0
        with options.context():
            step = _TrainingStep(planned, call.recipe, arguments, keywords, multiprocessors)
            plan = step.plan()
    return replace(plan, optimizer=call.states, peak=plan.peak + call.states)


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer states, including the states that a FusedAdam has not created yet."""
    if isinstance(optimizer, FusedAdam):
        return optimizer.state_bytes()
    if isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    ):
        return 0
    tensors = [x for state in optimizer.state.values() for x in state.values()]
    total = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
    if not total:
        raise ValueError(
            f"{type(optimizer).__name__} has no states before its first step; plan without optimizer, and add its "
            "bytes, or give a FusedAdam"
        )
    return total


class _TrainingStep:
    """One training step of a model without memory, recorded in a ledger."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe | None,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        processors: int,
    ):
        self.model, self.recipe, self.arguments, self.keywords = model, recipe, arguments, keywords
        self.workspace = WORKSPACE if processors else 0
        self.names = {id(module): name for name, module in model.named_modules()}
        self.entered: list[str] = []
        self.ledger = Ledger(
            lambda: self.entered[-1] if self.entered else "",
            lambda operation, arguments: (
                scratch_bytes(operation, arguments, processors) if processors else 0
            ),
        )
        self.owners: dict[int, str] = {}
        self.weight_copies: dict[int, str] = {}

    def plan(self) -> MemoryPlan:
        for name, parameter in self.model.named_parameters():
            self.owners |= dict.fromkeys(self.ledger.numbers([parameter]), name.rpartition(".")[0])
        state = [*self.model.parameters(), *self.model.buffers()]
        self.ledger.numbers(state)  # buffers too, which the first pass would count as its own
        tensors = [x for x in (*self.arguments, *self.keywords.values()) if isinstance(x, Tensor)]
        boundary = self.ledger.numbers(tensors)
        with planning(self._quantized), emulate(), self.ledger, self._watched():
            self._forward_and_backward(boundary)  # creates the states of the recipe
            for tensor in (*state, *tensors):
                tensor.grad = None
            before = self.ledger.live() - boundary
            start = len(self.ledger.events)
            after_forward = self._forward_and_backward(boundary)
        gradients = self.ledger.numbers(parameter.grad for parameter in self.model.parameters())
        boundary |= self.ledger.numbers(x.grad for x in tensors)
        saved = self.ledger.live(after_forward) - before - boundary
        live = self.ledger.live(self.ledger.peak(start))
        return self._summary(live, before, gradients, boundary, saved)

    def _forward_and_backward(self, boundary: set[int]) -> int:
        """Run both passes, return the event count between them, and add output and gradient to the boundary."""
        with autocast(enabled=self.recipe is not None, recipe=self.recipe):
            output = self.model(*self.arguments, **self.keywords)
        output = output[0] if isinstance(output, (tuple, list)) else output
        boundary.add(self.ledger.number(output))
        between = len(self.ledger.events)
        gradient = torch.empty_like(output)
        boundary.add(self.ledger.number(gradient))
        output.backward(gradient)
        return between

    def _quantized(self, x: Tensor, result: Quantized) -> None:
        owner = None if isinstance(x, QuantizedTensor) else self.owners.get(self.ledger.number(x))
        if owner is not None:
            self.weight_copies |= dict.fromkeys(self.ledger.numbers(result), owner)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Maintain in `entered` the names of the modules whose forward is running."""

        def enter(module: nn.Module, _: Any) -> None:
            self.entered.append(self.names[id(module)])

        def leave(module: nn.Module, *_: Any) -> None:
            self.entered.pop()

        handles = []
        for module in self.model.modules():
            handles += [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _summary(
        self,
        live: set[int],
        before: set[int],
        gradients: set[int],
        boundary: set[int],
        saved: set[int],
    ) -> MemoryPlan:
        copies = set(self.weight_copies)
        activations = saved - copies
        size = self.ledger.bytes
        parts: dict[str, Any] = {
            "parameters": size(live & before),
            "gradients": size(live & gradients),
            "weight_copies": size(live & copies - before),
            "activations": size(live & activations),
            "boundary": size(live & boundary),
            "transient": size(live - before - gradients - copies - activations - boundary),
            "workspace": self.workspace,
        }
        return MemoryPlan(
            peak=sum(parts.values()),
            saved=size(activations),
            modules=tuple(self._modules(activations, saved & copies)),
            **parts,
        )

    def _modules(self, activations: set[int], copies: set[int]) -> Iterator[ModuleMemory]:
        for name, module in self.model.named_modules():
            memory = ModuleMemory(
                name or "(model)",
                type(module).__name__.replace("PlannedAttention", "DotProductAttention"),
                self.ledger.bytes(self.ledger.numbers(module.parameters(recurse=False))),
                self.ledger.bytes(n for n in activations if self.ledger.places[n] == name),
                self.ledger.bytes(n for n in copies if self.weight_copies[n] == name),
            )
            if memory.parameters or memory.saved or memory.weight_copies:
                yield memory


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={described(model)} is {with_article(type(model))}; give a torch.nn.Module"
        )
    for name, module in model.named_modules():
        if getattr(module, "tp_size", 1) > 1:
            raise NotImplementedError(
                f"module {name or 'model'} has tp_size={module.tp_size}; plan the model of one rank, made with "
                "the sizes of its shard and tp_size=1"
            )


def _device(model: nn.Module) -> torch.device:
    """Return the device of the parameters; for meta parameters, the GPU if there is one."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.is_meta:
        return (
            torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")
        )
    return parameter.device


def _copy_without_memory(model: nn.Module, device: torch.device, mode: FakeTensorMode) -> nn.Module:
    """Copy the model with fake tensors and without recipe states."""
    replaced: dict[int, Any] = {}
    storages: dict[int, Tensor] = {}
    attributes = (value for module in model.modules() for value in vars(module).values())
    with mode:
        for tensor in (*model.parameters(), *model.buffers(), *attributes):
            if isinstance(tensor, Tensor):
                replaced[id(tensor)] = _empty_like(tensor, device, storages)
    for module in model.modules():
        if isinstance(module, TransformerEngineBaseModule):
            replaced[id(module.numerics)] = Numerics()
    # deepcopy's memo: it takes the fake tensor where it meets the id of a real one.
    copied = copy.deepcopy(model, replaced)
    for module in copied.modules():
        if isinstance(module, RecipeSlots):
            module._create_recipe_slots()
        for name, child in module.named_children():
            if isinstance(child, DotProductAttention):
                setattr(module, name, PlannedAttention(child))
    return copied


def _empty_like(
    tensor: Tensor, device: torch.device, storages: dict[int, Tensor] | None = None
) -> Tensor:
    """Return a fake copy of a tensor; with `storages`, copies of tensors that share a storage share one too."""
    if isinstance(tensor, QuantizedTensor):
        codes = tensor.as_storage().mapped(
            lambda part: torch.empty(part.shape, dtype=part.dtype, device=device)
        )
        empty = type(tensor).from_storage(codes, shape=tensor.shape)
    elif storages is not None and tensor.untyped_storage().nbytes() > tensor.nbytes:
        storage, elements = (
            tensor.untyped_storage(),
            tensor.untyped_storage().nbytes() // tensor.itemsize,
        )
        if storage._cdata not in storages:
            storages[storage._cdata] = torch.empty(elements, dtype=tensor.dtype, device=device)
        geometry = tensor.shape, tensor.stride(), tensor.storage_offset()
        empty = storages[storage._cdata].view(tensor.dtype).as_strided(*geometry)
    else:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():
        copy = _empty_like(value, device, storages) if isinstance(value, Tensor) else value
        setattr(parameter, name, copy)
    return parameter


def _example(model: nn.Module, tokens: int, device: torch.device) -> tuple[Tensor]:
    """Return an input x [tokens, features] for the model's first module."""
    attention = next((m for m in model.modules() if isinstance(m, MultiheadAttention)), None)
    qkv_format = "" if attention is None else attention.qkv_format
    if qkv_format == "thd":
        raise ValueError("packed sequences need their bounds; give inputs=(x,) and cu_seqlens_q=..")
    leading = {"sbhd": (tokens, 1), "bshd": (1, tokens)}.get(qkv_format, (tokens,))
    first = next((module for module in model.modules() if module._parameters), model)
    features = getattr(first, "in_features", None) or getattr(first, "hidden_size", None)
    if isinstance(features, int):
        dtype = next(first.parameters()).dtype
        return (torch.empty(*leading, features, dtype=dtype, device=device),)
    raise ValueError(
        f"the input of {type(model).__name__} does not follow from its modules; give inputs=(tensor, ..)"
    )
