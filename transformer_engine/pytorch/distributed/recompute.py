"""y = function(x) without saved intermediate tensors: the backward pass runs the function a second time.

`activation_recompute_forward` marks the two runs, so that the second repeats the first bit for bit although
delayed scaling updates scales in between. While `is_fp8_activation_recompute_enabled()`, a module whose recipe has
state does the following:

* In the first run, it records amaxes as usual and copies its scales to the autograd node of the checkpoint.
* In the second run (`in_fp8_activation_recompute_phase()`), it quantizes with those scales and records no amaxes.

torch.utils.checkpoint marks its runs too (`torch_checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from ...common.checks import check_option, function_or_none
from ...common.checks import function as checked_function
from ...common.formats import ceil_div
from ...common.numbers import to_bool
from ..constants import dist_group_type
from ..quantization.autocast import AutocastState, here
from ..quantization.recompute_states import RepeatedContext, SecondRun, marked_by_hand, running
from ..runtime.autograd import TorchFunction
from ..runtime.checks import group_or_none
from ..runtime.device import has_cuda
from ..runtime.double_backward import once_differentiable
from ..runtime.warn_once import warn_once
from ..tensor.quantized_tensor import QuantizedTensor
from .collectives import gather_along_first_dim, rank, world_size
from .rng import CudaRNGStatesTracker, RngSnapshot
from .torch_checkpoint import extend_torch_checkpoint

_PACKAGE = __name__.split(".", 1)[0] + "."
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

extend_torch_checkpoint()


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether the first or second run of a recomputed function is active under quantizing autocast."""
    holder = here()
    return holder.recomputes and holder.state.enabled


def in_fp8_activation_recompute_phase() -> bool:
    """Return whether the second run, in the backward pass, is active."""
    return here().recomputing


