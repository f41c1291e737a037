"""LinearAttentionBase: settings, tensor parallelism and calls for linear attention modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common.checks import check_option, suggests_keywords
from ....common.numbers import to_bool, to_int
from ...distributed import checkpoint
from ...module.arguments import finite_or_none, head_sizes, size, size_or_none
from ...primitives.attention.call import QKV_FORMATS
from ...primitives.linear_attention import linear_attention
from ...primitives.linear_attention.request import (
    DeltaInputs,
    DeltaResult,
    DeltaSpec,
    Option,
)
from ...runtime import checks
from .inputs import CallLayout, batch_first, call_layout, check_qkv, check_sequences, check_state


class DeltaRule(torch.nn.Module):
    """Recurrence of a linear attention module, without parameters.

    Args:
        rule: Rule name.
        scale: Query factor.
    """

    def __init__(self, rule: str, scale: float) -> None:
        super().__init__()
        self.rule = rule
        self.scale = scale
        # `DeltaSpec` has the scale as text, which compiled graphs store as a constant.
        self._scale = float(scale).hex()

    def forward(self, options: tuple[str, ...], *tensors: Tensor | None) -> DeltaResult:
        """Compute (output [b, s, h, dv], final state or None) from tensors in the order of `DeltaInputs`."""
        inputs = DeltaInputs(*tensors)  # pyright: ignore[reportArgumentType]
        return linear_attention(inputs, DeltaSpec(self.rule, self._scale, options))


class LinearAttentionBase(torch.nn.Module):
    """Linear attention module settings; arguments are as in `GatedDeltaNetAttention`.

    It has no parameters and no state; recipes and autocast have no effect.
    """

    rule: str
    adapter: str  # name of the submodule that computes the recurrence
    sizes: tuple[int, ...] | None = None  # supported head sizes; None: all

    @suggests_keywords
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        qkv_format: str = "sbhd",
        tp_size: int = 1,
        tp_group: Any = None,
        layer_number: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.num_attention_heads = size("num_attention_heads", num_attention_heads)
        kv_channels = head_sizes("kv_channels", kv_channels)
        qk_and_v_sizes = (
            kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        )
        if self.sizes is not None and not set(qk_and_v_sizes) <= set(self.sizes):
            raise ValueError(
                f"kv_channels={kv_channels}; {type(self).__name__} has head sizes {' and '.join(map(str, self.sizes))}"
            )
        check_option("qkv_format", qkv_format, QKV_FORMATS)
        self.kv_channels = kv_channels
        self.qk_head_dim, self.v_head_dim = qk_and_v_sizes
        self.qkv_format = qkv_format
        self.layer_number = size_or_none("layer_number", layer_number) or 1
        scale = finite_or_none("scale", scale)
        self.scale = self.qk_head_dim**-0.5 if scale is None else scale
        self.tp_group_initialized = False
        self.tp_group = None
        self.tp_size = size("tp_size", tp_size)
        if tp_group is not None:
            checks.group_or_none("tp_group", tp_group)
            self.tp_size = torch.distributed.get_world_size(tp_group)
        if tp_group is not None or self.tp_size == 1:
            self.set_tensor_parallel_group(tp_group)
        if self.num_attention_heads % self.tp_size:
            raise ValueError(
                f"tp_size={self.tp_size} does not divide num_attention_heads={num_attention_heads}; choose a divisor"
            )
        self.num_attention_heads_per_partition = self.num_attention_heads // self.tp_size
        self.add_module(self.adapter, DeltaRule(self.rule, self.scale))

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set a plain attribute without nn.Module's search for parameters and modules."""
        object.__setattr__(self, name, value)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel process group. The module communicates nothing: each rank computes its heads."""
        checks.group_or_none("tp_group", tp_group)
        self.tp_group = tp_group
        self.tp_group_initialized = True

    def prepare_forward(self, inp: Tensor, allow_non_contiguous: bool = False) -> Tensor:
        """Begin a forward pass; runs once per call, before the tensors are read.

        Args:
            inp: Input.
            allow_non_contiguous: Return the input unchanged instead of a contiguous copy.

        Raises:
            RuntimeError: `tp_size` requires a tensor-parallel group, and none was set.
        """
        if self.tp_size > 1 and not self.tp_group_initialized:
            raise RuntimeError(
                f"tp_size={self.tp_size}, but there is no group; call set_tensor_parallel_group first"
            )
        return inp if allow_non_contiguous else inp.contiguous()

    def end_forward(self) -> None:
        """End a forward pass; runs once per call, also after an error."""

    def _call_layout(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        qkv_format: str | None,
        updates: tuple[int, ...] = (),
    ) -> CallLayout:
        """Check queries, keys and values, and return the layout of the call."""
        if qkv_format is None:
            qkv_format = self.qkv_format
        else:
            check_option("qkv_format", qkv_format, QKV_FORMATS)
        heads = self.num_attention_heads_per_partition
        layout = call_layout(query, qkv_format, heads, self.qk_head_dim, self.v_head_dim)
        check_qkv(layout, query, key, value, updates)
        return layout

    def _attend(
        self,
        layout: CallLayout,
        inputs: DeltaInputs,
        checkpoint_core_attention: bool,
        options: dict[str, bool],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the output in the layout of the call, and the final state if the options request it.

        Args:
            layout: Layout of the inputs; their gates have been checked.
            inputs: Tensors in that layout.
            checkpoint_core_attention: Compute the recurrence again in the backward pass.
            options: Whether each option is active.
        """
        core = self.get_submodule(self.adapter)
        check_sequences(layout, inputs.q, inputs.cu_seqlens)
        check_state(layout, inputs.q, inputs.initial_state, inputs.cu_seqlens)
        active = tuple([option for option, is_active in options.items() if is_active])
        tensors = batch_first(layout, inputs)
        if to_bool("checkpoint_core_attention", checkpoint_core_attention):
            output, state = checkpoint(core, active, *tensors, use_reentrant=False)
        else:
            output, state = core(active, *tensors)
        output = layout.output(output)
        if Option.FINAL_STATE not in active:
            return output
        assert state is not None
        return output, state


def missing_gates(**gates: Tensor | None) -> None:
    """Raise ValueError if a gate is None."""
    missing = [name for name, gate in gates.items() if gate is None]
    if missing:
        raise ValueError(
            f"{' and '.join(f'{name}=None' for name in missing)}; pass the gates of each token"
        )


def flags(**values: Any) -> dict[str, bool]:
    """Return flags as bools, by their names."""
    return {name: to_bool(name, value) for name, value in values.items()}


def householders(value: Any) -> int:
    """Return the Householder update count, at least 1."""
    return to_int("num_householder", value, 1)
