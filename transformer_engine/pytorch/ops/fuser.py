"""OperationFuser: runs a chain of operations as one differentiable function.

A chain is a list of consecutive operations in a `Sequential` (`sequential.py`), or a single operation that is called by
itself (`FusibleOperation.forward`). The fuser replaces each fused operation, such as `Linear`, by its basic operations.

**A call** (`OperationFuser.__call__`) runs in one of two ways:

| | prepared (`prepared_chain.py`) | in segments (`chain_run.py`) |
| --- | --- | --- |
| passes | one forward and one backward pass for the whole chain | a forward and a backward pass for each segment |
| built | once for each key, which describes the shapes, dtypes and settings of a call (`call_key.py`) | in each call |
| when | usually | if there is a reason not to run prepared |

A segment is one or more consecutive operations from this package, or one operation whose methods a user wrote, which
run then. A channel between two operations separates their segments.

Three functions return reasons to run in segments:

| function | reason for | examples |
| --- | --- | --- |
| `_reason_for_all_calls` | all calls of the chain | user methods, channels |
| `_reason_for_call` | one call | keyword arguments, torch.compile, te.explain |
| `build_chain` (`prepared_chain.py`) | all calls with one key | a registered fusion with user methods |

**What is computed together** is decided in `chain.py`, the next file to read, for prepared chains and segments alike.
Two neighboring operations in a table (`passes/patterns.py`) are one step. Otherwise the kernel of a norm, an activation
or a bias gradient may quantize its result for the next operation.

`first_with_backward`, in this file and others, is the index of the first basic operation that the backward pass
reaches: the first operation with an input or a parameter that requires a gradient. If there is none, or if gradients
are disabled, the index is the number of basic operations.

**Registered fusions.** Users register functions that replace basic operations by `FusedOperation`s, in both passes or
in one of them (`fusions.py`). They are applied for each new key, and in each call in segments, but again only if the
registered functions, `first_with_backward`, or the recipe's class, `amax_history_len` or `backward_override` has
changed (`fuse_operations`). A user's replacement in the forward pass only may leave the basic operations
without the state that their own backward passes read: see `ChainRun._save_missing_state`.

**te.explain** must see each choice of a backend, so within it every chain runs in segments. It reports the reasons of
the first two functions above, for which the chain would run in segments without `te.explain`. The reasons of
`build_chain`, which is not called then, and a forced backend (`te.use_backend`) are not reported.

While torch.compile traces, this file assigns no attributes of existing objects. Higher-order operators, such as
checkpoints, raise an error for such side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ...common.dispatch import interventions
from ...common.explanation import is_explaining, note
from ...common.recipe import Recipe
from ..functions.scale_update import is_backward_pass
from ..quantization.autocast import AutocastState, current, eager_thread_state
from .applied_recipe import AppliedRecipe, apply_recipe
from .call_key import CallKeys
from .chain_run import ChainRun, run_segments
from .fusions import (
    FusionFunction,
    FusionLists,
    FusionResults,
    IndexedOperations,
    fuse_operations,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .lent_parameters import are_parametrized
from .links import Links, check_options_count, check_tensor, extra_inputs_error
from .operation import BasicOperation, FusibleOperation
from .parts import NO_CHANNELS
from .pass_operation import check_parameters, has_passes, initialize_operations
from .prepared_chain import PreparedChain, build_chain

# Beside the fuser, original names that other libraries import from here.
__all__ = [
    "OperationFuser",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]

# Reason for a call within `te.use_backend` or `te.explain`. Not reported, because it always holds within `te.explain`.
_INTERVENTION = (
    "a backend is forced (te.use_backend), or an observer reads the choices (te.explain)"
)
# Prepared chains per fuser. A full cache is cleared: chains with more kinds of calls, for example with varying shapes,
# are prepared again.
_MAX_PREPARED = 64


class OperationFuser:
    """Runs consecutive operations as one differentiable function.

    Args:
        ops: The operations in order.
        channels: Channel names that connect these operations with other parts of the container. The caller
            passes and receives the tensors of these channels as extra inputs and outputs (see `Links`).

    Attributes:
        num_extra_inputs: Number of extra inputs that the caller passes.
        forward_fusion_functions: Functions from `register_forward_fusion`. All fusers share this list and the next
            two, which change by registration only (`fusions.py`).
        backward_fusion_functions: Functions from `register_backward_fusion`.
        forward_backward_fusion_functions: Functions from `register_forward_backward_fusion`.
    """

    forward_fusion_functions: list[FusionFunction] = []
    backward_fusion_functions: list[FusionFunction] = []
    forward_backward_fusion_functions: list[FusionFunction] = []

    def __init__(
        self, ops: Sequence[FusibleOperation], channels: frozenset[str] = NO_CHANNELS
    ) -> None:
        # Fixed for the chain.
        self._basic_ops: list[BasicOperation] = [
            basic for op in ops for basic in op.basic_operations()
        ]
        self.channels = channels
        self._links = Links(self._basic_ops, channels)
        # Reason why all calls run in segments, or None.
        self._reason_against_preparing = _reason_for_all_calls(self._basic_ops, self._links)
        self.num_extra_inputs: int = len(self._links.public_inputs)
        # A fuser that is created in a graph is discarded after the trace, so channels may still change.
        if not torch.compiler.is_compiling():
            for op in self._basic_ops:
                op.fix_channels()

        # Operations whose `pre_first_fuser_forward` has not run yet: all until the first call in eager mode, then none.
        self._ops_to_initialize: Sequence[FusibleOperation] = list(ops)
        # The recipe that the operations use from one call to the next.
        self._applied_recipe = AppliedRecipe(self._basic_ops)

        # Results of the fusion functions in the last call: the value of `_forward_ops` and similar properties, and the
        # cache of `fuse_operations`, with one entry.
        self._fusions = FusionResults([], [], 0, None, None)

        # Prepared chains by key. A key contains the recipe indirectly: each recipe gives the operations quantizers with
        # another `_quantizers_version`.
        self._keys = CallKeys(self._basic_ops)
        # Value for a key whose calls run in segments: the reason.
        self._prepared: dict[tuple[Any, ...], PreparedChain | str] = {}
        # The fusion functions, copied, with which the chains in `_prepared` were built.
        self._functions_of_prepared = _copy_lists(self._fusion_functions)

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
            basic_op_kwargs: Keyword arguments: one dict, possibly empty, for each basic operation. Private functions
                call them `options`.

        Returns:
            The main output, or a tuple (main output, *extra outputs).

        Raises:
            TypeError: An input is not a tensor.
            ValueError: There are too few or too many extra inputs or keyword arguments.
        """
        if not parametrize._cache_enabled and are_parametrized(self._basic_ops):
            # Compute each parametrized tensor once per call, so that the passes and autograd see the same object.
            # In the inner call `_cache_enabled` is nonzero.
            with parametrize.cached():
                return self(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        self._check_arguments(input, extra_inputs, basic_op_kwargs)
        # Check and convert the values; clone a tensor that must not be written in place.
        if extra_inputs:
            extra_inputs = self._links.convert_extra_inputs(input, extra_inputs)
        if self._ops_to_initialize:
            initialize_operations(self._ops_to_initialize)
            if not torch.compiler.is_compiling():
                self._ops_to_initialize = ()
        # Creates the quantizers, on which the reason (`_applied_recipe.stateful`) and the key of the chain depend.
        state = self._apply_recipe()
        reason = self._reason_for_call(basic_op_kwargs)
        if reason is None:
            chain, inputs = self._find_prepared(state, input, extra_inputs)
            if isinstance(chain, PreparedChain):
                self._fusions = chain.fusions  # for `_forward_ops` and similar properties
                return chain(inputs)
        elif is_explaining() and reason is not _INTERVENTION:
            names = ", ".join([type(op).__name__ for op in self._basic_ops])
            note(f"the chain {names} runs in segments: {reason}")
        return self._run_segments(state, input, extra_inputs, basic_op_kwargs)

    def _check_arguments(
        self, x: Any, extra_inputs: Sequence[Any], options: list[dict[str, Any]] | None
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
        if options is not None:
            check_options_count(options, len(self._basic_ops))

    def _apply_recipe(self) -> AutocastState:
        """Make the operations use the recipe of the current autocast state, which is returned."""
        if torch.compiler.is_compiling():
            state = current()
            # Not `self._applied_recipe.update`: tracing may not assign the attributes of existing objects.
            apply_recipe(self._basic_ops, state)
            return state
        state = eager_thread_state().state  # `current()`, without its check for a tracing compiler
        self._applied_recipe.update(state)
        return state

    def _reason_for_call(self, options: list[dict[str, Any]] | None) -> str | None:
        """Reason why a call runs in segments; None if it runs prepared, unless `build_chain` returns a reason."""
        if self._reason_against_preparing is not None:
            return self._reason_against_preparing
        if options is not None and any(options):
            return "the call has keyword arguments"
        if torch.compiler.is_compiling():
            return "torch.compile traces the call"
        # A checkpoint repeats its function in the backward pass. The repetition must use the scales of the first
        # execution; a prepared chain would use the current ones.
        if self._applied_recipe.stateful and (
            eager_thread_state().recomputes or is_backward_pass()
        ):
            return "operations have delayed scaling, and the call is in a checkpointed function or a backward pass"
        # A prepared chain would keep a forced backend in later calls, and would skip the choices for an observer.
        if interventions:
            return _INTERVENTION
        return None

    def _find_prepared(
        self, state: AutocastState, x: Tensor, extra_inputs: tuple[Tensor, ...]
    ) -> tuple[PreparedChain | str, list[Any]]:
        """Look up the prepared chain for a call; the first call with a key builds the chain.

        Returns:
            The chain, or the reason why calls with this key run in segments; and the inputs for the chain (see
            `PreparedChain.__call__`).
        """
        if self._fusion_functions != self._functions_of_prepared:
            self._prepared.clear()
            self._functions_of_prepared = _copy_lists(self._fusion_functions)
        key, inputs = self._keys.key_and_inputs(state, x, extra_inputs)
        chain = self._prepared.get(key)
        if chain is None:
            parameters = self._read_parameters()
            chain = build_chain(
                self._basic_ops,
                self._update_fusions(state, x, parameters, extra_inputs),
                x,
                self._links.by_operation(extra_inputs),
                parameters,
                updates_scales=state.enabled and self._applied_recipe.stateful,
            )
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            self._prepared[key] = chain
        return chain, inputs

    def _run_segments(
        self,
        state: AutocastState,
        x: Tensor,
        extra_inputs: tuple[Tensor, ...],
        options: list[dict[str, Any]] | None,
    ) -> Any:
        """Run a call in segments (see the module docstring)."""
        parameters = self._read_parameters()
        fusions = self._update_fusions(state, x, parameters, extra_inputs)
        options = [{} for _ in self._basic_ops] if options is None else options
        call = ChainRun(self._basic_ops, self._links, fusions, parameters, options, state)
        outputs: Any = run_segments(call, x, parameters, extra_inputs)
        return outputs if len(outputs) > 1 else outputs[0]

    def _read_parameters(self) -> list[list[Any]]:
        """Parameters by basic operation, checked.

        Raises:
            RuntimeError: A required parameter is None.
        """
        check_parameters(self._basic_ops)
        return [op.own_tensors() for op in self._basic_ops]

    def _update_fusions(
        self,
        state: AutocastState,
        x: Tensor,
        parameters: list[list[Any]],
        extra_inputs: tuple[Tensor, ...],
    ) -> FusionResults:
        """Apply the registered fusion functions for a call, or return the results of the last one if nothing changed.

        In eager mode `_fusions` stores the results.

        Raises:
            RuntimeError: A fusion function drops or reorders operations.
        """
        first_with_backward = self._find_first_with_backward(x, parameters, extra_inputs)
        # Calibration computes without the recipe.
        recipe = state.recipe if state.enabled else None
        functions = _copy_lists(self._fusion_functions)
        fusions = fuse_operations(
            self._basic_ops, functions, first_with_backward, recipe, self._fusions
        )
        if not torch.compiler.is_compiling():  # no side effects while tracing
            self._fusions = fusions
        return fusions

    def _find_first_with_backward(
        self, x: Tensor, parameters: list[list[Any]], extra_inputs: tuple[Tensor, ...]
    ) -> int:
        """Index of the first operation that the backward pass reaches (see the module docstring)."""
        if not torch.is_grad_enabled():
            return len(self._basic_ops)
        if x.requires_grad:
            return 0
        extra_by_operation = self._links.by_operation(extra_inputs)
        for index, tensors in enumerate(zip(parameters, extra_by_operation, strict=True)):
            own_tensors = [tensor for group in tensors for tensor in group if tensor is not None]
            if any(tensor.requires_grad for tensor in own_tensors):
                return index
        return len(self._basic_ops)

    @property
    def _fusion_functions(self) -> FusionLists:
        """The registered fusion functions: for both passes, for forward and for backward passes."""
        return (
            self.forward_backward_fusion_functions,
            self.forward_fusion_functions,
            self.backward_fusion_functions,
        )

    # The following names are part of NVIDIA's interface. Tests and other libraries read them; this package does not.

    @property
    def _forward_ops(self) -> IndexedOperations:
        """Operations in the forward pass of the last call, each with the indices of its basic operations."""
        return self._fusions.forward

    @property
    def _backward_ops(self) -> IndexedOperations:
        """Operations in the backward pass of the last call, each with the indices of its basic operations."""
        return self._fusions.backward

    @property
    def first_op_requiring_backward(self) -> int:
        """Index of the first operation that the backward pass of the last call reaches."""
        return self._fusions.first_with_backward

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


def _reason_for_all_calls(basic_ops: Sequence[BasicOperation], links: Links) -> str | None:
    """Reason why all calls of a chain run in segments; None if they may run prepared."""
    for op in basic_ops:
        if not has_passes(op):
            return f"a user wrote the methods of {type(op).__name__}"
    if links.has_channels:
        return "a channel connects two of its operations, or an extra output is not returned to the caller"
    return None


def _copy_lists(functions: FusionLists) -> FusionLists:
    """Copy the lists: registrations change them in place, and cached results belong to their former contents."""
    both, forward, backward = functions
    return list(both), list(forward), list(backward)


# `FusibleOperation.forward` runs a single operation as a chain. Set here because importing fuser.py in operation.py
# would be circular.
FusibleOperation._fuser = OperationFuser
