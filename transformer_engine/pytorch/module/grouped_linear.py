"""GroupedLinear: y_i = x_i @ weight_i.T + bias_i, the experts of a mixture-of-experts layer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...common.dispatch import undisturbed
from ...common.memory import Memory
from ...common.numbers import to_bool
from ..functions.by_name import _GroupedLinear, called_by_name, general_gemm, refuse_quantized
from ..functions.caller_buffers import NO_BUFFERS, CallerBuffers, check_buffers, check_separate
from ..functions.grouped_linear import GroupedLinearSpec, grouped_linear
from ..functions.grouped_together import grouped_linear_together
from ..functions.linear_spec import LinearSpec
from ..functions.scale_update import of_the_pass
from ..functions.stacks import members_of
from ..functions.weight_gradient import WeightGradStore
from ..quantization.autocast import current, here_in_eager_mode
from ..runtime.device import canonical_device, is_meta
from ..runtime.replaceable import watched
from .arguments import accepts, switch
from .config import configured
from .grouped_keywords import check_device_splits, honoured, uses_grouped_tensor
from .grouped_parameters import create_parameters, group_weights, load_other_form, mark_parameters, names_of
from .grouped_path import TogetherPath, fitting_group_specs, group_specs
from .linear_base import SIZES, LinearConfig, ProductsModule, check_parallel_mode
from .numerics import traced_update
from .parameters import InitMethod, ParameterInit, default_init_method
from .products import UNQUANTIZED, ModuleRecipe, ProductQuantizers
from .row_groups import check_dense, rows_of_groups
from .specs import product_refusal, scale_update

_KEPT = 64  # the most calls whose groups' specs a module keeps


@dataclass(frozen=True, eq=False)
class GroupedLinearConfig(LinearConfig):
    num_gemms: int = 0
    use_grouped_tensor: bool = False
    single_grouped_weight: bool = False
    single_grouped_bias: bool = False


@configured(GroupedLinearConfig, fixed=SIZES | {"num_gemms", "single_grouped_weight", "single_grouped_bias"})
class GroupedLinear(ProductsModule):
    """y [sum m_i, out_features]: rows of x in num_gemms consecutive groups, each with a weight and bias of its own.

    num_gemms             number of groups; parameters weight0 .. and bias0 ..
    parallel_mode, tp_size, tp_group   decide the shapes of the parameters; communication is the caller's
    save_original_input   keep the unquantized input for the backward; not with delayed scaling
    single_grouped_weight, single_grouped_bias   one parameter of all groups, `weight` [num_gemms, out, in] and `bias`
                          [num_gemms, out]; with NVTE_GROUPED_LINEAR_SINGLE_PARAM=1, else without effect
    use_grouped_tensor    on a GPU m_splits is an int64 tensor there, and the host does not wait for it
    Other parameters as in Linear. Every group is quantized as a Linear would, bit for bit. On a GPU all groups are
    quantized and multiplied together where `grouped_path` allows it; NVTE_USE_CUTLASS_GROUPED_GEMM=0 multiplies
    group by group, which gives the bits of a loop of Linear layers.
    """

    quantized_as = "grouped_linear"
    _config: GroupedLinearConfig
    num_gemms: int
    use_grouped_tensor: bool
    single_grouped_weight: bool
    single_grouped_bias: bool
    fuse_wgrad_accumulation: bool
    save_original_input: bool
    in_features: int
    out_features: int
    parallel_mode: str | None

    @accepts(ub_overlap_rs=switch, ub_overlap_ag=switch)
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None, rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        device: torch.device | str | int = "cuda", ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False, ub_name: str | None = None, delay_wgrad_compute: bool = False,
        save_original_input: bool = False, single_grouped_weight: bool = False,
        single_grouped_bias: bool = False, name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name)
        check_parallel_mode(parallel_mode, tp_size, in_features, out_features)
        if ub_overlap_rs or ub_overlap_ag:
            raise ValueError(
                "GroupedLinear has no communication to overlap; leave ub_overlap_rs and ub_overlap_ag False"
            )
        if bias and not return_bias and parallel_mode == "row" and tp_size > 1:
            raise ValueError(
                f"bias=True with tp_size={tp_size} and parallel_mode='row' would be added {tp_size} times; "
                "set return_bias=True or bias=False"
            )
        single = honoured(
            single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias
        )
        self._configure(
            num_gemms=num_gemms,
            use_grouped_tensor=uses_grouped_tensor(use_grouped_tensor),
            in_features=in_features // tp_size if parallel_mode == "row" else in_features,
            out_features=out_features // tp_size if parallel_mode == "column" else out_features,
            parallel_mode=parallel_mode,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel and tp_size > 1,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            save_original_input=save_original_input,
            use_bias=bias,
            return_bias=return_bias,
            weight_names=names_of("weight", num_gemms, single["single_grouped_weight"]),
            bias_names=names_of("bias", num_gemms, single["single_grouped_bias"]),
            **single,
        )
        config = self._config
        weights = [(name,) for name in config.weight_names]
        self._configure(
            _tensors=config.weight_names + config.bias_names,
            _weights=tuple(weights * num_gemms if config.single_grouped_weight else weights),
        )
        self.ub_name = ub_name
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        if delay_wgrad_compute:
            self.wgrad_store = WeightGradStore(delay_wgrad_compute=True)
        options = {"dtype": params_dtype or torch.get_default_dtype(), "device": canonical_device(device)}
        fill = ParameterInit(init_method or default_init_method, get_rng_state_tracker, rng_tracker_name)
        create_parameters(self, fill, options)
        self.register_load_state_dict_pre_hook(load_other_form)
        self._together = TogetherPath(self)
        self._groups: Memory[Any, tuple[LinearSpec, ...]] = Memory(fitting_group_specs, _KEPT)
        self.reset_parameters(defer_init=is_meta(device))

    @property
    def num_products(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One product a group."""
        return self.num_gemms

    def make_grouped_weights(self, defer_init: bool = False) -> None:
        """Turn `weight0`, `weight1`, ... into one parameter `weight` [num_gemms, out_features, in_features].

        The layer then behaves like one constructed with single_grouped_weight=True. Call it before an optimizer holds
        the parameters. A layer whose weights are grouped already is unchanged.

        Args:
            defer_init: Do nothing, because the parameters are still to be allocated.
        """
        if defer_init or self.single_grouped_weight:
            return
        group_weights(self)
        self.numerics.workspaces.clear()
        self._together = TogetherPath(self)

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init=defer_init)
        if not defer_init:
            mark_parameters(self)

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """y [.., out_features], or (y, [bias of each group]) with return_bias.

        m_splits   rows of each group, in order; zeros are allowed, the sum is the number of rows. A tensor on a
                   GPU stays there where the groups go together: nobody checks its sum, and rows past it get
                   undefined results. Where the groups go one by one the host reads it, and waits
        out        contiguous buffer of the output's shape and dtype. The output is written there, and the returned
                   tensor shares its memory
        dgrad_out  contiguous buffer of the input's shape and dtype. The backward pass writes the input gradient there,
                   and the gradient that autograd passes on shares its memory

        Neither buffer may share memory with the input or a parameter. Both may be used again in the next step, and
        may share memory with each other. A buffer belongs to one pass at a time:

        * `out` may be written again after the backward pass of the operations that read the output. Autograd raises
          RuntimeError where a tensor that it saved has been overwritten.
        * `dgrad_out` may be written again when the input gradient has been used. Until then it is the memory of
          `inp.grad`, if `inp` is a leaf, or a term of a sum, if other operations read `inp` too. This is not checked.
          If two backward passes share one `dgrad_out` while the first gradient is in use, both gradients hold the
          second's values. Give each pass its own buffer, or clear `inp.grad` in between.
        """
        m_splits = self._accepted_splits(inp, m_splits)
        if is_first_microbatch is not None and type(is_first_microbatch) is not bool:
            is_first_microbatch = to_bool("is_first_microbatch", is_first_microbatch)
        no_buffers = out is None and dgrad_out is None
        buffers = NO_BUFFERS if no_buffers else self._caller_buffers(inp, out, dgrad_out)
        config, shape = self._config, inp.shape
        flat = inp
        if len(shape) != 2 and shape[-1:] == (config.in_features,):
            flat = inp.reshape(-1, config.in_features)
        if not torch.compiler.is_compiling() and not _replaced.names:
            state = here_in_eager_mode().state
            self.check_repetition(state)
            planned = self._together.plan(flat, m_splits, is_first_microbatch, state)
            if planned is not None:
                weights, biases, groups, spec = planned
                spec = spec if no_buffers else spec._replace(buffers=buffers)
                added = None if config.return_bias else biases
                y = grouped_linear_together(flat, weights, added, groups, spec)
                y = y if flat is inp else y.view(*shape[:-1], config.out_features)
                return (y, self._of_each_group(biases or [])) if config.return_bias else y
        return self._one_by_one(inp, m_splits, is_first_microbatch, buffers)

    def _caller_buffers(self, inp: Tensor, out: Tensor | None, dgrad_out: Tensor | None) -> CallerBuffers:
        """Return the caller's buffers as matrices.

        Raises:
            ValueError: A buffer does not fit its result, or shares memory with the input or a parameter.
        """
        if torch.compiler.is_compiling():
            raise NotImplementedError("out and dgrad_out need eager mode; leave them None in compiled code")
        tensors = self._tensors()
        self._refuse(inp, tensors, (None,))
        made = torch.empty(0, dtype=self.computing_dtype(inp), device=inp.device)
        shape = torch.Size((*inp.shape[:-1], self.out_features))
        buffers = CallerBuffers(
            check_buffers("out", out, shape, made), check_buffers("dgrad_out", dgrad_out, inp.shape, inp)
        )
        names = self._config.weight_names + self._config.bias_names
        operands = [("the input", inp), *zip(names, tensors, strict=True)]
        check_separate("out", buffers.output, operands)
        if inp.requires_grad:
            check_separate("dgrad_out", buffers.grad_input, operands)
        return buffers.counted_apart_from(inp)

    def _one_by_one(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None,
        buffers: CallerBuffers,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        tensors = self._tensors()
        self._refuse(inp, tensors, (is_first_microbatch,))
        rows = tuple(m_splits.tolist()) if isinstance(m_splits, Tensor) else tuple(m_splits)
        flat = inp.reshape(-1, self.in_features)
        if len(rows) != self.num_gemms or sum(rows) != flat.shape[0] or min(rows) < 0:
            raise ValueError(
                f"m_splits={list(rows)} must be {self.num_gemms} numbers >= 0 that add up to the {flat.shape[0]} rows"
            )
        count = len(self._config.weight_names)
        weights: list[Any] = list(tensors[:count])
        spec = self._spec(inp, tensors, rows, is_first_microbatch)
        if is_first_microbatch is not None:
            spec = replace(spec, groups=self._with_cached_weights(spec, weights, is_first_microbatch))
        if buffers is not NO_BUFFERS:
            spec = replace(spec, buffers=buffers)
        dtype = spec.groups[0].dtype
        biases = [bias.to(dtype) for bias in tensors[count:] if bias is not None]
        added: list[Any] = biases if biases and not self.return_bias else [None] * len(rows)
        grouped = _by_name if _replaced.names else grouped_linear
        y = grouped(flat, weights, added, spec)
        y = y.view(*inp.shape[:-1], self.out_features)
        return (y, self._of_each_group(biases)) if self.return_bias else y

    def _of_each_group(self, biases: list[Tensor]) -> list[Tensor]:
        return list(biases[0].unbind(0)) if biases and self.single_grouped_bias else biases

    def _spec(
        self,
        inp: Tensor,
        tensors: tuple[Tensor | None, ...],
        rows: tuple[int, ...],
        is_first_microbatch: bool | None,
    ) -> GroupedLinearSpec:
        """Return the spec of a call whose groups are multiplied one by one.

        The groups' specs do not depend on their numbers of rows, which differ in every call, and are cached.
        """
        state = current()
        self._together.forget_weights(is_first_microbatch)
        products = self._product_quantizers(state)
        active = self.numerics.active
        if not state.enabled or active is None:
            active = ModuleRecipe(products)
        call = self._key(inp, tensors, (is_first_microbatch,), active)
        if torch.compiler.is_compiling():
            begin = functools.partial(traced_update, self, self.tracing_key, state.group)
        else:
            begin = of_the_pass
        update = scale_update(call._replace(begin=begin), call.wants)
        fits = self._fits(products, rows) if state.enabled else (True,) * len(rows)
        if products is active.products and not torch.compiler.is_compiling() and undisturbed():
            kind, shape, *facts = call.x
            groups = self._groups[call._replace(x=(kind, shape[-1:], *facts)), fits]
        else:
            chosen = zip(products, fits, strict=True)
            groups = group_specs(call, tuple([product if fit else UNQUANTIZED for product, fit in chosen]))
        config = self._config
        stacked_bias = config.single_grouped_bias and config.use_bias and not config.return_bias
        return GroupedLinearSpec(
            rows,
            groups,
            call.wants,
            stacked_weight=config.single_grouped_weight,
            stacked_bias=stacked_bias,
            scale_update=update,
        )

    def _fits(self, products: tuple[ProductQuantizers, ...], rows: tuple[int, ...]) -> tuple[bool, ...]:
        """Return for each group whether the format supports its sizes, with one warning where it does not."""
        fits = []
        for product, m in zip(products, rows, strict=True):
            reason = product_refusal(product, m, self.in_features, self.out_features)
            if reason is not None:
                self._warn_once(
                    "group", f"GroupedLinear runs groups in high precision: {reason}; pad their rows"
                )
            fits.append(reason is None)
        return tuple(fits)

    def _with_cached_weights(
        self, spec: GroupedLinearSpec, weights: list[Tensor], first: bool
    ) -> tuple[LinearSpec, ...]:
        members = members_of(weights[0]) if spec.stacked_weight else weights
        return tuple(
            self.with_cached_weight(f"weight{i}", member, group, first)
            for i, (member, group) in enumerate(zip(members, spec.groups, strict=True))
        )

    def _tensors(self) -> tuple[Tensor | None, ...]:
        """All weights, then all biases."""
        weights = [getattr(self, name) for name in self._config.weight_names]
        if not self.use_bias:
            return (*weights, *[None] * len(self._config.bias_names))
        return (*weights, *[getattr(self, name) for name in self._config.bias_names])

    def _accepted_splits(self, inp: Tensor, m_splits: Sequence[int] | Tensor) -> Sequence[int] | Tensor:
        """Return the rows of each group as ints, or as the tensor of whole numbers that was given.

        Raises:
            TypeError: The input is not a dense tensor, or the splits are not whole numbers.
        """
        if not isinstance(inp, Tensor) or inp.layout is not torch.strided:
            check_dense("the input", inp)
        if self._config.use_grouped_tensor:
            check_device_splits(m_splits, inp.device)
        if isinstance(m_splits, Tensor) and m_splits.dim() == 1 and not m_splits.is_floating_point():
            return m_splits
        if isinstance(m_splits, (list, tuple)) and set(map(type, m_splits)) == {int}:
            return m_splits
        return rows_of_groups(m_splits)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )


def _by_name(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], spec: GroupedLinearSpec
) -> Tensor:
    """`grouped_linear` by what stands in this file's names."""
    for group in spec.groups:
        refuse_quantized(group, _replaced.names, "GroupedLinear")
    if spec.buffers is not NO_BUFFERS:
        raise NotImplementedError(
            "out and dgrad_out while a name of GroupedLinear's file is replaced; leave them None"
        )
    if spec.stacked_weight:
        weights = list(weights[0].unbind(0))
    if spec.stacked_bias and biases[0] is not None:
        biases = list(biases[0].unbind(0))
    spec = replace(spec, stacked_weight=False, stacked_bias=False)
    file = sys.modules[__name__]
    return called_by_name(_GroupedLinear, torch.is_grad_enabled(), x, spec, file, *weights, *biases)


_replaced = watched(__name__, {"_GroupedLinear": _GroupedLinear, "general_gemm": general_gemm})