class activation_recompute_forward(running):
    """Mark the block as the first or second run of a recomputed function.

    If a caller marks both blocks itself, the second run of a module gets the scales from its oldest
    first run without a second run.

    Args:
        activation_recompute: The block belongs to a recomputed function.
        recompute_phase: The block is the second run.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False):
        recompute_phase = to_bool("recompute_phase", recompute_phase)
        marked = to_bool("activation_recompute", activation_recompute)
        super().__init__(marked_by_hand, recompute_phase, marked)


def get_activation_recompute_contexts() -> Contexts:
    """Return the contexts for the two runs of a checkpoint, for `context_fn` in torch.utils.checkpoint."""
    second_run = SecondRun()
    recomputation = _JoinedContexts(_RestoredRandomStates(None), second_run)
    return running(second_run.states, False), recomputation


def state_without_gradients(
    kind: str, before: AutocastState | None, state: AutocastState
) -> AutocastState | None:
    """Autocast state from a module's last call without gradients, which may be the first run of a checkpoint.

    Reentrant checkpoints in libraries other than torch run a function without gradients first, and
    again in the backward pass, under the autocast that is active at that time.

    Args:
        kind: Class name of the module, for messages.
        before: Result for the module's previous call.
        state: Autocast state in this call.

    Raises:
        RuntimeError: The call repeats a first run under another recipe: the gradients would belong to another function.
    """
    in_backward_pass = torch._C._current_graph_task_id() != -1
    if not torch.is_grad_enabled() and not in_backward_pass:
        return state
    if before is None or before is state or not in_backward_pass or here().recomputing:
        return before
    if before.enabled == state.enabled and (not state.enabled or before.recipe == state.recipe):
        return before
    checkpoint = type(torch._C._current_autograd_node()).__name__
    if "Checkpoint" not in checkpoint:
        return before
    first, second = (
        type(s.recipe).__name__ if s.enabled else "no autocast" for s in (before, state)
    )
    raise RuntimeError(
        f"{checkpoint} runs {kind} again under {second}, its first run was under {first}: the gradients would be of "
        "another function; use torch.utils.checkpoint or transformer_engine.pytorch.checkpoint, which repeat the "
        "autocast, or, with a recipe without history, enter autocast inside of the function"
    )


def has_te_modules(network: Callable[..., Any]) -> bool:
    """Return whether the network contains a module from this package; True for a callable that is not a module.

    Args:
        network: A module, or another callable.
    """
    if not isinstance(network, torch.nn.Module):
        return True
    return any(
        base.__module__.startswith(_PACKAGE) for m in network.modules() for base in type(m).__mro__
    )


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], CudaRNGStatesTracker] | None = None,
    tp_group: dist_group_type | None = None,
    use_reentrant: bool = True,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute function(*args, **kwargs), saving only its tensor arguments, and run it again in the backward pass.

    In the second run the random states (CPU, CUDA and the tracker's), torch.autocast and autocast
    are as in the first. Tensors anywhere inside args and kwargs get their gradients.

    Args:
        function: Function or module to compute.
        args: Function arguments.
        distribute_saved_activations: Each rank of `tp_group` saves 1/n of the first tensor argument, which must be
            equal on all ranks. A quantized tensor is saved whole, as codes. Has no effect with `use_reentrant=False`.
        get_rng_state_tracker: Function that returns the random state tracker to restore.
        tp_group: Tensor-parallel process group.
        use_reentrant: Run forward without autograd; False uses saved-tensor hooks, as torch.utils.checkpoint does.
        context_fn: Returns the contexts for the first and second run.
        determinism_check: As in torch.utils.checkpoint; without effect with `use_reentrant=True`.
        debug: As in torch.utils.checkpoint; without effect with `use_reentrant=True`.
        kwargs: Function keyword arguments.

    Returns:
        The result of the function.
    """
    checked_function("function", function)
    function_or_none("get_rng_state_tracker", get_rng_state_tracker)
    checked_function("context_fn", context_fn)
    group_or_none("tp_group", tp_group)
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
        # There is no backward pass, or an enclosing checkpoint runs this code a second time.
        return function(*args, **kwargs)
    if not use_reentrant:
        check_option("determinism_check", determinism_check, ("default", "none"))
        if (
            torch.compiler.is_compiling()
            and context_fn is noop_context_fn
            and get_rng_state_tracker is None
        ):
            # The compiler traces no other settings; its graphs restore random states.
            return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
        return torch_checkpoint(
            function,
            *args,
            use_reentrant=False,
            context_fn=lambda: _with_random_states(function, context_fn, get_rng_state_tracker),
            determinism_check=determinism_check,
            debug=debug,
            **kwargs,
        )
    needs_ours = (
        distribute
        or get_rng_state_tracker is not None
        or kwargs
        or context_fn is not noop_context_fn
    )
    if not needs_ours and not has_te_modules(function):
        return torch_checkpoint(function, *map(_wrap_torch_argument, args), use_reentrant=True)
    shard = _Shard(tp_group) if distribute else None
    leaves, structure = pytree.tree_flatten((args, kwargs))
    region = _Region(function, leaves, structure, shard, get_rng_state_tracker, context_fn())
    tensors = [leaves[i] for i in region.positions]
    anchor = None
    if not any(tensor.requires_grad for tensor in tensors):
        # Without an input that requires a gradient no backward pass would run, although parameters may need it.
        is_module = isinstance(function, torch.nn.Module)
        if not is_module or any(p.requires_grad for p in function.parameters()):
            anchor = torch.empty(0, requires_grad=True, device="cpu")
    outputs = _Checkpoint.apply(region, anchor, *tensors)
    assert region.output_structure is not None
    return pytree.tree_unflatten(list(outputs), region.output_structure)


def _with_random_states(
    function: Callable[..., Any],
    context_fn: Callable[[], Contexts],
    get_tracker: Callable[[], CudaRNGStatesTracker] | None,
) -> Contexts:
    """Contexts for both runs in torch's checkpoint; the second run has the random states of the first run.

    torch saves states only for devices of positional arguments, and none for trackers.
    """
    first, second = context_fn()
    if get_tracker is None and not has_te_modules(function):
        return first, second
    return first, _JoinedContexts(second, _RestoredRandomStates(get_tracker))


class _JoinedContexts(RepeatedContext):
    """Several contexts as one, which may be entered repeatedly."""

    def __init__(self, *contexts: AbstractContextManager[Any]):
        super().__init__()
        self._contexts = contexts

    @contextmanager
    def context(self) -> Iterator[None]:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            yield


