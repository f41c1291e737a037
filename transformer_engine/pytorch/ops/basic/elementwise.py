"""Operations without parameters: Identity, Reshape, ConstantScale, Dropout, Quantize."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ....common.numbers import to_bool, to_float, to_int
from ...quantization import QuantizerRole
from ..pass_operation import PassOperation
from ..passes.contract import IdentityPasses, InputFacts, OperationCall, OperationPasses
from ..passes.elementwise import DropoutPasses, QuantizePasses, ReshapePasses, ScalePasses


class Identity(PassOperation):
    """y = x."""

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        return IdentityPasses(), x


class Reshape(PassOperation):
    """y = x.reshape(shape).

    Args:
        shape: The new shape; one dimension may be -1.
    """

    _shown = {"shape": "_shape"}

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self._shape = tuple([to_int("shape", size) for size in shape])

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        shape = list(self._shape)
        product = math.prod([size for size in shape if size != -1])
        total = math.prod(x.shape)
        fits = shape.count(-1) <= 1 and (
            total % product == 0 if -1 in shape and product else total == product
        )
        if not fits:
            raise ValueError(
                f"shape={list(self._shape)} does not hold the {total} elements of {list(x.shape)}"
            )
        if -1 in shape:
            shape[shape.index(-1)] = total // product if product else 0
        return ReshapePasses(self._shape, x.shape), InputFacts(tuple(shape), x.dtype, x.device)


class ConstantScale(PassOperation):
    """y = x * scale.

    Args:
        scale: The factor.
    """

    _shown = {"scale": "scale"}

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = to_float("scale", scale)

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        return ScalePasses(float(self.scale)), x._replace(quantized=False)


class Dropout(PassOperation):
    """y = x / (1 - p) where an element is kept, else 0; the identity in evaluation mode.

    Args:
        p: Probability that an element is dropped.

    Raises:
        ValueError: p is not in [0, 1].
    """

    _shown = {"p": "dropout_probability"}

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout_probability = to_float("p", p)
        if not 0.0 <= self.dropout_probability <= 1.0:
            raise ValueError(f"p={p} is not a probability; give a number in [0, 1]")

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        if not self.training or self.dropout_probability == 0.0:
            return IdentityPasses(), x
        return DropoutPasses(self.dropout_probability), x._replace(quantized=False)


class Quantize(PassOperation):
    """Quantize the output, the input gradient, or both; the identity without a recipe.

    A torch.compile graph passes bare storages between operations. A chain returns its output and
    input gradient dequantized there.

    Args:
        forward: Quantize the output.
        backward: Quantize the input gradient, unless the recipe has a `backward_override`.
    """

    _shown = {"forward": "_quantize_forward", "backward": "_quantize_backward"}

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward, self._quantize_backward = (
            to_bool("forward", forward),
            to_bool("backward", backward),
        )

    def num_quantizers(self, mode: str) -> int:
        return int(self._quantize_forward if mode == "forward" else self._quantize_backward)

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole | None]:
        tensor = "input" if mode == "forward" else "grad_output"
        return [QuantizerRole("", tensor, "")] * self.num_quantizers(mode)

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        recipe = call.state.recipe if call.state.enabled else None
        if recipe is None:
            return IdentityPasses(), x
        override = getattr(recipe, "backward_override", None)
        output = gradient = None
        if self._quantize_forward:
            output = self.forward_quantizers()[
                0
            ].copy()  # calls without a backward pass have other usages
            # A later product with a trained weight reads columns even if no gradient reaches this operation.
            output.set_usage(rowwise=True, columnwise=call.records and override is None)
            output.internal = call.traced
        if self._quantize_backward and override is None and call.saves:
            gradient = self._quantizers["backward"][0].copy()
            gradient.set_usage(rowwise=True, columnwise=True)
            gradient.internal = call.traced
        return QuantizePasses(output, gradient), x._replace(
            quantized=x.quantized or output is not None
        )
