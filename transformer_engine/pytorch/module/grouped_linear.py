"""GroupedLinear: y_i = x_i @ weight_i.T + bias_i, the experts in a mixture-of-experts layer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...common.numbers import to_ints
from ..compat.argument_orders import declare_call
from ..compat.by_name import GroupedLinearByName as _GroupedLinear  # other libraries patch it
from ..compat.by_name import call_by_name, check_unquantized, general_gemm
from ..compat.replaceable import watched
from ..constants import ParallelMode
from ..distributed_weight import whole_weights
from ..functions.caller_buffers import NO_BUFFERS, CallerBuffers, check_buffers, check_separate
from ..functions.grouped_call import GroupedCall, GroupedSpec, groups_of_rows, stack_members
from ..functions.grouped_linear import grouped_linear
from ..functions.grouped_request import FLAGGED_WEIGHTS, runs_together
from ..primitives.grouped_gemm import Matrices, make_groups
from ..quantization.global_state import FP8GlobalStateManager, is_captured
from ..runtime.device import canonical_device, is_meta
from ..tensor.grouped_tensor import plain_stack
from .arguments import FLAG_TYPES, NO_SWITCHES, CallSwitches, accepts, switch
from .config import configure_class
from .grouped_parameters import (
    check_device_splits,
    create_parameters,
    group_single_parameters,
    group_weights,
    is_module_grouped_tensor_path_supported,
    load_other_form,
    mark_parameters,
    parameter_names,
    single_parameters,
    uses_grouped_tensor,
)
from .grouped_spec import grouped_spec_of_call, traced_call
from .linear_base import SIZES, LinearConfig, ProductsModule, check_ranks
from .parameters import InitMethod, ParameterInit, default_init_method, get_parameter_values
from .row_groups import check_dense

# Beside the layer, original names that other libraries import from here.
__all__ = [
    "GroupedLinear",
    "_GroupedLinear",
    "general_gemm",
    "is_module_grouped_tensor_path_supported",
]
# Names in this file that programs monkey-patch; see `linear.py`.
_replaced = watched(__name__, {"_GroupedLinear": _GroupedLinear, "general_gemm": general_gemm})

_ALL_WEIGHTS = "all weights"  # key for all weights in the module's cache


@dataclass(frozen=True, eq=False)
class GroupedLinearConfig(LinearConfig):
    num_gemms: int = 0
    use_grouped_tensor: bool = False
    single_grouped_weight: bool = False
    single_grouped_bias: bool = False


@configure_class(
    GroupedLinearConfig, fixed=SIZES | {"num_gemms", "single_grouped_weight", "single_grouped_bias"}
)
class GroupedLinear(ProductsModule):
    """Multiply consecutive row groups by one weight each: y [sum of m_splits, out_features].

    Args:
        num_gemms: Group count. The parameters are weight0, bias0, weight1, ..
        parallel_mode: None, "column" or "row". It decides the parameter shapes; the caller communicates.
        single_grouped_weight: One `weight` [num_gemms, out, in] if NVTE_GROUPED_LINEAR_SINGLE_PARAM=1.
        single_grouped_bias: One `bias` [num_gemms, out], under the same condition.
        use_grouped_tensor: m_splits is an int64 tensor on the GPU, and the host does not wait for it.

    The other arguments are as in `Linear`. Each group is quantized as in `Linear`. On a GPU,
    NVTE_USE_CUTLASS_GROUPED_GEMM=0 computes the groups one after another, bit-equal to `Linear`.
    """

    quantized_as = "grouped_linear"
    build = staticmethod(grouped_spec_of_call)
    _config: GroupedLinearConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    num_gemms: int
    use_grouped_tensor: bool
    single_grouped_weight: bool
    single_grouped_bias: bool
    in_features: int
    out_features: int
    parallel_mode: str | None
    get_rng_state_tracker: Callable[..., Any] | None
    rng_tracker_name: str | None
    weight_names: tuple[str, ...]
    bias_names: tuple[str, ...]

    @accepts(ub_overlap_rs=switch, ub_overlap_ag=switch)
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: ParallelMode | None = None,
        device: torch.device | str | int = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        arguments = dict(locals())  # nothing else is assigned yet
        super().__init__(name)
        tp_size = check_ranks(parallel_mode, tp_group, tp_size, in_features, out_features)
        if ub_overlap_rs or ub_overlap_ag:
            raise ValueError(
                "GroupedLinear has no communication; leave ub_overlap_rs and ub_overlap_ag False"
            )
        if bias and not return_bias and parallel_mode == "row" and tp_size > 1:
            raise ValueError(
                f"bias=True with tp_size={tp_size} and parallel_mode='row' would be added {tp_size} times; "
                "set return_bias=True or bias=False"
            )
        single = single_parameters(
            single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias
        )
        self._configure_from(
            arguments,
            tp_size,
            sharded=parallel_mode is not None,
            use_grouped_tensor=uses_grouped_tensor(use_grouped_tensor),
            in_features=in_features // tp_size if parallel_mode == "row" else in_features,
            out_features=out_features // tp_size if parallel_mode == "column" else out_features,
            weight_names=parameter_names("weight", num_gemms, single["single_grouped_weight"]),
            bias_names=parameter_names("bias", num_gemms, single["single_grouped_bias"]),
            **single,
        )
        config, weights = self._config, [(name,) for name in self._config.weight_names]
        self._configure(
            _tensors=config.weight_names + config.bias_names,
            _weights=tuple(weights * num_gemms if config.single_grouped_weight else weights),
        )
        self.ub_name = ub_name
        options = {
            "dtype": params_dtype or torch.get_default_dtype(),
            "device": canonical_device(device),
        }
        fill = ParameterInit(
            init_method or default_init_method, get_rng_state_tracker, rng_tracker_name
        )
        create_parameters(self, fill, options)
        self.register_load_state_dict_pre_hook(load_other_form)
        self.reset_parameters(defer_init=is_meta(device))

    @property
    def num_products(self) -> int:
        """Product count: one per group."""
        return self._config.num_gemms

    def make_grouped_weights(self, defer_init: bool = False) -> None:
        """Turn weight0, weight1, ... into one parameter `weight`, as with single_grouped_weight=True.

        Call it before an optimizer holds the parameters. A layer whose weights are already grouped is unchanged.

        Args:
            defer_init: Do nothing, because the parameters are still to be allocated.
        """
        if defer_init or self.single_grouped_weight:
            return
        group_weights(self)
        self.numerics.workspaces.clear()

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init=defer_init)
        if not defer_init:
            group_single_parameters(self)
            mark_parameters(self)

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Return y [.., out_features], or (y, [bias per group]) with return_bias.

        `out` may be reused after the backward pass of the operations that read the output; autograd raises RuntimeError
        where a tensor that it saved has been overwritten. `dgrad_out` may be reused when the input gradient has been
        used. Until then it is the memory of `inp.grad` of a leaf, or a term of a sum if other operations read `inp`.
        This is not checked: give each backward pass in flight its own buffer, or clear `inp.grad` in between.

        Args:
            inp: Input [.., in_features].
            m_splits: Rows per group, in order; zeros are allowed, the sum is the row count. The host reads a
                tensor on a GPU, and waits for it, if the groups are computed in a loop, and under recipes
                that require a row multiple per group (MXFP8, NVFP4). It does not read the tensor if one
                launch computes all groups unquantized, with one FP8 scale per tensor or with FP8 blocks: the
                sum is then not checked, and rows past it get undefined results.
            is_first_microbatch: See `Linear.forward`.
            out: Contiguous buffer with the output's shape and dtype, whose memory the output shares.
            dgrad_out: Contiguous buffer with the input's shape and dtype, whose memory the input gradient shares.

        Raises:
            ValueError: The splits do not fit the groups and rows, or a buffer does not fit or shares memory.
        """
        m_splits = self._accept_splits(inp, m_splits)
        if type(is_first_microbatch) not in FLAG_TYPES:
            is_first_microbatch = switch("is_first_microbatch", is_first_microbatch)
        tensors: tuple[Any, ...] = self._tensors()
        if not getattr(tensors[0], "is_distributed_weight", False):
            return self._compute_output(
                inp, m_splits, is_first_microbatch, (out, dgrad_out), tensors
            )
        count, fused = len(self._config.weight_names), self._config.fuse_wgrad_accumulation
        with whole_weights((tensors[:count],), fused, self.wgrad_store) as wholes:
            full_tensors = (*wholes, *tensors[count:])
            return self._compute_output(
                inp, m_splits, is_first_microbatch, (out, dgrad_out), full_tensors
            )

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _compute_output(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None,
        outputs: tuple[Tensor | None, Tensor | None],
        tensors: tuple[Any, ...],
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Compute `forward` with accepted splits, the caller's (out, dgrad_out), and whole weights and biases."""
        out, dgrad_out = outputs
        has_buffers = out is not None or dgrad_out is not None
        buffers = self._caller_buffers(inp, out, dgrad_out, tensors) if has_buffers else NO_BUFFERS
        config, shape = self._config, inp.shape
        spec: GroupedSpec = self.spec(
            inp, tensors, CallSwitches(is_first_microbatch), any_rows=True
        )
        if is_first_microbatch:
            self.begin_first_microbatch()  # the next gradients overwrite main_grad
        flat = inp if len(shape) == 2 else inp.reshape(-1, config.in_features)
        count = len(config.weight_names)
        weights, dtype = tensors[:count], spec.groups[0].dtype
        biases: list[Any] = []
        if config.use_bias:
            biases = [bias if bias.dtype is dtype else bias.to(dtype) for bias in tensors[count:]]
        product_biases = None if config.return_bias else biases
        if isinstance(m_splits, Tensor) and torch.compiler.is_compiling():
            y = traced_call(
                self, spec, flat, m_splits, (weights, product_biases or ()), is_first_microbatch
            )
        else:
            call = self._call(spec, flat, m_splits, weights, is_first_microbatch, buffers)
            y = (_run_by_name if _replaced.names else grouped_linear)(
                flat, weights, product_biases, call
            )
        y = y if flat is inp else y.view(*shape[:-1], config.out_features)
        if not config.return_bias:
            return y
        return y, list(biases[0].unbind(0)) if biases and config.single_grouped_bias else biases

    def _call(
        self,
        spec: GroupedSpec,
        x: Tensor,
        m_splits: Sequence[int] | Tensor,
        weights: tuple[Any, ...],
        is_first_microbatch: bool | None,
        buffers: CallerBuffers,
    ) -> GroupedCall:
        """Return the bound call for these row counts and cached weights."""
        groups, count = spec.groups, self._config.num_gemms
        if isinstance(m_splits, Tensor) and spec.together and spec.quantizers.multiple > 1:
            m_splits = self._check_rows(m_splits.tolist(), x.shape[0])  # whether row blocks fit
        flag = FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor
        is_flagged = spec.together and flag is not None and is_captured(self.numerics.state)
        features = (FLAGGED_WEIGHTS,) if is_flagged else ()
        # The functions that replace patched names multiply one group after the other.
        if not _replaced.names and runs_together(spec, m_splits, weights, x.shape[0] > 0, features):
            if len(m_splits) != count:  # m_splits is a tensor that the host does not read
                raise ValueError(
                    f"m_splits has {len(m_splits)} numbers; give one for each of {count} groups"
                )
            splits = m_splits if isinstance(m_splits, Tensor) else tuple(m_splits)
            layout, cached = make_groups(splits, x.shape[0], x.device), None
            quantizer = spec.quantizers.weight
            if is_first_microbatch is not None and quantizer is not None:
                members = (
                    stack_members(weights[0]) if self._config.single_grouped_weight else weights
                )
                encode = partial(quantizer.matrices, Matrices.of(members), True)
                for i in range(count if is_first_microbatch else 0):
                    self.numerics.workspaces.pop(f"weight{i}", None)
                cached = self.numerics.workspaces.get_or_quantize(
                    _ALL_WEIGHTS, members, encode, groups[0].needs_grad_input, is_first_microbatch
                )
            return GroupedCall(spec, groups, (), layout, buffers, cached)
        if is_first_microbatch:
            self.numerics.workspaces.pop(_ALL_WEIGHTS, None)
        if isinstance(m_splits, Tensor):
            m_splits = self._check_rows(m_splits.tolist(), x.shape[0])
        rows = tuple(m_splits)
        groups = groups_of_rows(spec, rows, self._warn_of_high_precision)
        if is_first_microbatch is not None:
            members = stack_members(weights[0]) if spec.stacked_weight else weights
            cached_groups = [
                self.with_cached_weight(f"weight{i}", member, group, is_first_microbatch)
                for i, (member, group) in enumerate(zip(members, groups, strict=True))
            ]
            groups = tuple(cached_groups)
        return GroupedCall(spec, groups, rows, None, buffers)

    def _warn_of_high_precision(self, reason: str) -> None:
        self._warn_once(
            "group",
            f"GroupedLinear runs groups in high precision: {reason}. To quantize them, pad their rows",
        )

    def _caller_buffers(
        self, inp: Tensor, out: Tensor | None, dgrad_out: Tensor | None, tensors: tuple[Any, ...]
    ) -> CallerBuffers:
        """Return the caller's buffers as matrices, which fit the results and share no memory with operands."""
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "out and dgrad_out need eager mode; leave them None in compiled code"
            )
        self._check_call(inp, tensors, NO_SWITCHES)
        like = torch.empty(0, dtype=self.computing_dtype(inp), device=inp.device)
        shape = torch.Size((*inp.shape[:-1], self.out_features))
        buffers = CallerBuffers(
            check_buffers("out", out, shape, like),
            check_buffers("dgrad_out", dgrad_out, inp.shape, inp),
        )
        names = self._config.weight_names + self._config.bias_names
        operands = [("the input", inp), *zip(names, tensors, strict=True)]
        check_separate("out", buffers.output, operands)
        if inp.requires_grad:
            check_separate("dgrad_out", buffers.grad_input, operands)
        return buffers.with_own_versions(inp)

    def _tensors(self) -> tuple[Tensor | None, ...]:
        """Return all weights, then all biases."""
        config = self._config
        names = config._tensors if config.use_bias else config.weight_names
        single = config.single_grouped_weight or config.single_grouped_bias
        tensors: Any = get_parameter_values(self, names)
        if single:
            tensors = map(plain_stack, tensors)
        return (*tensors,) if config.use_bias else (*tensors, *[None] * len(config.bias_names))

    def _accept_splits(
        self, inp: Tensor, m_splits: Sequence[int] | Tensor
    ) -> Sequence[int] | Tensor:
        """Return the rows per group as checked ints, or a tensor that the host does not read unchanged."""
        if not isinstance(inp, Tensor) or inp.layout is not torch.strided:
            check_dense("the input", inp)
        if self._config.use_grouped_tensor:
            check_device_splits(m_splits, inp.device)
        if (
            isinstance(m_splits, Tensor)
            and m_splits.dim() == 1
            and not m_splits.is_floating_point()
        ):
            if m_splits.is_cuda or torch.compiler.is_compiling():
                return m_splits
            rows = m_splits.tolist()
        else:
            rows = to_ints("m_splits", m_splits)
        shape = inp.shape
        if shape[-1:] == (self._config.in_features,):  # otherwise the input is rejected later
            self._check_rows(rows, shape[0] if len(shape) == 2 else math.prod(shape[:-1]))
        return rows

    def _check_rows(self, rows: Sequence[int], total: int) -> Sequence[int]:
        if len(rows) != self.num_gemms or sum(rows) != total or min(rows) < 0:
            raise ValueError(
                f"m_splits={[*rows]} must be {self.num_gemms} numbers >= 0 that add up to the {total} rows"
            )
        return rows

    def extra_repr(self) -> str:
        sizes = f"num_gemms={self.num_gemms}, in_features={self.in_features}"
        return f"{sizes}, out_features={self.out_features}, bias={self.use_bias}"


def _run_by_name(
    x: Tensor, weights: Sequence[Any], biases: Sequence[Any] | None, call: GroupedCall
) -> Tensor:
    """Compute `grouped_linear` by the functions that this file's names are bound to."""
    for group in call.groups:
        check_unquantized(group, _replaced.names, "GroupedLinear")
    if call.buffers is not NO_BUFFERS:
        raise NotImplementedError(
            "out and dgrad_out while a name of GroupedLinear's file is replaced; leave them None"
        )
    if call.spec.stacked_weight:
        weights = weights[0].unbind(0)
    if call.spec.stacked_bias and biases:
        biases = biases[0].unbind(0)
    group_biases = biases or [None] * len(weights)
    file = sys.modules[__name__]
    return call_by_name(
        _GroupedLinear, torch.is_grad_enabled(), x, call, file, *weights, *group_biases
    )
