"""What LayerNorm and RMSNorm share: parameters, their first values, and the checks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compat.argument_orders import declare_call
from ..functions import exported
from ..functions.norm import normalize
from ..functions.normalization import Norm
from ..ops.basic.normalization import (
    NormalizationOperation,
    accept_margin,
    environment_margins,
    margins_by_stage,
)
from ..runtime.checks import is_distributed, same_device, tensor
from ..runtime.device import autocast_dtype, canonical_device
from ..runtime.tracing import export_mode
from .arguments import accepts, shape_or_none
from .base import TransformerEngineBaseModule
from .config import Config, configure_class
from .loading import EXTRA_STATE
from .local_shards import normalized_shards
from .parameters import ParameterInit, get_parameter_value


@dataclass(frozen=True, eq=False)
class NormalizationConfig(Config):
    normalized_shape: tuple[int, ...] = ()
    eps: float = 1e-5
    zero_centered_gamma: bool = False
    sequence_parallel: bool | None = None


def _write_setting(module: Normalization, name: str, value: Any) -> None:
    if "_norm" not in module.__dict__:
        return  # the constructor has yet to run
    if name in ("eps", "zero_centered_gamma"):
        module._norm = Norm(module.kind, module.eps, module.zero_centered_gamma)
    elif name == "sequence_parallel":
        module._mark_parameters()


def margin_property(stage: str) -> property:
    """Return a property for one sm_margin stage, under the attribute name from earlier releases."""

    def read(self: Normalization) -> int:
        return self._sm_margins[stage]

    def write(self: Normalization, margin: int) -> None:
        self._sm_margins[stage] = accept_margin("sm_margin", {**self._sm_margins, stage: margin})[  # pyright: ignore[reportIndexIssue]
            stage
        ]

    return property(read, write)


@configure_class(NormalizationConfig, fixed=frozenset({"normalized_shape"}), written=_write_setting)
class Normalization(NormalizationOperation):
    """y = normalize(x) * gamma (+ beta) over the last dimensions of x, gamma = weight or 1 + weight.

    Subclasses define the norm kind and whether there is a bias. `sm_margin` is stored and has no
    effect. In a `te.ops.Sequential` the module is an operation; by itself it runs without a fuser.
    """

    # A norm quantizes nothing, so its state dict holds parameters only.
    get_extra_state = torch.nn.Module.get_extra_state  # pyright: ignore[reportAssignmentType]
    set_extra_state = torch.nn.Module.set_extra_state  # pyright: ignore[reportAssignmentType]

    kind: str
    has_bias: bool
    _config: NormalizationConfig
    normalized_shape: tuple[int, ...]
    eps: float
    zero_centered_gamma: bool
    sequence_parallel: bool | None

    @accepts(hidden_size=shape_or_none, normalized_shape=shape_or_none, sm_margin=accept_margin)
    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = "cuda",
        dtype: torch.dtype | None = None,
        sm_margin: int | Mapping[str, int] = 0,
    ) -> None:
        NormalizationOperation.__init__(self)
        shape = _take_renamed("hidden_size", hidden_size, "normalized_shape", normalized_shape)
        dtype = _take_renamed("params_dtype", params_dtype, "dtype", dtype)
        if shape is None:
            raise ValueError(
                f"{type(self).__name__} has normalized_shape=None; give an int, or several"
            )
        self._config = NormalizationConfig(
            normalized_shape=shape,  # pyright: ignore[reportArgumentType]  # a tuple, by `shape_or_none`
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            sequence_parallel=sequence_parallel,
        )
        self._norm = Norm(self.kind, eps, zero_centered_gamma)
        self._sm_margins = margins_by_stage(sm_margin)
        self._create_parameters(canonical_device(device), dtype)
        self._mark_parameters()
        if not self.weight.is_meta:
            self.reset_parameters()

    def _mark_parameters(self) -> None:
        """Mark whether the gradients are summed over ranks; again on reset, because copies lose the attributes."""
        if self.sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = self.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """gamma = 1, beta = 0; parameters on the meta device are allocated first, keeping their attributes.

        Args:
            defer_init: Deprecated; create the module with device="meta". True does nothing: the parameters keep their
                (meta) storage until a later call.
        """
        if defer_init is not None:
            warnings.warn(
                'defer_init of reset_parameters is deprecated; create the module with device="meta"',
                DeprecationWarning,
                stacklevel=2,
            )
        if defer_init:
            return
        super().reset_parameters()
        self._mark_parameters()

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        # The original's norms keep an empty extra state.
        state_dict.pop(prefix + EXTRA_STATE, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, input: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the normalized input, in torch.autocast's dtype if it is active, otherwise in the input's."""
        weight, bias = get_parameter_value(self, "weight"), get_parameter_value(self, "bias")
        if is_distributed(weight) or is_distributed(input):
            kind, features = type(self).__name__, len(self.normalized_shape)
            return normalized_shards(kind, self._compute_output, input, weight, bias, features)
        return self._compute_output(input, weight, bias)

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]

        def fast_setattr(self, name: str, value: Any) -> None: ...

    _own_forward = forward

    def _compute_output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._check(input, weight)
        dtype = autocast_dtype(input.device.type)
        if dtype is not None and dtype != input.dtype:
            input = input.to(dtype)
        if export_mode.onnx:
            return exported.normalize(input, weight, bias, self._norm)
        return normalize(input, weight, bias, self._norm)

    def _check(self, input: Tensor, weight: Tensor) -> None:
        name, shape = type(self).__name__, self.normalized_shape
        if not isinstance(input, Tensor):
            tensor("the input", input)
        if input.shape[-len(shape) :] != shape:
            raise ValueError(
                f"{name} normalizes the last dimensions {shape}, and the input is {tuple(input.shape)}; "
                "reshape the input or set normalized_shape"
            )
        if not input.dtype.is_floating_point:
            raise TypeError(
                f"{name} takes floating-point inputs, not {input.dtype}; convert the input"
            )
        if weight.device != input.device:
            if weight.is_meta:
                raise RuntimeError(
                    f"the parameters of {name} are on the meta device; call reset_parameters() first"
                )
            same_device("the input", input, f"{name}.weight", weight.device)

    fwd_ln_sm_margin = margin_property("forward")
    bwd_ln_sm_margin = margin_property("backward")
    inf_ln_sm_margin = margin_property("inference")


