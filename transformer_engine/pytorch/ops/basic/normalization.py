"""LayerNorm, RMSNorm and L2Normalization as operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....common import env
from ....common.numbers import to_bool, to_float, to_int
from ...functions.normalization import Norm
from ...runtime.device import canonical_device, is_meta
from ...runtime.warn_once import warn_once
from ..pass_operation import PassOperation
from ..passes.contract import InputFacts, OperationCall, OperationPasses
from ..passes.normalization import L2Passes, NormPasses

STAGES = ("forward", "backward", "inference")
_VARIABLES = (
    "NVTE_FWD_LAYERNORM_SM_MARGIN",
    "NVTE_BWD_LAYERNORM_SM_MARGIN",
    "NVTE_INF_LAYERNORM_SM_MARGIN",
)


def environment_margins() -> dict[str, int]:
    """Return the margin per stage from the environment; 0 if it is not set."""
    return {stage: int(env.get(name) or 0) for stage, name in zip(STAGES, _VARIABLES, strict=True)}


def accept_margin(name: str, value: Any) -> int | dict[str, int]:
    """Return a multiprocessor count, or one per stage, with a warning that any but 0 has no effect."""
    if isinstance(value, Mapping):
        if set(value) != set(STAGES):
            raise ValueError(f"{name}={dict(value)}; give an int or all of {', '.join(STAGES)}")
        found: int | dict[str, int] = {
            stage: to_int(f"{name}[{stage!r}]", margin, 0) for stage, margin in value.items()
        }
    else:
        found = to_int(name, value, 0)
    if any(found.values()) if isinstance(found, dict) else found:
        warn_once(
            name,
            f"{name}={value!r} has no effect: the kernels of LayerNorm and RMSNorm use all multiprocessors, with the "
            "same results. Leave it 0",
        )
    return found


def margins_by_stage(margin: int | Mapping[str, int]) -> dict[str, int]:
    """Return one margin per stage; an environment variable that is not 0 takes precedence."""
    margins = dict(margin) if isinstance(margin, Mapping) else dict.fromkeys(STAGES, margin)
    return margins | {stage: found for stage, found in environment_margins().items() if found}


class NormalizationOperation(PassOperation):
    """Base of LayerNorm and RMSNorm: parameters `weight` and, for LayerNorm, `bias` of the normalized dimensions.

    Derived classes have the attributes of the equation: `kind`, `eps` and `zero_centered_gamma`.
    """

    kind: str
    has_bias: bool
    parameter_names = ("weight", "bias")
    weight: Tensor
    bias: Tensor | None
    normalized_shape: tuple[int, ...]
    eps: float
    zero_centered_gamma: bool

    def required_parameters(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.has_bias else ("weight",)

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        shape, count = tuple(self.weight.shape), self.weight.dim()
        if x.shape[-count:] != shape:
            raise ValueError(
                f"{type(self).__name__} normalizes the last dimensions {shape}, and the input is {x.shape}; reshape "
                "the input or change normalized_shape"
            )
        norm = Norm(self.kind, self.eps, self.zero_centered_gamma)
        dtype = call.autocast or x.dtype
        convert = None if dtype == x.dtype else dtype
        result = NormPasses(norm, shape, convert, None if convert is None else x.dtype)
        return result, InputFacts(x.shape, dtype, x.device)

    def _create_parameters(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Register uninitialized parameters."""
        for name in self.parameter_names:
            parameter = None
            if name in self.required_parameters():
                values = torch.empty(
                    self.normalized_shape, device=device, dtype=dtype or torch.get_default_dtype()
                )
                parameter = torch.nn.Parameter(values)
            self.register_parameter(name, parameter)

    def reset_parameters(self) -> None:
        """Allocate parameters on the meta device; set gamma to 1 and beta to 0."""
        self.allocate_parameters()
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class _Normalization(NormalizationOperation):
    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | Mapping[str, int] = 0,
    ) -> None:
        super().__init__()
        sizes = normalized_shape if isinstance(normalized_shape, Iterable) else (normalized_shape,)
        self.normalized_shape = tuple([to_int("normalized_shape", size, 1) for size in sizes])
        self.eps = to_float("eps", eps)
        self.zero_centered_gamma = to_bool("zero_centered_gamma", zero_centered_gamma)
        self._sm_margins = margins_by_stage(accept_margin("sm_margin", sm_margin))
        target_device = torch.device("meta") if is_meta(device) else canonical_device(device)
        self._create_parameters(target_device, dtype)
        if not self.weight.is_meta:
            self.reset_parameters()


class LayerNorm(_Normalization):
    """y = (x - E[x]) / sqrt(Var[x] + eps) * gamma + beta over the last dimensions (arXiv:1607.06450).

    Args:
        normalized_shape: Last input dimensions, an int for one.
        eps: Added to the variance.
        device: Parameter device, by default the GPU if there is one; "meta" allocates them in the
            first forward pass.
        dtype: Parameter dtype, by default torch's default dtype.
        zero_centered_gamma: gamma = 1 + weight, with the weight initialized to 0.
        sm_margin: Accepted for compatibility, without effect.
    """

    kind = "LayerNorm"
    has_bias = True


class RMSNorm(_Normalization):
    """y = x / sqrt(E[x^2] + eps) * gamma over the last dimensions (arXiv:1910.07467).

    Args:
        normalized_shape: Last input dimensions, an int for one.
        eps: Added to the mean square.
        device: Weight device, by default the GPU if there is one; "meta" allocates it in the first forward pass.
        dtype: Weight dtype, by default torch's default dtype.
        zero_centered_gamma: gamma = 1 + weight, with the weight initialized to 0.
        sm_margin: Accepted for compatibility, without effect.
    """

    kind = "RMSNorm"
    has_bias = False


class L2Normalization(PassOperation):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension.

    Args:
        eps: Added to the sum.
        seq_length: Accepted for compatibility, without effect.
        micro_batch_size: Accepted for compatibility, without effect.
    """

    _shown = {"eps": "eps"}

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.eps = to_float("eps", eps)

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        return L2Passes(self.eps), x._replace(quantized=False)
