"""y = function(x) without keeping what lies between: the backward runs the function a second time.

`activation_recompute_forward` marks the two runs, so that the second repeats the first bit for bit although
delayed scaling moves on between them. When `is_fp8_activation_recompute_enabled()`, a module whose recipe has state

    in the first run    hands copies of the scales it quantizes with to the node that will run it again, and records
                        amaxes as ever
    in the second run   (`in_fp8_activation_recompute_phase()`) is given them back, quantizes with those scales and
                        records nothing
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from ...common.checks import function as checked_function
from ...common.checks import function_or_none, one_of
from ...common.numbers import to_bool
from ..constants import dist_group_type
from ..quantization.autocast import here, reinstate, snapshot
from ..quantization.recompute_states import ReplayStates, marked_by_hand, running
from ..runtime.checks import group_or_none
from ..runtime.device import has_cuda
from ..runtime.double_backward import once_differentiable
from ..runtime.warn_once import warn_once
from .collectives import gather_along_first_dim, rank, world_size
from .rng import CudaRNGStatesTracker, RngSnapshot

_PACKAGE = __name__.split(".", 1)[0] + "."


def is_fp8_activation_recompute_enabled() -> bool:
    """Is a function that will be, or has been, run a second time being run, here under quantizing autocast?"""
    holder = here()
    return holder.recomputes and holder.state.enabled


def in_fp8_activation_recompute_phase() -> bool:
    """Is this the second run, made by the backward pass?"""
    return here().recomputing


class activation_recompute_forward(running):
    """Marks the block as one of the two runs of a recomputed function, and takes the mark back after it.

    Whoever marks both runs by hand pairs them: each second run of a module gets the scales of its oldest first run
    that has not had one.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False):
        recompute_phase = to_bool("recompute_phase", recompute_phase)
        marked = to_bool("activation_recompute", activation_recompute)
        super().__init__(marked_by_hand, recompute_phase, marked)


def get_activation_recompute_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The marks of the two runs of one checkpoint, as torch.utils.checkpoint's context_fn gives them."""
    replay = _Replay(None)
    return running(replay.states, False), replay