def _take_renamed(old_name: str, old, new_name: str, new):
    """Return the value given under a keyword's old or new name; raise ValueError if both are given."""
    if old is None:
        return new
    if new is not None:
        raise ValueError(f"{old_name} is the old name of {new_name}; give {new_name} only")
    warnings.warn(f"{old_name} is deprecated; use {new_name}", DeprecationWarning, stacklevel=5)
    return old


def register_norm_parameters(
    module: TransformerEngineBaseModule,
    features: int,
    normalization: str,
    zero_centered: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Register layer_norm_weight [features], initially factor 1, and for LayerNorm layer_norm_bias, zeros."""
    margins = environment_margins()
    for stage, short in (("forward", "fwd"), ("backward", "bwd"), ("inference", "inf")):
        setattr(module, f"{short}_ln_sm_margin", margins[stage])  # attributes that callers read
    gamma = torch.nn.Parameter(torch.empty(features, dtype=dtype, device=device))
    fill = torch.nn.init.zeros_ if zero_centered else torch.nn.init.ones_
    module.register_parameter("layer_norm_weight", gamma, ParameterInit(fill))
    if normalization == "RMSNorm":
        module.register_parameter("layer_norm_bias", None)
        mark_norm_parameters(module)
        return
    beta = torch.nn.Parameter(torch.empty(features, dtype=dtype, device=device))
    module.register_parameter("layer_norm_bias", beta, ParameterInit(torch.nn.init.zeros_))
    mark_norm_parameters(module)


def mark_norm_parameters(module: TransformerEngineBaseModule) -> None:
    """Mark whether the gamma and beta gradients are summed over sequence-parallel ranks.

    Again whenever they are reset: a parameter copy has no attributes.
    """
    for name in ("layer_norm_weight", "layer_norm_bias"):
        parameter = module._parameters[name]
        if parameter is not None:
            parameter.sequence_parallel = module.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
