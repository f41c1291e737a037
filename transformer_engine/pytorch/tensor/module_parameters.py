"""Quantized parameters of modules: plain state dictionaries for tensor files, and dtype conversion.

`plain_state_dict` stores a quantized parameter `weight` under `weight::Float8Tensor.E4M3::_data` and
`weight::Float8Tensor.E4M3::_scale_inv`: the class, the element and the attribute. safetensors and similar formats hold
only tensors; loading restores equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ...common.checks import suggests_keywords
from ..constants import DType
from .grouped_tensor import GroupedTensor
from .quantized_tensor import QuantizedTensor

_BETWEEN = "::"


def plain_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return module.state_dict() with the payload of each quantized tensor as plain tensors.

    The tensors are contiguous and share no memory, as file formats require. Nothing else is copied.

    Args:
        module: A module whose parameters may be quantized.
    """
    plain: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, QuantizedTensor):
            visited: set[int] = set()
            for part, tensor in _parts(value).items():
                shared = tensor.data_ptr() in visited
                visited.add(tensor.data_ptr())
                plain[_BETWEEN.join((name, _kind(value), part))] = (
                    tensor.clone() if shared else tensor.contiguous()
                )
        else:
            plain[name] = value
    return plain


@suggests_keywords
def load_plain_state_dict(
    module: nn.Module, tensors: Mapping[str, Tensor], strict: bool = True
) -> Any:
    """Load a state that `plain_state_dict` returned. Plain values are quantized where the module's parameter is.

    Args:
        module: Module to load into.
        tensors: {name: tensor} from `plain_state_dict`, or plain values.
        strict: As in torch.nn.Module.load_state_dict.

    Raises:
        ValueError: Codes in another format than the parameter, or an incomplete payload. Nothing is loaded.
    """
    current = module.state_dict()
    state: dict[str, Any] = {}
    payloads: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, *rest = key.split(_BETWEEN)
        if rest:
            payloads.setdefault(name, {})[_BETWEEN.join(rest)] = tensor
        else:
            state[name] = tensor
    for name, payload in payloads.items():
        state[name] = _assemble_tensor(name, current.get(name), payload)
    return module.load_state_dict(state, strict=strict)


def _kind(tensor: QuantizedTensor) -> str:
    """Return the class and the element of the codes, which bytes do not contain; for a group, of its members too."""
    if isinstance(tensor, GroupedTensor):
        member = tensor.split_into_quantized_tensors()[0]
        inner = (
            _kind(member)
            if isinstance(member, QuantizedTensor)
            else str(tensor.dtype).rpartition(".")[2]
        )
        return f"{type(tensor).__name__}.{inner}"
    constants = (getattr(tensor, name) for name in tensor.CONSTANTS)
    return ".".join(
        (type(tensor).__name__, *(value.name for value in constants if isinstance(value, DType)))
    )


def _parts(tensor: QuantizedTensor) -> dict[str, Tensor]:
    parts = {part: getattr(tensor, part) for part in tensor.TENSORS}
    return {part: value for part, value in parts.items() if value is not None}


def _assemble_tensor(name: str, current: Any, payload: dict[str, Tensor]) -> Any:
    """Return a tensor like the module's current one, with this payload."""
    kinds = sorted({key.partition(_BETWEEN)[0] for key in payload})
    expected = _kind(current) if isinstance(current, QuantizedTensor) else "plain"
    if kinds != [expected]:
        raise ValueError(
            f"{name} is stored in codes of {', '.join(kinds)}, the module's is {expected}; make the module under "
            "quantized_model_init with the recipe that it was saved under"
        )
    tensors = {key.partition(_BETWEEN)[2]: tensor for key, tensor in payload.items()}
    parts = _parts(current)
    for part, current_part in parts.items():
        part_tensor = tensors.get(part)
        if (
            part_tensor is None
            or part_tensor.shape != current_part.shape
            or part_tensor.dtype != current_part.dtype
        ):
            described = (
                "missing"
                if part_tensor is None
                else f"{part_tensor.dtype} {list(part_tensor.shape)}"
            )
            raise ValueError(
                f"{name}: {part} is {described}, the module's is {current_part.dtype} "
                f"{list(current_part.shape)}; save the "
                "module again with the directions that this one has"
            )
    result: Any = current.detach().clone()
    with torch.no_grad():
        for part in parts:
            getattr(result, part).copy_(tensors[part])
        result.join_claims(None)
    return result


_MARK = "_keeps_quantized_parameters"


def keep_quantized_parameters() -> None:
    """Replace `float`, `half` and `bfloat16` of torch.nn.Module by methods that keep quantized parameters quantized.

    `tensor.float()` dequantizes a quantized tensor, and torch's modules convert parameters through that method. The
    new methods change only the nominal dtype of quantized parameters, and behave the same for every other tensor.
    """

    def conversion(
        dtype: torch.dtype, original: Callable[[nn.Module], nn.Module]
    ) -> Callable[[nn.Module], nn.Module]:
        @wraps(original)
        def convert(self: nn.Module) -> nn.Module:
            if not any(isinstance(tensor, QuantizedTensor) for tensor in self.parameters()):
                return original(self)
            return self._apply(lambda t: t.to(dtype=dtype) if t.is_floating_point() else t)

        setattr(convert, _MARK, True)
        return convert

    for name, dtype in (
        ("float", torch.float32),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
    ):
        original = getattr(nn.Module, name)
        if not hasattr(original, _MARK):
            setattr(nn.Module, name, conversion(dtype, original))
