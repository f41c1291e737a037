"""Quantizers: tensor [*rows, *columns] -> codes and scales, and the next delayed-scaling state.

Quantizers are pytrees whose leaves are their state, and have mutable methods for compatibility with NVIDIA's engine.
Differentiation rules use the methods without side effects: `encode` and `advanced`.

Longer than 400 lines because the public class of every recipe is in one place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...common import env
from ...common.checks import accepts_former_keywords, integer, switch
from ...common.quantize_spec import FAST_ERRORS, QuantizeSpec
from ..primitives import quantize as primitive
from ..primitives.operand import turned
from ..primitives.quantize import OutputCast
from ..primitives.scale_update import ScaleState, advance_states
from ..runtime.checks import check_floating, check_values
from ..runtime.undifferentiated import constant, undifferentiated
from .scaling_modes import AmaxComputeAlgo, QuantizeLayout, ScalingMode
from .settings import check_settings, find_element, random_key
from .tensors import (
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    ScaledTensorFactory,
    positive_axis,
)

__all__ = [
    "BlockScaleQuantizer",
    "CurrentScaleQuantizer",
    "DelayedScaleQuantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "QuantizerSet",
    "advanced_together",
    "noop_quantizer_set",
]

Class = TypeVar("Class", bound=type)


def _register(cls: Class) -> Class:
    """Make a dataclass a pytree whose leaves are its STATE fields."""

    def flatten(quantizer: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        state = tuple(getattr(quantizer, name) for name in cls.STATE)
        return state, tuple(
            getattr(quantizer, f.name) for f in fields(cls) if f.name not in cls.STATE
        )

    def unflatten(static: tuple[Any, ...], state: Sequence[Any]) -> Any:
        # Not by __init__: leaves may be tracers, shapes or None.
        result = object.__new__(cls)
        names = [f.name for f in fields(cls) if f.name not in cls.STATE]
        result.__dict__.update(zip(names, static, strict=True))
        result.__dict__.update(zip(cls.STATE, state, strict=True))
        return result

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


@_register
@dataclass
class Quantizer:
    """One way to quantize tensors.

    Args:
        q_dtype: Code dtype.
        scaling_mode: Scaling mode, which determines the format and the scale source.
        q_layout: Directions that are quantized.
        data_layout: Two letters, for the row-wise and the column-wise codes: "N" not transposed, "T" transposed.
        checkpoint_name: Code and scale name for recomputation policies; None sets no name.
    """

    STATE: ClassVar[tuple[str, ...]] = ()

    q_dtype: Any
    scaling_mode: ScalingMode
    q_layout: QuantizeLayout
    data_layout: str
    checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        check_settings({f.name: getattr(self, f.name) for f in fields(self)})

    @accepts_former_keywords(over="mesh_axes")
    def quantize(
        self,
        x: Array,
        is_rowwise: bool | None = None,
        is_colwise: bool | None = None,
        dq_dtype: Any = None,
        flatten_axis: int = -1,
        *,
        mesh_axes: tuple[str, ...] = (),
    ) -> ScaledTensor:
        """Quantize x [*rows, *columns] in the layout's directions, or in the given ones.

        A quantizer with a state advances by one step.

        Args:
            x: Values.
            is_rowwise: Whether to compute the row direction; None: as in q_layout.
            is_colwise: Whether to compute the column direction; None: as in q_layout.
            dq_dtype: dtype of the dequantized values, by default x's dtype.
            flatten_axis: First column axis.
            mesh_axes: Manual mesh axes whose devices share the maximum.

        Raises:
            NotImplementedError: The codes are differentiated.
        """
        check_values("x", x)
        tensor, amax = self.encode(
            constant(x), is_rowwise, is_colwise, dq_dtype, flatten_axis, mesh_axes
        )
        self.update(amax)
        return undifferentiated(tensor, x)

    def encode(
        self,
        x: Array,
        is_rowwise: bool | None = None,
        is_colwise: bool | None = None,
        dq_dtype: Any = None,
        flatten_axis: int = -1,
        mesh_axes: tuple[str, ...] = (),
        maxima: tuple[Array | None, Array | None] = (None, None),
    ) -> tuple[ScaledTensor, Array | None]:
        """Quantize without a state change; return the tensor and its absolute maximum or None.

        The other arguments are as in `Quantizer.quantize`.

        Args:
            maxima: NVFP4: absolute maxima for the row-wise and column-wise direction; None: they are measured.
        """
        check_values("x", x)
        for name, requested in (("is_rowwise", is_rowwise), ("is_colwise", is_colwise)):
            switch(name, requested)
        integer("flatten_axis", flatten_axis)
        spec = self.spec(*self.directions(is_rowwise, is_colwise))
        axis = positive_axis(flatten_axis, x.ndim)
        arguments = self._primitive_arguments(x, axis)
        if maxima[0] is not None or maxima[1] is not None:
            arguments |= {"amax": maxima[0], "amax_t": maxima[1]}
        quantized = primitive.quantize(x, spec, axis=axis, mesh_axes=mesh_axes, **arguments)
        dtype = jnp.dtype(x.dtype if dq_dtype is None else check_floating("dq_dtype", dq_dtype))
        return self._tensors(quantized, spec, x.shape, dtype, axis), quantized.amax

    def directions(self, is_rowwise: bool | None, is_colwise: bool | None) -> tuple[bool, bool]:
        """Resolve to (row-wise, column-wise); None: as in q_layout."""
        rowwise = self.q_layout.has_rowwise if is_rowwise is None else is_rowwise
        colwise = self.q_layout.has_colwise if is_colwise is None else is_colwise
        return rowwise, colwise

    def cast(self) -> OutputCast | None:
        """The cast with which an operation quantizes its own result as `encode` does, or None if unsupported."""
        return OutputCast(self.spec(self.q_layout.has_rowwise, self.q_layout.has_colwise))

    def from_codes(
        self, quantized: primitive.Quantized, shape: tuple[int, ...], dtype: Any, flatten_axis: int
    ) -> tuple[ScaledTensor, Array | None]:
        """Build `encode`'s result for a result [*shape] that its operation has quantized by `cast`."""
        cast = self.cast()
        assert cast is not None, "the operation has used the cast"
        axis = positive_axis(flatten_axis, len(shape))
        return self._tensors(quantized, cast.spec, shape, jnp.dtype(dtype), axis), quantized.amax

    def _tensors(
        self,
        quantized: primitive.Quantized,
        spec: QuantizeSpec,
        shape: tuple[int, ...],
        dtype: Any,
        axis: int,
    ) -> ScaledTensor:
        """Pack a matrix's codes as tensors for its array [*shape], whose columns begin at axis."""
        tensors: list[ScaledTensor1x] = []
        if spec.rowwise:
            assert quantized.codes is not None and quantized.scale is not None
            tensors.append(
                self._tensor(
                    quantized.codes.reshape(shape),
                    quantized.scale,
                    quantized.amax,
                    dtype,
                    False,
                    axis,
                )
            )
        if spec.columnwise:
            assert quantized.codes_t is not None and quantized.scale_t is not None
            amax = quantized.amax if self.scaling_mode.is_tensor_scaling() else quantized.amax_t
            codes, scale = quantized.codes_t, quantized.scale_t
            codes, at = codes.reshape(*shape[axis:], *shape[:axis]), len(shape) - axis
            if self.data_layout[1] != "T":
                codes, scale, at = turned(codes, at), scale if scale.ndim == 1 else scale.T, axis
            tensors.append(self._tensor(codes, scale, amax, dtype, True, at, spec.hadamard))
        return tensors[0] if len(tensors) == 1 else ScaledTensor2x(*tensors)

    def update(self, amax: Array | None) -> None:
        """Advance the state by one step; no effect without a state."""

    def advanced(self, amax: Array | None) -> Quantizer:
        """Quantizer for the next step."""
        return self

    def get_data_layout(self) -> str:
        """data_layout for the quantized directions."""
        if self.q_layout is QuantizeLayout.ROWWISE:
            return self.data_layout[0]
        return self.data_layout[1] if self.q_layout is QuantizeLayout.COLWISE else self.data_layout

    def spec(self, rowwise: bool, colwise: bool) -> QuantizeSpec:
        """Settings for the quantization primitive."""
        form = self.scaling_mode.format
        if form is None:
            raise ValueError(
                f"scaling_mode={self.scaling_mode} does not quantize; choose another mode"
            )
        return QuantizeSpec(
            form,
            find_element(self.q_dtype),
            rowwise,
            colwise,
            two_dimensional=self.scaling_mode.is_2d and form.two_dimensional,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        return {}

    def _primitive_arguments(self, x: Array, axis: int) -> dict[str, Any]:
        """Keyword arguments for the quantization primitive."""
        return {}

    def _tensor(
        self,
        data: Array,
        scale: Array,
        amax: Array | None,
        dtype: Any,
        is_colwise: bool,
        axis: int,
        hadamard: bool = False,
    ) -> ScaledTensor1x:
        tensor = ScaledTensorFactory.create_1x(
            data,
            scale,
            amax,
            self.scaling_mode,
            dtype,
            is_colwise,
            self.data_layout[int(is_colwise)],
            axis,
            hadamard,
        )
        return tensor.checkpoint(self)


@_register
@dataclass
class CurrentScaleQuantizer(Quantizer):
    """One scale per tensor, computed from its own absolute maximum.

    Args:
        power_of_two: Whether scales are rounded down to powers of two.
        epsilon: Smallest maximum that a scale is computed from.
    """

    scaling_mode: ScalingMode = ScalingMode.CURRENT_TENSOR_SCALING
    q_layout: QuantizeLayout = QuantizeLayout.ROWWISE_COLWISE
    data_layout: str = "NT"
    power_of_two: bool = False
    epsilon: float = 0.0

    def _options(self) -> dict[str, Any]:
        return {"power_of_two": self.power_of_two, "epsilon": self.epsilon}


@_register
@dataclass
class DelayedScaleQuantizer(Quantizer):
    """One scale per tensor, computed from the absolute maxima of earlier steps.

    Args:
        margin: Powers of two that the scale stays below the largest code.
        amax_compute_algo: The maximum of the history, or its latest element.
        scale: Multiplier of the values, float32 [1], initially 1. Kernels read 0 as 1, because JAX returns a zero
            gradient for a state that a step did not use.
        amax_history: Maxima from earlier steps, float32 [length], by default 1024 zeros.
    """

    STATE: ClassVar[tuple[str, ...]] = ("scale", "amax_history")

    scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING
    q_layout: QuantizeLayout = QuantizeLayout.ROWWISE_COLWISE
    data_layout: str = "NT"
    margin: float = 0.0
    amax_compute_algo: AmaxComputeAlgo = AmaxComputeAlgo.MAX
    scale: Array = field(default_factory=lambda: jnp.ones(1, jnp.float32))
    amax_history: Array = field(default_factory=lambda: jnp.zeros(1024, jnp.float32))

    def update(self, amax: Array | None) -> None:
        following = self.advanced(amax)
        self.scale, self.amax_history = following.scale, following.amax_history

    def advanced(self, amax: Array | None) -> DelayedScaleQuantizer:
        assert amax is not None
        return advanced_together((self,), (amax,))[0]  # pyright: ignore[reportReturnType]

    def cast(self) -> OutputCast | None:
        return OutputCast(
            self.spec(self.q_layout.has_rowwise, self.q_layout.has_colwise), self._multiplier()
        )

    def _primitive_arguments(self, x: Array, axis: int) -> dict[str, Any]:
        return {"multiplier": self._multiplier()}

    def _multiplier(self) -> Array:
        if tuple(self.scale.shape) == (1,):
            return self.scale
        raise ValueError(
            f"scale has shape {list(self.scale.shape)}; a tensor has one scale, [1], and groups need a GroupedQuantizer"
        )


@_register
@dataclass
class BlockScaleQuantizer(Quantizer):
    """One scale per block: MXFP8, and FP8 in 1 x 128 or 128 x 128 blocks.

    Args:
        power_of_two: Whether scales are rounded down to powers of two, in FP8 blocks.
        epsilon: Smallest maximum that a scale is computed from, in FP8 blocks.
    """

    scaling_mode: ScalingMode = ScalingMode.MXFP8_1D_SCALING
    q_layout: QuantizeLayout = QuantizeLayout.ROWWISE_COLWISE
    data_layout: str = "NN"
    power_of_two: bool = True
    epsilon: float = 0.0

    def _options(self) -> dict[str, Any]:
        if self.scaling_mode in (ScalingMode.BLOCK_1D_SCALING, ScalingMode.BLOCK_2D_SCALING):
            return {"power_of_two": self.power_of_two, "epsilon": self.epsilon}
        return {}


@_register
@dataclass
class NVFP4Quantizer(Quantizer):
    """E2M1 codes, one E4M3 scale per 16 codes, one float32 scale per tensor.

    Args:
        use_rht: Whether the column-wise direction is Hadamard transformed.
        stochastic_rounding_rng_state: uint32 words, such as the data of a jax.random key, for stochastic rounding; None
            rounds to nearest.
        four_over_six: "MAE" or "MSE" maps a block's maximum to 4 instead of 6 if that makes the smaller error; empty
            never does.
    """

    STATE: ClassVar[tuple[str, ...]] = ("stochastic_rounding_rng_state",)

    scaling_mode: ScalingMode = ScalingMode.NVFP4_1D_SCALING
    q_layout: QuantizeLayout = QuantizeLayout.ROWWISE_COLWISE
    data_layout: str = "NT"
    use_rht: bool = False
    stochastic_rounding_rng_state: Array | None = None
    four_over_six: str = ""

    def cast(self) -> OutputCast | None:
        return None  # its kernels read a matrix from memory

    def _options(self) -> dict[str, Any]:
        error = self.four_over_six
        if error and env.flag("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH"):
            error = FAST_ERRORS[error]
        stochastic = self.stochastic_rounding_rng_state is not None
        return {"hadamard": self.use_rht, "stochastic": stochastic, "four_over_six": error}

    def _primitive_arguments(self, x: Array, axis: int) -> dict[str, Any]:
        if (state := self.stochastic_rounding_rng_state) is None:
            return {}
        rows, columns = jax.random.split(random_key(state))
        # Explicit, because under jax_enable_x64 the default is float64: other numbers, which no kernel reads.
        uniform = functools.partial(jax.random.uniform, dtype=jnp.float32)
        return {
            "random": (uniform(rows, x.shape), uniform(columns, (*x.shape[axis:], *x.shape[:axis])))
        }


def advanced_together(
    quantizers: Sequence[Quantizer | None], amaxes: Sequence[Array | None]
) -> tuple[Quantizer | None, ...]:
    """Quantizers for the next step; states with the same signature advance in one operation."""
    following = list(quantizers)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, quantizer in enumerate(quantizers):
        if isinstance(quantizer, DelayedScaleQuantizer):
            key = (quantizer.amax_history.shape, quantizer.amax_compute_algo, quantizer.margin)
            alike.setdefault(key, []).append(index)
    for (_, algorithm, margin), places in alike.items():
        states: list[Any] = [quantizers[index] for index in places]
        advanced = advance_states(
            [
                ScaleState(state.amax_history, state.scale, jnp.reshape(amaxes[index], -1))  # pyright: ignore
                for index, state in zip(places, states, strict=True)
            ],
            algorithm.value,
            tuple(find_element(state.q_dtype).maximum for state in states),
            margin,
        )
        for index, state, (history, scale) in zip(places, states, advanced, strict=True):
            following[index] = dataclasses.replace(state, amax_history=history, scale=scale)
    return tuple(following)


@jax.tree_util.register_pytree_node_class
@dataclass(eq=False)
class QuantizerSet:
    """Quantizers for a linear layer's input, kernel and output gradient; None: not quantized.

    Each is a Quantizer, or for grouped products a GroupedQuantizer.

    Args:
        x: Input quantizer.
        kernel: Kernel quantizer.
        dgrad: Output-gradient quantizer.
    """

    x: Any
    kernel: Any
    dgrad: Any

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return (self.x, self.kernel, self.dgrad), None

    @classmethod
    def tree_unflatten(cls, static: None, children: Sequence[Any]) -> QuantizerSet:
        return cls(*children)

    @property
    def is_noop(self) -> bool:
        """Whether nothing is quantized."""
        return self.x is None and self.kernel is None and self.dgrad is None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantizerSet):
            return NotImplemented
        return self is other or (self.is_noop and other.is_noop)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


noop_quantizer_set = QuantizerSet(x=None, kernel=None, dgrad=None)


def as_cotangent(tree: Any) -> Any:
    """Convert a state to an earlier state's cotangent: leaves that are not floats (random keys) have none."""

    def leaf(value: Array) -> Any:
        return (
            value
            if jnp.issubdtype(value.dtype, jnp.floating)
            else np.zeros(value.shape, jax.dtypes.float0)
        )

    return jax.tree.map(leaf, tree)
