"""Methods that a module derived from TransformerEngineBaseModule calls around its own forward and backward.

```python
x = self.prepare_forward(x, num_gemms=2)  # or: with self.prepare_forward_ctx(x, num_gemms=2) as x:
if self.fp8:
    x_codes = self.quantizers["scaling_fwd"][FP8FwdTensorIdx.GEMM1_INPUT](x)
    w_codes = self.get_weight_workspace(tensor=self.weight, quantizer=...)
...  # general_gemm, fused_attn_fwd, the library's autograd function
self.end_forward()
```

This package's layers do not use these methods: they resolve a spec once and cache it.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import with_article
from ...common.recipe import Recipe
from ..distributed.collectives import gather_along_first_dim
from ..distributed.recompute import (
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from ..primitives.column_sums import column_sums
from ..quantization import QuantizerRole
from ..quantization.autocast import current
from ..quantization.global_state import write_states
from ..quantization.recompute_states import replay_values
from ..runtime.device import autocast_dtype, canonical_device
from ..tensor.quantized_tensor import QuantizedTensorStorage
from ..tensor.quantizer import Quantizer
from . import loading
from .numerics import Numerics, state_flag
from .parameters import ParameterInit
from .specs import common_dtype


def _values(states: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """Scale and history per delayed-scaling state."""
    return [(state.scale, state.amax_history) for state in states]


class ForwardInterface(torch.nn.Module):
    """Methods for hand-written forward passes; see `TransformerEngineBaseModule`."""

    num_products: int
    products_grow: bool
    numerics: Numerics
    param_init_meta: dict[str, ParameterInit]
    tp_size: int
    tp_group_initialized: bool
    primary_weights_in_fp8: bool
    _config: Any
    tracing_key: str
    _warned: set[str]
    _present_scales: list[
        list[tuple[Tensor, Tensor]]
    ]  # while second runs use the scales from their first runs
    _model_init_recipe: Recipe | None
    _input_device: torch.device | None = None  # from the last input, in a module without parameters

    fp8 = state_flag("enabled", "Whether the last call was under an autocast that quantizes.")
    fp8_calibration = state_flag("calibrating", "Was it under one that only records?")

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set a plain attribute without nn.Module's search for parameters and modules."""
        object.__setattr__(self, name, value)

    def computing_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which a layer computes: torch.autocast's if it is active, otherwise the input's.

        Raises:
            TypeError: Input and parameter dtypes differ.
        """
        named = [
            (name, param.dtype) for name, param in self._parameters.items() if param is not None
        ]
        return common_dtype(x.dtype, autocast_dtype(x.device.type), named)

    def get_quantizer_roles(
        self, *, fwd: bool, num_quantizers: int
    ) -> Sequence[QuantizerRole | None] | None:
        """Return the role per slot in one direction, for a custom recipe's factory; None: unknown."""
        return None

    def prepare_forward(
        self,
        inp: Tensor,
        num_gemms: int = 1,
        allow_non_contiguous: bool = False,
        allow_different_data_and_param_types: bool = False,
    ) -> Tensor:
        """Prepare a forward pass and return the contiguous input; see `end_forward`.

        Sets `fp8`, `fp8_calibration`, `activation_dtype` and `quantizers` from the active autocast.

        Args:
            inp: Input.
            num_gemms: Product count that needs quantizers from the active recipe.
            allow_non_contiguous: Return the input unchanged instead of a contiguous copy.
            allow_different_data_and_param_types: Parameter and input dtypes may differ.

        Raises:
            TypeError: Input and parameter dtypes differ.
            RuntimeError: tp_size requires a tensor-parallel group, and none is set.
        """
        if not isinstance(inp, Tensor):
            raise TypeError(
                f"{type(self).__name__} takes a tensor, inp is {with_article(type(inp))}"
            )
        recomputing = in_fp8_activation_recompute_phase()
        if not (recomputing and self.fp8):
            if self.tp_size > 1 and not self.tp_group_initialized:
                raise RuntimeError(
                    f"tp_size={self.tp_size}, but there is no group; call set_tensor_parallel_group first"
                )
            self.set_activation_dtype(inp, allow_different_data_and_param_types)
            self.init_fp8_metadata(num_gemms)
        if self.fp8 and is_fp8_activation_recompute_enabled() and (recomputing or self.training):
            self._exchange_scales()
        return inp if allow_non_contiguous else inp.contiguous()

    def _exchange_scales(self) -> None:
        """Record scales and histories in the first run of a recomputed function, and copy them in in the second.

        The record belongs to the function's call, so that threads and backward passes in any order stay separate.
        """
        states = self.numerics.delayed_states("scaling_fwd")
        if not states:
            return
        first = replay_values(type(self).__name__, self.tracing_key, _values(states))
        if first is None:
            return
        self._present_scales.append(
            [(scale.clone(), history.clone()) for scale, history in _values(states)]
        )
        write_states(states, first)

    def end_forward(self) -> None:
        """End a forward pass: restore the current scales if `prepare_forward` replaced them for a recomputation."""
        if self._present_scales and in_fp8_activation_recompute_phase():
            write_states(self.numerics.delayed_states("scaling_fwd"), self._present_scales.pop())

    @contextmanager
    def prepare_forward_ctx(
        self,
        inp: Tensor,
        num_gemms: int = 1,
        allow_non_contiguous: bool = False,
        allow_different_data_and_param_types: bool = False,
    ) -> Generator[Tensor, None, None]:
        """Call `prepare_forward` on entry and `end_forward` on exit, also after an exception."""
        prepared = self.prepare_forward(
            inp, num_gemms, allow_non_contiguous, allow_different_data_and_param_types
        )
        try:
            yield prepared
        finally:
            self.end_forward()

    def set_activation_dtype(
        self, inp: Tensor, allow_different_data_and_param_types: bool = False
    ) -> None:
        """Set `activation_dtype` to torch.autocast's dtype if it is active, otherwise to the input's.

        Raises:
            TypeError: Input and parameter dtypes differ, and this is not allowed.
        """
        if allow_different_data_and_param_types and autocast_dtype(inp.device.type) is None:
            dtype = inp.dtype
        else:
            dtype = self.computing_dtype(inp)
        self.fast_setattr("activation_dtype", dtype)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Create quantizers for num_gemms products by the active autocast; the product count never decreases."""
        self._extend_to(num_gemms)
        state = current()
        self.fast_setattr("fp8_parameters", self.primary_weights_in_fp8)
        self.numerics.state = state
        if state.enabled or state.calibrating:
            self.numerics.of_call(self, state)
            self._check_parameter_recipe(state.recipe)

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """Create states and quantizers in both directions for a recipe, unless the present ones match it."""
        self.numerics.renew(self, recipe, self.numerics.meta["fp8_group"])

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        """Create the state and quantizers for one direction: fp8_meta["scaling_fwd"] or ["scaling_bwd"]."""
        self.numerics.renew_direction(self, fwd, recipe)
        self.numerics.forget()  # the next forward pass combines both directions

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        """Whether quantizers exist. Setting it to False recreates them in the next forward pass or set_extra_state."""
        return self.numerics.cached.recipe is not None

    @fp8_meta_tensors_initialized.setter
    def fp8_meta_tensors_initialized(self, initialized: bool) -> None:
        if not initialized:
            self.numerics.forget()
        elif self.numerics.cached.recipe is None:
            raise ValueError(
                f"{type(self).__name__} has no quantizers yet; call init_fp8_meta_tensors(recipe) instead of "
                "setting fp8_meta_tensors_initialized=True"
            )

    def get_fp8_meta_tensors(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Copy (scale, amax_history) per delayed-scaling state, by direction."""
        return {
            key: [
                (state.scale.clone(), state.amax_history.clone())
                for state in self.numerics.delayed_states(key)
            ]
            for key in ("scaling_fwd", "scaling_bwd")
        }

    def reset_fp8_meta_tensors(
        self,
        fp8_meta_tensors: dict[str, list[tuple[Tensor, Tensor]]] | None = None,
    ) -> None:
        """Restore scales and histories in place, from `get_fp8_meta_tensors` or to their initial values."""
        for key in ("scaling_fwd", "scaling_bwd"):
            for i, state in enumerate(self.numerics.delayed_states(key)):
                if fp8_meta_tensors is None:
                    state.scale.fill_(1.0)
                    state.amax_history.zero_()
                else:
                    scale, history = fp8_meta_tensors[key][i]
                    state.scale.copy_(scale)
                    state.load_history(history)

    def adjust_amax_history_length(self, length: int, fwd: bool | None = None) -> None:
        """Truncate or zero-pad the histories in one direction, or in both, to `length` steps."""
        if length < 1:
            raise ValueError(f"length={length} < 1; a history keeps one step or more")
        for forward, key in ((True, "scaling_fwd"), (False, "scaling_bwd")):
            if fwd is None or fwd == forward:
                for state in self.numerics.delayed_states(key):
                    state.resize_history(length)

    def get_weight_workspace(
        self,
        *,
        tensor: Tensor | None = None,
        quantizer: Quantizer | None = None,
        cache_name: str | None = None,
        update_workspace: bool = True,
        skip_update_flag: Tensor | None = None,
        fsdp_group: Any = None,
        workspace_dtype: torch.dtype | None = None,
    ) -> QuantizedTensorStorage:
        """Return a weight as quantized by its quantizer, cached under cache_name for later microbatches in a step.

        Args:
            tensor: The weight. A quantized parameter is returned itself, in the quantizer's directions.
            quantizer: Weight quantizer.
            cache_name: Cache key; None: not cached.
            update_workspace: Quantize again. With False, the cached tensor is returned if it has the quantizer's
                directions.
            skip_update_flag: float32 [1] on the device. If it is set, the cached tensor is unchanged.
            fsdp_group: Unsupported; must be None.
            workspace_dtype: Nominal dtype for a new workspace.
        """
        if fsdp_group is not None:
            raise NotImplementedError(
                "fsdp_group: weights are not scattered between passes; shard with FSDP2's fully_shard and leave it None"
            )
        if isinstance(tensor, QuantizedTensorStorage):
            if quantizer is not None:
                tensor.update_usage(
                    quantizer.rowwise_usage or None, quantizer.columnwise_usage or None
                )
            return tensor
        workspace = None if cache_name is None else self.numerics.workspaces.get(cache_name)
        if workspace is not None and quantizer is not None:
            usages = workspace.get_usages()
            if (quantizer.rowwise_usage and not usages["rowwise"]) or (
                quantizer.columnwise_usage and not usages["columnwise"]
            ):
                workspace = None  # it lacks a direction that the quantizer now requests
        if workspace is not None and not update_workspace and skip_update_flag is None:
            return workspace
        if tensor is None or quantizer is None:
            raise ValueError(
                f"tensor or quantizer is missing, and no workspace is kept under cache_name={cache_name!r}; give both"
            )
        if workspace is not None:
            quantizer.update_quantized(tensor, workspace, noop_flag=skip_update_flag)
            return workspace
        with torch.no_grad():
            quantized: Any = quantizer.quantize(tensor.detach(), dtype=workspace_dtype)
        if cache_name is not None:
            self.numerics.workspaces[cache_name] = quantized
        return quantized

    @staticmethod
    def grad_output_preprocess(
        ctx: Any, grad_output: Tensor, row_parallel_mode: bool, quantizer: Quantizer | None
    ) -> tuple[Any, Tensor | None]:
        """Return (dy [rows, N] for backward-pass products, its sum over rows [N] or None).

        Args:
            ctx: With `fp8`, dy is quantized by `quantizer`. With `use_bias`, the sum is computed. `sequence_parallel`
                and `tp_group`: dy is a shard, which a row-parallel layer gathers.
            grad_output: Output gradient [.., N].
            row_parallel_mode: Whether the layer is row-parallel.
            quantizer: Quantizer for dy, or None.
        """
        matrix = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
        if row_parallel_mode and ctx.sequence_parallel:
            matrix, _ = gather_along_first_dim(matrix, ctx.tp_group)
        grad_bias = column_sums(matrix, matrix.dtype) if ctx.use_bias else None
        if not ctx.fp8 or quantizer is None:
            return matrix, grad_bias
        return quantizer.quantize(matrix), grad_bias

    def _state_device(self) -> torch.device:
        """Return the device for scales and histories: the parameters' device, once they are allocated."""
        for param in self.parameters(recurse=False):
            return canonical_device("cuda") if param.is_meta else param.device
        return canonical_device("cuda") if self._input_device is None else self._input_device

    def follow_device(self, device: torch.device) -> None:
        """Move scales and histories in a module without parameters to the input device.

        Args:
            device: Input device.
        """
        if device != self._input_device:
            moved = device != self._state_device()
            self._input_device = device
            if moved:
                self.numerics.forget()

    def _check_parameter_recipe(self, recipe: Recipe | None) -> None:
        """Raise RuntimeError if quantized parameters belong to another recipe kind."""
        if self._config.primary_weights_in_fp8 and loading.quantized_otherwise(self, recipe):
            raise RuntimeError(
                f"Recipe mismatch for {type(self).__name__}: its parameters were quantized with "
                f"{type(self._model_init_recipe).__name__}, the active recipe is {type(recipe).__name__}; "
                "use the same recipe class in quantized_model_init and autocast"
            )

    def _extend_to(self, products: int | None) -> None:
        if products is not None and products > self.num_products:
            self.num_products = products
            self.numerics.forget()

    def _warn_once(self, key: str, message: str) -> None:
        if torch.compiler.is_compiling() or key in self._warned:
            return
        self._warned.add(key)
        warnings.warn(message, stacklevel=3)