class _RestoredRandomStates(RepeatedContext):
    """The random states from this object's creation, as a context that may be entered repeatedly."""

    def __init__(self, get_tracker: Callable[[], CudaRNGStatesTracker] | None):
        super().__init__()
        self._snapshot = RngSnapshot(get_tracker)

    def context(self) -> AbstractContextManager[Any]:
        return self._snapshot.replay()


class _Shard(NamedTuple):
    """The group whose ranks save 1/n of the first tensor argument each; None: the default group."""

    group: dist_group_type | None


class _Region:
    """A function, its argument structure, and the state that its second run needs besides tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        structure: pytree.TreeSpec,
        shard: _Shard | None,
        get_tracker: Callable[[], CudaRNGStatesTracker] | None,
        contexts: Contexts,
    ):
        self.function = function
        self.contexts = contexts
        self.structure = structure
        self.shard = shard
        self.positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.output_structure: pytree.TreeSpec | None = None
        self.random_states = _RestoredRandomStates(get_tracker)
        self.second_run = SecondRun()
        cache = torch.is_autocast_cache_enabled()
        self.torch_autocast = [  # torch.autocast arguments, for the second run
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), cache)
            for device in (("cpu", "cuda") if has_cuda() else ("cpu",))
        ]

    def run(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """Call the function and return the leaves of its result."""
        leaves = list(self.others)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        outputs, self.output_structure = pytree.tree_flatten(self.function(*args, **kwargs))
        return outputs


def _wrap_torch_argument(argument: Any) -> Any:
    """Wrap a torch reentrant checkpoint's argument, whose gradient has no graph, to reject double backward."""
    if (
        torch.compiler.is_compiling()
        or not isinstance(argument, Tensor)
        or not argument.requires_grad
    ):
        return argument
    return _OfTorchs.apply(argument)


class _OfTorchs(TorchFunction):
    """y = x, whose gradient has no derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @once_differentiable("a reentrant checkpoint")
    def backward(ctx, grad):
        return grad


def _share(elements: Tensor, group: dist_group_type | None) -> Tensor:
    """Return a copy of this rank's share [ceil(numel / n)] of a vector; a view would keep the whole tensor alive."""
    size = ceil_div(elements.numel(), world_size(group))
    part = elements[rank(group) * size : (rank(group) + 1) * size]
    return torch.cat([part, part.new_zeros(size - part.numel())])


class _Checkpoint(TorchFunction):
    @staticmethod
    def forward(ctx, region, anchor, *tensors):
        with torch.no_grad(), running(region.second_run.states, False), region.contexts[0]:
            outputs = region.run(tensors)
        ctx.region = region
        ctx.set_materialize_grads(False)
        ctx.wanted = [tensor.requires_grad for tensor in tensors]
        saved = list(tensors)
        ctx.first_shape = None
        if region.shard is not None and saved and not isinstance(saved[0], QuantizedTensor):
            ctx.first_shape = saved[0].shape
            saved[0] = _share(saved[0].detach().reshape(-1), region.shard.group)
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    @once_differentiable("a reentrant checkpoint")
    def backward(ctx, *grads):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "a reentrant checkpoint takes part in .backward() without `inputs=` only; "
                "use checkpoint(..., use_reentrant=False) with torch.autograd.grad"
            )
        region, saved = ctx.region, list(ctx.saved_tensors)
        if ctx.first_shape is not None:
            gathered, _ = gather_along_first_dim(saved[0], region.shard.group)
            saved[0] = gathered[: ctx.first_shape.numel()].view(ctx.first_shape)
        tensors = tuple(
            tensor.detach().requires_grad_(needs_gradient)
            for tensor, needs_gradient in zip(saved, ctx.wanted, strict=True)
        )
        torch_autocast = _JoinedContexts(
            *(torch.autocast(*state) for state in region.torch_autocast)
        )
        restored = _JoinedContexts(
            region.random_states, region.second_run, torch_autocast, region.contexts[1]
        )
        with torch.enable_grad(), restored:
            outputs = region.run(tensors)
        roots = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, Tensor) and output.requires_grad and grad is not None
        ]
        if roots:
            torch.autograd.backward([output for output, _ in roots], [grad for _, grad in roots])
        return None, None, *(tensor.grad for tensor in tensors)
