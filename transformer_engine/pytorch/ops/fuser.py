"""OperationFuser: runs an operation chain as one autograd function.

A chain is a list of consecutive operations in a `Sequential`, or a single operation that is called by itself.
The fuser replaces each fused operation, such as `Linear`, by its basic operations. There are two ways to run
a chain:

- **Prepared** (`_find_chain`): one forward and one backward pass, in which a kernel may compute several operations or
  quantize its result for the next one. The passes are built once per key, which describes the shapes, dtypes and
  settings of a call (`call_key.py`); later calls with the same key reuse them (`prepared_chain.py`).
- **In segments** (`_run_segments`): the chain is divided into segments anew in each call. Consecutive
  operations of this package form a segment. An operation whose methods a user wrote is a segment that runs
  these methods (`chain_run.py`).

A call runs in segments if one of these conditions holds:

- A user wrote the methods of an operation in the chain, or of a `FusedOperation` that a fusion function
  inserted.
- A channel connects two operations of the chain (`Links.has_channels`).
- The passes of an operation read other parameters than its `own_tensors` returns.
- The call has keyword arguments.
- `torch.compile` traces the call.
- An operation has delayed-scaling state, and the call is part of a checkpointed function (in either of its
  two runs) or of a backward pass.
- A backend is forced (`te.use_backend`), or an observer reads the choices (`te.explain`).

While torch.compile traces, this file assigns no attributes of existing objects. Higher-order operators, such
as checkpoints, raise an error for such side effects.

Other files decide which operations a kernel computes together: `passes/patterns.py` lists pairs of
operations, and `chain.py` chooses the kernel that quantizes a result for the next operation.

Registered fusion functions replace operations by `FusedOperation`s. A `FusedOperation` that a user wrote runs
by its own methods. The `FusedOperation`s of this package (`fused/operations.py`) do not change the
computation. They name the fused operations for tests and other libraries, which read `_forward_ops` and
`_backward_ops`.

`first`, in this file and others, is the index of the first basic operation that the backward pass reaches:
the first operation with an input or a parameter that requires a gradient. If there is none, or if gradients
are disabled, `first` is the number of basic operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ...common.dispatch import interventions
from ...common.recipe import DelayedScaling, Recipe, recipe_revision
from ..distributed.recompute import state_without_gradients
from ..functions.scale_update import is_backward_pass
from ..quantization import delayed_scaling
from ..quantization.autocast import AutocastState, current, eager_thread_state
from ..runtime.autograd import check_transforms
from ..runtime.tracing import constant_while_tracing
from .applied_recipe import NOT_APPLIED, AppliedRecipe, apply_recipe, distinct_while_tracing
from .call_key import CallKeys
from .chain_run import ChainRun, IndexedOperations, SegmentedChain
from .lent_parameters import are_parametrized
from .links import Links, check_tensor, extra_inputs_error
from .operation import BasicOperation, FusedOperation, FusibleOperation
from .parts import NO_CHANNELS
from .pass_operation import PassOperation, check_parameters, has_backward_pass, has_forward_pass
from .prepared_chain import FusionResults, PreparedChain, build_chain
from .recipe_slots import operations_by_name
from .user_results import apply_fusions

# Prepared chains per fuser. A full cache is cleared; it fills if the shapes vary from call to call.
_MAX_PREPARED = 64

# Fusion function: function(ops, recipe=recipe) -> ops.
FusionFunction = Callable[..., list[FusibleOperation]]


class OperationFuser:
    """Runs consecutive operations as one differentiable function.

    Args:
        ops: The operations in order. Of a fused operation the fuser runs the basic operations, not its own
            `fuser_forward` and `fuser_backward`.
        channels: Channel names that connect these operations with other parts of the container. The caller
            passes and receives the tensors of these channels as extra inputs and outputs (see `Links`).

    Attributes:
        num_extra_inputs: Number of extra inputs that the caller passes.
        forward_fusion_functions: Functions from `register_forward_fusion`.
        backward_fusion_functions: Functions from `register_backward_fusion`.
        forward_backward_fusion_functions: Functions from `register_forward_backward_fusion`.
    """

    forward_fusion_functions: list[FusionFunction] = []
    backward_fusion_functions: list[FusionFunction] = []
    forward_backward_fusion_functions: list[FusionFunction] = []

    def __init__(self, ops: Sequence[FusibleOperation], channels: frozenset[str] = NO_CHANNELS) -> None:
        self._basic_ops: list[BasicOperation] = [basic for op in ops for basic in op.basic_operations()]
        self._num_basic_ops = len(self._basic_ops)
        self.channels = channels
        self._links = Links(self._basic_ops, channels)
        self.num_extra_inputs: int = len(self._links.public_inputs)
        if not torch.compiler.is_compiling():  # a fuser that is created in a graph ends with the trace
            for op in self._basic_ops:
                # The flag makes later changes of the operation's channels an error (`channels.py`). An
                # assignment `op._captured_by_fuser = True` would change `_revision` and thereby the key of
                # later calls.
                object.__setattr__(op, "_captured_by_fuser", True)
        # Operations whose `pre_first_fuser_forward` has not run yet.
        self._uninitialized: Sequence[FusibleOperation] = list(ops)
        # Results of the fusion functions in the last call: a cache of one entry, and the value of
        # `_forward_ops`.
        self._fusions = FusionResults([], [], 0, None, None)
        # Whether calls may be prepared: no channel within the chain, and no methods of a user.
        self._can_prepare = not self._links.has_channels and all(
            has_forward_pass(op) and has_backward_pass(op) for op in self._basic_ops
        )
        self._keys = CallKeys(self._basic_ops)
        # Prepared chains by key; None for a key whose calls must run in segments.
        self._prepared: dict[tuple[Any, ...], PreparedChain | None] = {}
        # The registered fusion functions for which `_prepared` is valid.
        self._fusion_functions = self._copy_fusion_functions()
        self._applied_recipe = NOT_APPLIED
        # Autocast state in the last call without gradients; see `_use_recipe`.
        self._state_without_gradients: AutocastState | None = None

    def __call__(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Run the operations.

        Args:
            input: The main input.
            *extra_inputs: Extra inputs that no channel provides, in order: tensors, or values that
                `BasicOperation.accept_extra_input` converts, such as the split sizes for a `GroupedLinear` as a list.
            basic_op_kwargs: Keyword arguments: one dict, possibly empty, for each basic operation.

        Returns:
            The main output, or a tuple (main output, *extra outputs).

        Raises:
            TypeError: An input is not a tensor.
            ValueError: There are too few or too many extra inputs or keyword arguments.
        """
        if not parametrize._cache_enabled and are_parametrized(self._basic_ops):
            # Compute each parametrized tensor once per call, so that the passes and autograd see the same object.
            with parametrize.cached():
                return self(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        self._check_inputs(input, extra_inputs, basic_op_kwargs)
        if extra_inputs:  # check and convert the values; clone a tensor that must not be written in place
            extra_inputs = self._links.check_inputs(input, extra_inputs)
        if self._uninitialized:
            _initialize(self._uninitialized)
            if not torch.compiler.is_compiling():
                self._uninitialized = ()
        if self._can_prepare and not torch.compiler.is_compiling() and not any(basic_op_kwargs or ()):
            chain, inputs = self._find_chain(input, extra_inputs)
            if chain is not None:
                self._fusions = chain.fusions
                for check in chain.checks:  # `pre_fuser_forward` for operations that override it
                    check()
                return chain(inputs)
        return self._run_segments(input, extra_inputs, basic_op_kwargs)

    def _check_inputs(
        self, x: Any, extra_inputs: Sequence[Any], basic_op_kwargs: list[dict[str, Any]] | None
    ) -> None:
        """Check the argument counts, and that the main input is a tensor.

        Raises:
            TypeError: The main input is not a tensor.
            ValueError: There are too few or too many extra inputs or keyword arguments.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            raise extra_inputs_error(len(extra_inputs), self._basic_ops)
        if type(x) is not Tensor:
            check_tensor(f"the main input of {type(self._basic_ops[0]).__name__} (operation 0)", x)
        if basic_op_kwargs is not None and len(basic_op_kwargs) != self._num_basic_ops:
            raise ValueError(
                f"basic_op_kwargs has {len(basic_op_kwargs)} entries for {self._num_basic_ops} basic operations; give "
                "one dict for each"
            )

    def _find_chain(
        self, x: Tensor, extra_inputs: tuple[Tensor, ...]
    ) -> tuple[PreparedChain | None, list[Any]]:
        """Look up the prepared chain for this call; the first call with a key builds the chain.

        Returns:
            The chain, or None if the call must run in segments; and the chain's inputs, in the order of
            `CallKeys.key_and_inputs`.
        """
        thread = eager_thread_state()
        self._use_recipe(thread.state)
        recomputes = self._applied_recipe.stateful and (thread.recomputes or is_backward_pass())
        # `interventions` is not empty while a backend is forced or the choices are observed. A prepared chain
        # would keep a forced backend, and would skip the choices that an observer reads.
        if recomputes or interventions:
            return None, []
        fusion_functions = (  # the lists themselves, because a copy in each call would take time
            self.forward_backward_fusion_functions,
            self.forward_fusion_functions,
            self.backward_fusion_functions,
        )
        if fusion_functions != self._fusion_functions:
            self._prepared.clear()
            self._fusion_functions = self._copy_fusion_functions()
        key, inputs = self._keys.key_and_inputs(thread.state, x, extra_inputs)
        chain = self._prepared.get(key)
        if chain is None and key not in self._prepared:
            chain = self._build_chain(key, thread.state, x, extra_inputs)
        return chain, inputs

    def _use_recipe(self, state: AutocastState) -> None:
        """Apply the recipe of an autocast state, unless the operations use it already (`_applied_recipe`).

        Raises:
            RuntimeError: A reentrant checkpoint of another library runs the chain a second time, under
                another autocast state than the first time.
        """
        # A reentrant checkpoint runs the chain twice: without gradients, then in the backward pass. A call without
        # gradients may be the first run, so its state is stored. A later call with another state may be the second run;
        # `state_without_gradients` recognizes it and raises the error.
        previous = self._state_without_gradients
        if previous is not state and (previous is not None or not torch.is_grad_enabled()):
            self._state_without_gradients = state_without_gradients("te.ops", previous, state)
        recipe = state.recipe if state.enabled or state.calibrating else None
        if self._applied_recipe.is_current(recipe, state.group, self._basic_ops):
            return
        apply_recipe(self._basic_ops, state)
        self._applied_recipe = AppliedRecipe(
            recipe=recipe,
            revision=recipe_revision(recipe),
            group=state.group,
            applied=[op._applied for op in self._basic_ops],
            stateful=any(op.has_scaling_state() for op in self._basic_ops),
            pools=delayed_scaling.registry.pools,
        )

    def _build_chain(
        self, key: tuple[Any, ...], state: AutocastState, x: Tensor, extra_inputs: tuple[Tensor, ...]
    ) -> PreparedChain | None:
        """Prepare a chain and cache it under a key; None, also cached, if calls must run in segments."""
        check_parameters(self._basic_ops)
        parameters = self._basic_op_params
        first = self._first_requiring_backward(x, parameters, extra_inputs)
        chain = build_chain(
            self._basic_ops,
            self._find_fusions(first, state),
            first,
            x,
            self._links.by_operation(extra_inputs),
            parameters,
            updates_scales=state.enabled and self._applied_recipe.stateful,
        )
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        self._prepared[key] = chain
        return chain

    def _run_segments(
        self, x: Tensor, extra_inputs: tuple[Tensor, ...], basic_op_kwargs: list[dict[str, Any]] | None
    ) -> Any:
        """Run a call in segments; the module docstring lists the reasons."""
        options = [{} for _ in self._basic_ops] if basic_op_kwargs is None else basic_op_kwargs
        check_parameters(self._basic_ops)
        state = current()
        apply_recipe(self._basic_ops, state)
        parameters = self._basic_op_params
        first = self._first_requiring_backward(x, parameters, extra_inputs)
        fusions = self._find_fusions(first, state)
        for op, indices in fusions.forward:
            op.pre_fuser_forward(requires_grad=indices[-1] >= first)
        flat = [parameter for group in parameters for parameter in group]
        call = ChainRun(
            basic_ops=self._basic_ops,
            links=self._links,
            fused=(fusions.forward, fusions.backward),
            first=first,
            parameter_shapes=[[tensor.shape for tensor in group] for group in parameters],
            options=options,
            state=state,
        )
        if first < self._num_basic_ops:
            x, *tensors = distinct_while_tracing((x, *flat, *extra_inputs))
            results: Any = SegmentedChain.apply(x, call, *tensors)
        else:
            check_transforms(SegmentedChain.OPERATION, x, flat, extra_inputs)
            results = call.forward(x, extra_inputs)[0]
        return results if len(results) > 1 else results[0]

    def _first_requiring_backward(
        self, x: Tensor, parameters: list[list[Any]], extra_inputs: tuple[Tensor, ...]
    ) -> int:
        """Index of the first operation that the backward pass reaches (`first` in the module docstring)."""
        if not torch.is_grad_enabled():
            return self._num_basic_ops
        if x.requires_grad:
            return 0
        extra_by_operation = self._links.by_operation(extra_inputs)
        for index, (own_parameters, own_extra) in enumerate(zip(parameters, extra_by_operation, strict=True)):
            tensors = [*own_parameters, *[tensor for tensor in own_extra if tensor is not None]]
            if any(tensor.requires_grad for tensor in tensors):
                return index
        return self._num_basic_ops

    def _find_fusions(self, first: int, state: AutocastState) -> FusionResults:
        """Apply the registered fusion functions, or reuse the results of the last call.

        Results are reused if the functions, `first`, and three properties of the recipe are equal: its class,
        `amax_history_len` and `backward_override`. A change of another recipe field does not call the
        functions again.
        """
        recipe = state.recipe if state.enabled else None
        length = recipe.amax_history_len if isinstance(recipe, DelayedScaling) else None
        override = getattr(recipe, "backward_override", None)
        fusion_functions = self._copy_fusion_functions()
        recipe_type = None if recipe is None else type(recipe)
        key = (length, override, first, *fusion_functions)
        # torch 2.11 can trace `is` between classes, but not == on tuples that contain classes.
        if recipe_type is self.recipe_type and key == self._fusions.key:
            return self._fusions
        both_functions, forward_functions, backward_functions = fusion_functions
        both = apply_fusions(both_functions, self._basic_ops, self._basic_ops, recipe)
        fusions = FusionResults(
            forward=_with_indices(apply_fusions(forward_functions, both, self._basic_ops, recipe)),
            backward=_with_indices(apply_fusions(backward_functions, both, self._basic_ops, recipe)),
            first=first,
            recipe_type=recipe_type,
            key=key,
        )
        if not torch.compiler.is_compiling():  # no side effects while tracing
            self._fusions = fusions
        return fusions

    def _copy_fusion_functions(
        self,
    ) -> tuple[list[FusionFunction], list[FusionFunction], list[FusionFunction]]:
        """Copies of the fusion function lists: for both passes, for forward and for backward passes."""
        return (
            list(self.forward_backward_fusion_functions),
            list(self.forward_fusion_functions),
            list(self.backward_fusion_functions),
        )

    # Operations in the forward and in the backward pass of the last call, after the registered fusion
    # functions. Each is paired with the indices of its basic operations.
    _forward_ops = property(lambda self: self._fusions.forward)
    _backward_ops = property(lambda self: self._fusions.backward)

    @property
    def first_op_requiring_backward(self) -> int:
        """Index of the first operation that the backward pass of the last call reaches."""
        return self._fusions.first

    @property
    def recipe_type(self) -> type[Recipe] | None:
        """Recipe class in the last call; None without a recipe."""
        return self._fusions.recipe_type

    @property
    def _basic_op_params(self) -> list[list[Any]]:
        """Parameters by basic operation."""
        return [op.own_tensors() for op in self._basic_ops]

    @property
    def _flat_basic_op_params(self) -> list[Any]:
        """All parameters in one list."""
        return [parameter for parameters in self._basic_op_params for parameter in parameters]


def _initialize(ops: Sequence[FusibleOperation]) -> None:
    """Run `pre_first_fuser_forward` for each operation.

    The base-class methods can be traced. An override, such as a user's, may assign attributes, which is an
    error in a traced checkpoint. While torch.compile traces, an override is therefore executed instead of
    traced, and `_initialized_while_tracing` keeps later fusers from running it again.
    """
    for op in ops:
        method = type(op).pre_first_fuser_forward
        if method is FusedOperation.pre_first_fuser_forward:
            _initialize(op.basic_operations())
        elif method in (FusibleOperation.pre_first_fuser_forward, PassOperation.pre_first_fuser_forward):
            op.pre_first_fuser_forward()
        elif torch.compiler.is_compiling() and isinstance(op, BasicOperation):
            _initialize_while_tracing(op._traced_name)
        elif not getattr(op, "_initialized_while_tracing", False):
            op.pre_first_fuser_forward()


@constant_while_tracing
def _initialize_while_tracing(name: str) -> bool:
    op: Any = operations_by_name[name]
    if not op._initialized_while_tracing:
        op.pre_first_fuser_forward()
        object.__setattr__(op, "_initialized_while_tracing", True)  # keeps `_revision`
    return True


def _with_indices(ops: Sequence[FusibleOperation]) -> IndexedOperations:
    """Pair each operation with the indices that its basic operations have in the chain."""
    fused: IndexedOperations = []
    offset = 0
    for op in ops:
        count = len(op.basic_operations())
        fused.append((op, list(range(offset, offset + count))))
        offset += count
    return fused


def register_forward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in forward passes.

    Args:
        op_fusion_func: function(ops, recipe=recipe) -> ops. It receives and returns a list of operations in
            order. A new `FusedOperation` must consist of exactly the basic operations that it replaces.
        prepend: Apply the function before those registered earlier.

    Raises:
        TypeError: The function is not callable.
    """
    _register(OperationFuser.forward_fusion_functions, op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in backward passes.

    Args:
        op_fusion_func: See `register_forward_fusion`.
        prepend: Apply the function before those registered earlier.
    """
    _register(OperationFuser.backward_fusion_functions, op_fusion_func, prepend)


def register_forward_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in both passes.

    Functions for both passes are applied before functions for one pass.

    Args:
        op_fusion_func: See `register_forward_fusion`.
        prepend: Apply the function before those registered earlier.
    """
    _register(OperationFuser.forward_backward_fusion_functions, op_fusion_func, prepend)


def _register(functions: list[FusionFunction], function: FusionFunction, prepend: bool) -> None:
    if not callable(function):
        raise TypeError(
            f"{function!r} is not callable; give a function(ops, recipe=recipe) that returns operations"
        )
    functions.insert(0 if prepend else len(functions), function)


# `FusibleOperation.forward` runs a single operation as a chain. operation.py cannot import this file, which
# imports it.
FusibleOperation._fuser = OperationFuser