def has_te_modules(network: Callable[..., Any]) -> bool:
    """Does the network hold a module of this package? A callable that is not a Module is taken to do so."""
    if not isinstance(network, torch.nn.Module):
        return True
    return any(base.__module__.startswith(_PACKAGE) for m in network.modules() for base in type(m).__mro__)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], CudaRNGStatesTracker] | None = None,
    tp_group: dist_group_type | None = None,
    use_reentrant: bool = True,
    context_fn: Callable[[], tuple[AbstractContextManager, AbstractContextManager]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute function(*args, **kwargs), saving only its tensor arguments, and run it again in the backward pass.

    In the second run the random states (CPU, CUDA and the tracker's), torch.autocast and autocast are those of the
    first. Tensors anywhere inside args and kwargs get their gradients.

    Args:
        distribute_saved_activations: Each rank of `tp_group` saves 1/n of the first tensor argument. Has no effect
            with `use_reentrant=False`.
        context_fn: Returns the contexts of the first and of the second run.
        determinism_check: As in torch.utils.checkpoint; without effect with `use_reentrant=True`.
        debug: As in torch.utils.checkpoint; without effect with `use_reentrant=True`.
    """
    _check_checkpoint(function, get_rng_state_tracker, tp_group, context_fn)
    distribute = to_bool("distribute_saved_activations", distribute_saved_activations)
    use_reentrant, debug = to_bool("use_reentrant", use_reentrant), to_bool("debug", debug)
    if distribute and not use_reentrant:
        warn_once(
            "checkpoint(distribute_saved_activations=) without use_reentrant",
            "distribute_saved_activations has no effect with use_reentrant=False: autograd saves the tensors; set "
            "use_reentrant=True",
        )
    if use_reentrant and debug:
        warn_once(
            "checkpoint(debug=) with use_reentrant",
            "debug has no effect with use_reentrant=True; set use_reentrant=False",
        )
    if not torch.is_grad_enabled() or is_fp8_activation_recompute_enabled():
        # No backward will come, or an enclosing checkpoint will run all of this a second time anyway.
        return function(*args, **kwargs)
    if not use_reentrant:
        one_of("determinism_check", determinism_check, ("default", "none"))
        return torch_checkpoint(
            function,
            *args,
            use_reentrant=False,
            context_fn=lambda: _both_runs(function, context_fn, get_rng_state_tracker),
            determinism_check=determinism_check,
            debug=debug,
            **kwargs,
        )
    needs_ours = (
        distribute or get_rng_state_tracker is not None or kwargs or context_fn is not noop_context_fn
    )
    if not needs_ours and not has_te_modules(function):
        return torch_checkpoint(function, *map(_of_torchs, args), use_reentrant=True)
    return _reentrant(
        function,
        args,
        kwargs,
        _Shard(tp_group) if distribute else None,
        get_rng_state_tracker,
        context_fn(),
    )


def _check_checkpoint(function: Any, tracker: Any, group: Any, context_fn: Any) -> None:
    """TypeError, before anything runs, for what is no function and no group."""
    checked_function("function", function)
    function_or_none("get_rng_state_tracker", tracker)
    checked_function("context_fn", context_fn)
    group_or_none("tp_group", group)


def _both_runs(
    function: Callable[..., Any],
    context_fn: Callable[[], tuple[AbstractContextManager, AbstractContextManager]],
    get_tracker: Callable[[], CudaRNGStatesTracker] | None,
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of the first and the second run of a checkpoint that is not reentrant."""
    first, second = context_fn()
    if get_tracker is None and not has_te_modules(function):
        return first, second
    replay = _Replay(get_tracker)
    return _Together(first, running(replay.states, False)), _Together(second, replay)


class _Together(AbstractContextManager):
    """Several contexts as one, which can be entered as often as they can."""

    def __init__(self, *contexts: AbstractContextManager):
        self._contexts = contexts
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


class _Replay(AbstractContextManager):
    """The second run's surroundings, as they were when this was made: random states, autocast, the phase.

    states   what modules quantized with in the first run; the graph node that holds this owns them
    """

    def __init__(self, get_tracker: Callable[[], CudaRNGStatesTracker] | None):
        self.states = ReplayStates()
        self._rng = RngSnapshot(get_tracker)
        self._moment = snapshot()
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._rng.replay())
            stack.callback(reinstate, snapshot())
            reinstate(self._moment)
            stack.enter_context(running(self.states, True))
            self._stacks.append(stack.pop_all())

    def __exit__(self, *exception: object) -> None:
        self._stacks.pop().close()


class _TorchAutocast:
    """torch.autocast of the CPU and of CUDA, as it was when this was made."""

    def __init__(self) -> None:
        cache = torch.is_autocast_cache_enabled()
        self._states = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), cache)
            for device in (("cpu", "cuda") if has_cuda() else ("cpu",))
        ]

    def again(self) -> AbstractContextManager:
        return _Together(*(torch.autocast(*state) for state in self._states))


class _Shard:
    """Keeps 1/n of a tensor's elements on each rank of a group."""

    def __init__(self, group: dist_group_type | None):
        self.group = group
        self.size = world_size(group)

    def check(self, tensor: Tensor) -> None:
        if tensor.numel() % self.size:
            raise ValueError(
                f"distribute_saved_activations: {self.size} ranks cannot equally share the {tensor.numel()} "
                "elements of the first tensor argument; pad it or turn the option off"
            )

    def own(self, tensor: Tensor) -> Tensor:
        """A copy of this rank's elements [numel / n]; a view would keep the whole tensor alive."""
        return tensor.detach().reshape(self.size, -1)[rank(self.group)].clone()

    def whole(self, part: Tensor, shape: torch.Size) -> Tensor:
        return gather_along_first_dim(part, self.group)[0].view(shape)


