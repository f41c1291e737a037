"""Operations without parameters: Identity, Reshape, ConstantScale, Dropout, Quantize."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ....common.numbers import to_bool, to_float, to_int
from ....common.passes.step import Step
from ....common.passes.vocabulary import DropoutSettings, Named
from ...quantization import QuantizerRole
from ..chain import ChainEnvironment, InputFacts, OperationCall
from ..pass_builder import BackwardInputs, BackwardPart, Contribution, ForwardPart, PassBuilder, Value
from ..step_operation import StepOperation


class Identity(StepOperation):
    """y = x."""

    def contribute(
        self, name: str, x: InputFacts, call: OperationCall, environment: ChainEnvironment
    ) -> tuple[Contribution, InputFacts]:
        return Contribution(), x


@dataclass(frozen=True)
class ReshapeContribution(Contribution):
    """Steps of Reshape."""

    shape: tuple[int, ...]

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        x = steps.shaped(x)
        before = steps.one("shape", (x.name,), f"{name}.before")
        return ForwardPart(Value(steps.one("to_shape", (x.name,), f"{name}.y", self.shape)), (before,))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        gradient = dy.name if dy.quantized else steps.shaped(dy).name
        dx = steps.one("reshape", (gradient, kept.saved[0]), f"{name}.dx")
        return BackwardPart(Value(dx, None, dy.quantized))


class Reshape(StepOperation):
    """y = x.reshape(shape).

    Args:
        shape: The new shape; one dimension may be -1.
    """

    _shown = {"shape": "_shape"}

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self._shape = tuple([to_int("shape", size) for size in shape])

    def contribute(
        self, name: str, x: InputFacts, call: OperationCall, environment: ChainEnvironment
    ) -> tuple[Contribution, InputFacts]:
        shape = list(self._shape)
        known = math.prod([size for size in shape if size != -1])
        total = math.prod(x.shape)
        fits = shape.count(-1) <= 1 and (total % known == 0 if -1 in shape and known else total == known)
        if not fits:
            raise ValueError(
                f"shape={list(self._shape)} does not hold the {total} elements of {list(x.shape)}"
            )
        if -1 in shape:
            shape[shape.index(-1)] = total // known if known else 0
        return ReshapeContribution(self._shape), InputFacts(tuple(shape), x.dtype, x.device)


@dataclass(frozen=True)
class ScaleContribution(Contribution):
    """Steps of ConstantScale."""

    scale: float

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        x = steps.values(x)
        return ForwardPart(Value(steps.one("constant_scale", (x.name,), f"{name}.y", self.scale), x.leading))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        dy = steps.values(dy)
        dx = steps.one("constant_scale", (dy.name,), f"{name}.dx", self.scale)
        return BackwardPart(Value(dx, dy.leading))


class ConstantScale(StepOperation):
    """y = x * scale.

    Args:
        scale: The factor.
    """

    _shown = {"scale": "scale"}

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = to_float("scale", scale)

    def contribute(
        self, name: str, x: InputFacts, call: OperationCall, environment: ChainEnvironment
    ) -> tuple[Contribution, InputFacts]:
        return ScaleContribution(float(self.scale)), x._replace(quantized=False)


@dataclass(frozen=True)
class DropoutContribution(Contribution):
    """Steps of Dropout."""

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        x = steps.values(x)
        y, mask = f"{name}.y", f"{name}.mask"
        steps.steps.append(Step("dropout", (x.name,), (y, mask), DropoutSettings(name)))
        return ForwardPart(Value(y, x.leading), (mask,))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        dy = steps.values(dy)
        dx = steps.one("dropout_backward", (dy.name, kept.saved[0]), f"{name}.dx", DropoutSettings(name))
        return BackwardPart(Value(dx, dy.leading))


class Dropout(StepOperation):
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

    def contribute(
        self, name: str, x: InputFacts, call: OperationCall, environment: ChainEnvironment
    ) -> tuple[Contribution, InputFacts]:
        if not self.training or self.dropout_probability == 0.0:
            return Contribution(), x
        environment.objects[name, "p"] = self.dropout_probability
        return DropoutContribution(), x._replace(quantized=False)


@dataclass(frozen=True)
class QuantizeContribution(Contribution):
    """Steps of Quantize."""

    output: bool
    gradient: bool

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        if not self.output or x.quantized:
            return ForwardPart(x)
        x = steps.shaped(x)
        y = steps.one("quantize_values", (x.name,), f"{name}.y", Named(name, "output"))
        return ForwardPart(Value(y, None, True))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        if not self.gradient:
            return BackwardPart(dy)
        dy = dy if dy.quantized else steps.shaped(dy)
        dx = steps.one("quantize_values", (dy.name,), f"{name}.dx", Named(name, "gradient"))
        return BackwardPart(Value(dx, None, True))


class Quantize(StepOperation):
    """Quantize the output, the gradient of the input, or both; the identity without a recipe.

    A graph of torch.compile passes bare storages between operations. A chain returns its output, and the gradient of
    its input, dequantized there.

    Args:
        forward: Quantize the output.
        backward: Quantize the gradient of the input, unless the recipe has a `backward_override`.
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

    def contribute(
        self, name: str, x: InputFacts, call: OperationCall, environment: ChainEnvironment
    ) -> tuple[Contribution, InputFacts]:
        recipe = call.state.recipe if call.state.enabled else None
        if recipe is None:
            return Contribution(), x
        override = getattr(recipe, "backward_override", None)
        contribution = QuantizeContribution(
            self._quantize_forward, self._quantize_backward and override is None and call.saves
        )
        if contribution.output:
            quantizer = self.forward_quantizers()[0].copy()  # calls without a backward pass have other usages
            # A later product with a trained weight reads columns even if no gradient reaches this operation.
            quantizer.set_usage(rowwise=True, columnwise=environment.records and override is None)
            quantizer.internal = call.traced
            environment.objects[name, "output"] = quantizer
        if contribution.gradient:
            quantizer = self._quantizers["backward"][0].copy()
            quantizer.set_usage(rowwise=True, columnwise=True)
            quantizer.internal = call.traced
            environment.objects[name, "gradient"] = quantizer
        return contribution, x._replace(quantized=x.quantized or contribution.output)