class _Region:
    """A function, the structure of its arguments, and what its second run needs beside the tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        structure: pytree.TreeSpec,
        shard: _Shard | None,
        get_tracker: Callable[[], CudaRNGStatesTracker] | None,
        contexts: tuple[AbstractContextManager, AbstractContextManager],
    ):
        self.function = function
        self.contexts = contexts
        self.structure = structure
        self.shard = shard
        self.positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.output_structure: pytree.TreeSpec | None = None
        self.replay = _Replay(get_tracker)
        self.torch_autocast = _TorchAutocast()

    def run(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """The leaves of function's result."""
        leaves = list(self.others)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        outputs, self.output_structure = pytree.tree_flatten(self.function(*args, **kwargs))
        return outputs

    def run_first(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        with torch.no_grad(), running(self.replay.states, False), self.contexts[0]:
            return self.run(tensors)

    def run_again(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        with torch.enable_grad(), self.replay, self.torch_autocast.again(), self.contexts[1]:
            return self.run(tensors)


def _reentrant(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shard: _Shard | None,
    get_tracker: Callable[[], CudaRNGStatesTracker] | None,
    contexts: tuple[AbstractContextManager, AbstractContextManager],
) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    region = _Region(function, leaves, structure, shard, get_tracker, contexts)
    tensors = [leaves[i] for i in region.positions]
    if shard is not None and tensors:
        shard.check(tensors[0])
    outputs = _Checkpoint.apply(region, _anchor(function, tensors), *tensors)
    assert region.output_structure is not None
    return pytree.tree_unflatten(list(outputs), region.output_structure)  # pyright: ignore[reportArgumentType]


def _of_torchs(argument: Any) -> Any:
    """An argument of torch's reentrant checkpoint, whose gradient is made without a graph of its own."""
    if torch.compiler.is_compiling() or not isinstance(argument, Tensor) or not argument.requires_grad:
        return argument
    return _OfTorchs.apply(argument)


class _OfTorchs(torch.autograd.Function):
    """y = x, whose gradient has no derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @once_differentiable("a reentrant checkpoint")
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


def _anchor(function: Callable[..., Any], tensors: list[Tensor]) -> Tensor | None:
    """An empty tensor that wants a gradient, where only parameters do: without it no backward would run."""
    if any(tensor.requires_grad for tensor in tensors):
        return None
    if isinstance(function, torch.nn.Module) and not any(p.requires_grad for p in function.parameters()):
        return None
    return torch.empty(0, requires_grad=True, device="cpu")


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, region, anchor, *tensors):
        outputs = region.run_first(tensors)
        ctx.region = region
        ctx.set_materialize_grads(False)
        ctx.wanted = [tensor.requires_grad for tensor in tensors]
        kept = list(tensors)
        if region.shard is not None and kept:
            ctx.first_shape = kept[0].shape
            kept[0] = region.shard.own(kept[0])
        ctx.save_for_backward(*kept)
        return tuple(outputs)

    @staticmethod
    @once_differentiable("a reentrant checkpoint")
    def backward(ctx, *grads):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "a reentrant checkpoint takes part in .backward() without `inputs=` only; "
                "use checkpoint(..., use_reentrant=False) with torch.autograd.grad"
            )
        region, kept = ctx.region, list(ctx.saved_tensors)
        if region.shard is not None and kept:
            kept[0] = region.shard.whole(kept[0], ctx.first_shape)
        tensors = tuple(
            tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(kept, ctx.wanted, strict=True)
        )
        outputs = region.run_again(tensors)
        _backpropagate(outputs, grads)
        return None, None, *(tensor.grad for tensor in tensors)


def _backpropagate(outputs: list[Any], grads: tuple[Tensor | None, ...]) -> None:
    roots = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if isinstance(output, Tensor) and output.requires_grad and grad is not None
    ]
    if roots:
        torch.autograd.backward([output for output, _ in roots], [grad for _, grad in roots])
