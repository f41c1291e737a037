"""ProductsModule: base class for layers built from linear products, whose specs are cached by call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...common import env
from ...common.dispatch import interventions
from ...common.documentation import page
from ...common.memory import Memory
from ...common.recipe import Recipe
from ..distributed.tensor_parallel import (
    NO_FLAGS,
    OverlapFlags,
    TensorParallel,
    check_tensor_parallel_group,
    tensor_parallel_size,
)
from ..functions.communication import gather_sequence
from ..functions.linear_spec import LinearSpec, ProductQuantizers, replace_fields
from ..functions.scale_update import is_backward_pass, update_at_end_of_pass
from ..functions.weight_gradient import WeightGradStore, begin_first_microbatch
from ..quantization import QuantizerRole
from ..quantization.autocast import AutocastState, current, eager_thread_state
from ..quantization.roles import BACKWARD_TENSORS, FORWARD_TENSORS
from ..runtime.autograd import gradients_expected, is_first_run
from ..runtime.checks import floating
from ..runtime.device import autocast_dtype, autocast_is_active
from ..runtime.tracing import export_mode
from ..runtime.warn_once import warn_once
from .arguments import NO_SWITCHES, CallSwitches, overlap_flags
from .base import ModuleConfig, TransformerEngineBaseModule
from .config import configure_class
from .numerics import trace_call, traced_update
from .parameters import get_parameter_values
from .products import ModuleRecipe, unquantized
from .repetition import may_be_recomputed, repeatable
from .specs import (
    Call,
    build_from_key,
    check_call,
    count_repeated_facts,
    metadata_facts,
    quantizers_of_call,
    tensor_facts,
)

Tensors = tuple["Tensor | None", ...]  # parameters, named by `config._tensors`
_MAX_SPECS = 64  # cached specs per module
_is_compiling = torch.compiler.is_compiling


@dataclass(frozen=True, eq=False)
class ProductsConfig(ModuleConfig):
    """Settings in every layer that consists of linear products.

    Attributes:
        _tensors: Tensor names that `forward` reads in addition to the input, in order.
        _weights: Parameter names that make up each product's weight.
        _shares_input: The module that computes the input saves its values for its own backward pass.
    """

    fuse_wgrad_accumulation: bool = False
    return_bias: bool = False
    return_layernorm_output: bool = False
    return_layernorm_output_gathered: bool = False
    save_original_input: bool = False
    symmetric_ar_type: str | None = None
    _overlap: OverlapFlags = NO_FLAGS
    use_bias: bool = True
    _tensors: tuple[str, ...] = ()
    _weights: tuple[tuple[str, ...], ...] = ()
    _shares_input: bool = False

    def input_features(self) -> int:
        """Last input dimension."""
        raise NotImplementedError

    def boundary(self, mode: str | None) -> TensorParallel:
        """Return the boundary between a product and the tensor-parallel group.

        Raises:
            RuntimeError: Parameters are sharded, and no group was set. The forward pass in a
                column-parallel layer without sequence parallelism would not notice.
        """
        tp = self.tp_group, self.tp_size, self.sequence_parallel
        parallel = TensorParallel(mode, *tp, self.symmetric_ar_type, self._overlap.of(mode), self)
        return parallel.checked() if self.is_sharded else parallel

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded over the tensor-parallel ranks."""
        return False

    def check(self) -> None:
        for name in ("return_layernorm_output", "return_layernorm_output_gathered"):
            if getattr(self, name) and not hasattr(self, "normalization"):
                warn_once(
                    f"{self._kind}.{name}",
                    f"{name}=True has no effect on a {self._kind}, which has no norm to return; make a LayerNormLinear "
                    "or a LayerNormMLP",
                )


# Fields that determine layer parameters.
SIZES = frozenset({"in_features", "out_features"})


@dataclass(frozen=True, eq=False)
class LinearConfig(ProductsConfig):
    """Settings for a layer with one weight [out_features, in_features], whole or in named pieces."""

    in_features: int = 0
    out_features: int = 0
    parallel_mode: str | None = None
    get_rng_state_tracker: Any = None
    rng_tracker_name: str | None = None
    weight_names: tuple[str, ...] = ()
    bias_names: tuple[str, ...] = ()

    def input_features(self) -> int:
        return self.in_features

    @property
    def is_sharded(self) -> bool:
        return self.parallel_mode is not None and self.tp_size > 1

    @property
    def adds_bias_late(self) -> bool:
        """Whether the bias is returned to the caller, or added after the sum over ranks in a row-parallel layer."""
        return self.return_bias or (self.parallel_mode == "row" and self.tp_size > 1)

    def parallel(self) -> TensorParallel:
        return self.boundary(self.parallel_mode)


def check_ranks(
    mode: str | None, tp_group: Any, tp_size: int, in_features: int, out_features: int
) -> int:
    """Return how many ranks share a linear layer; see `tensor_parallel_size`.

    Raises:
        ValueError: The mode is unknown, this rank does not belong to the group, or the ranks do not divide the sharded
            dimension.
    """
    if mode not in (None, "row", "column"):
        raise ValueError(f'parallel_mode={mode!r} is unknown; choose None, "row" or "column"')
    ranks = tensor_parallel_size(tp_group, tp_size)
    sharded = {"row": ("in_features", in_features), "column": ("out_features", out_features)}.get(
        mode or ""
    )
    if sharded and sharded[1] % ranks:
        padded = -(-sharded[1] // ranks) * ranks
        raise ValueError(
            f"tp_size={ranks} does not divide {sharded[0]}={sharded[1]}; pad it to {padded}"
        )
    return ranks


def _role(name: str) -> property:
    """Return a property for a boundary role; assigning a different role resets the quantizers."""

    def read(self: ProductsModule) -> QuantizerRole | None:
        return getattr(self, name)

    def write(self: ProductsModule, role: QuantizerRole | None) -> None:
        changed = getattr(self, name) != role
        setattr(self, name, role)
        if changed:
            self.numerics.forget()

    return property(read, write)


@configure_class(ProductsConfig)
class ProductsModule(TransformerEngineBaseModule):
    """A module whose forward pass consists of linear products.

    Attributes:
        quantized_as: module_type in its quantizers' roles.
        product_names: Names for consecutive products; empty for a single product and for independent products.
        build: Builder for cached specs, `spec = build(call)`; None: the layer caches no specs.
    """

    quantized_as = "linear"
    product_names: tuple[str, ...] = ()
    products_grow = False
    build: Any = None
    _config: ProductsConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    fuse_wgrad_accumulation: bool
    return_bias: bool
    return_layernorm_output: bool
    return_layernorm_output_gathered: bool
    save_original_input: bool
    symmetric_ar_type: str | None
    use_bias: bool
    _output_role: QuantizerRole | None = None
    _grad_input_role: QuantizerRole | None = None

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        if self.build is not None:
            self._specs: Memory[tuple[Any, ...], Any] = Memory(
                build_from_key, _MAX_SPECS, type(self).build
            )

    def _configure_from(
        self, arguments: Mapping[str, Any], tp_size: int, sharded: bool, **settings: Any
    ) -> None:
        """Store a layer's settings, and apply the other arguments that all layers have, for the constructor.

        Args:
            arguments: {name: value} of the constructor's arguments; config fields among them are stored.
            tp_size: Rank count.
            sharded: The parameters are sharded over the ranks.
            settings: Fields whose value is not that of the argument with the same name.
        """
        sequence_parallel = arguments["sequence_parallel"] and tp_size > 1
        flags = [arguments.get(flag, False) for flag in OverlapFlags._fields]
        stored = {
            field.name: arguments[field.name]
            for field in fields(self._config)
            if field.name in arguments
        }
        stored |= {
            "tp_size": tp_size,
            "sequence_parallel": sequence_parallel,
            "use_bias": arguments["bias"],
        }
        self._configure(
            **{**stored, **settings}, _overlap=overlap_flags(sharded and sequence_parallel, *flags)
        )
        if arguments["tp_group"] is not None:
            self.set_tensor_parallel_group(arguments["tp_group"])
        if arguments["delay_wgrad_compute"]:
            self.wgrad_store = WeightGradStore(delay_wgrad_compute=True)

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """Return the slot roles; roles at the module's boundaries are settable, see `output_quantizer_role`."""
        tensors = FORWARD_TENSORS if fwd else BACKWARD_TENSORS
        products = num_quantizers // len(tensors)
        border = self._output_role if fwd else self._grad_input_role
        roles: list[QuantizerRole | None] = []
        for product in range(products):
            part = self.product_names[product] if self.product_names else ""
            name = ".".join(filter(None, (self.name, part)))
            roles += [QuantizerRole(self.quantized_as, tensor, name) for tensor in tensors]
            # In a chain, the last product computes the module's output and the first one its input gradient.
            at_border = not self.product_names or product == (products - 1 if fwd else 0)
            if border is not None and at_border:
                roles[-1] = border
        return roles

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill and mark the parameters; see `TransformerEngineBaseModule.reset_parameters`.

        Weights whose gradients are delayed get `skip_backward_post_hook`: a data-parallel wrapper then leaves them to
        `register_wgrad_accumulation_and_reduce_hooks`.
        """
        super().reset_parameters(defer_init=defer_init)
        self._mark_delayed_gradients()

    def _mark_delayed_gradients(self) -> None:
        for parameter in self.get_backward_dw_params():
            parameter.skip_backward_post_hook = True  # pyright: ignore[reportAttributeAccessIssue]

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel process group; must precede the first forward when tp_size > 1.

        Raises:
            ValueError: The group has another rank count than the parameters are sharded over.
        """
        if self._config.is_sharded and tp_group is not None:
            check_tensor_parallel_group(tp_group, self.tp_size, type(self).__name__)
        super().set_tensor_parallel_group(tp_group)

    def get_backward_dw_params(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients `backward_dw` computes; none unless delay_wgrad_compute=True."""
        if self.wgrad_store is None:
            return []
        return [
            parameter
            for name, init in self.param_init_meta.items()
            if init.fp8_meta_index is not None
            and (parameter := self.get_parameter(name)).requires_grad
        ]

    # The output and input gradient roles that a custom recipe's factory receives, such as an
    # attention's "qkv".
    output_quantizer_role = _role("_output_role")
    grad_input_quantizer_role = _role("_grad_input_role")

    def spec(
        self, inp: Tensor, tensors: Tensors, switches: CallSwitches, any_rows: bool = False
    ) -> Any:
        """Return the cached build(call); the first call under a recipe also creates quantizers and scaling states.

        Args:
            inp: The input.
            tensors: The parameters, named by `config._tensors`.
            switches: Call switches.
            any_rows: The spec does not depend on the row count. The call then has one entry for consecutive
                parameters of the same kind, so that a look-up stays fast with many groups.
        """
        if export_mode.onnx or _is_compiling():
            return self._traced_spec(inp, tensors, switches)
        thread = eager_thread_state()
        state, numerics, config = thread.state, self.numerics, self._config
        grad = torch.is_grad_enabled() or (None if gradients_expected(self.training) else False)
        before = numerics.state_without_gradients
        if not grad or (before is not None and before is not state):
            self.check_repetition(state)
        active = numerics.of_call(self, state, (inp, tensors, switches))
        if active.has_state and (thread.recomputes or is_backward_pass()):
            return self._spec_of_pass(inp, tensors, switches, active)
        numerics.state = state
        store = self.wgrad_store
        targets = self._targets() if store is not None or config.fuse_wgrad_accumulation else None
        try:
            x, counts = tensor_facts(inp), None
            if any_rows:
                x, (facts, counts) = (x[0], x[1][-1:], *x[2:]), count_repeated_facts(tensors)
            else:
                facts = tuple([None if t is None else tensor_facts(t) for t in tensors])
            autocast = autocast_dtype(inp.device.type) if autocast_is_active() else None
            environment = env.generation()
            key = (
                config,
                active,
                switches,
                grad,
                autocast,
                environment,
                store,
                targets,
                x,
                facts,
                counts,
            )
            # Computed again if an observer records the choices.
            return build_from_key(type(self).build, key) if interventions else self._specs[key]
        except (AttributeError, TypeError) as error:
            stumbled = error
        self._check_call(inp, tensors, switches)  # raises a clearer error if the input is at fault
        raise stumbled

    def _build_uncached_call(
        self, inp: Tensor, tensors: Tensors, switches: CallSwitches, active: ModuleRecipe
    ) -> Call:
        """Return a call whose spec is not cached; raise TypeError if the input is not a tensor."""
        floating("the input", inp)
        accumulates = self.wgrad_store is not None or self._config.fuse_wgrad_accumulation
        compiling = _is_compiling()
        return Call(
            self._config,
            active,
            switches,
            torch.is_grad_enabled()
            or (None if not compiling and gradients_expected(self.training) else False),
            autocast_dtype(inp.device.type),
            0 if compiling else env.generation(),
            self.wgrad_store,
            self._targets() if accumulates else None,
            metadata_facts(inp),
            tuple([None if tensor is None else metadata_facts(tensor) for tensor in tensors]),
            traced=compiling,
        )

    def _spec_of_pass(
        self, inp: Tensor, tensors: Tensors, switches: CallSwitches, active: ModuleRecipe
    ) -> Any:
        """Return the spec for a call in a recomputed function, with its first run's scales, or in a backward pass."""
        self._check_call(inp, tensors, switches)
        self.numerics.state = current()
        active = repeatable(type(self).__name__, self.tracing_key, active)
        return type(self).build(
            self._build_uncached_call(inp, tensors, switches, active)._replace(
                make_update=update_at_end_of_pass
            )
        )

    def _traced_spec(self, inp: Tensor, tensors: Tensors, switches: CallSwitches) -> Any:
        """Return the spec for a call that a compiler traces; raise NotImplementedError in an export to ONNX."""
        if export_mode.onnx:
            raise NotImplementedError(
                f"{type(self).__name__} cannot be exported to ONNX; {page('export')} lists the layers that can"
            )
        self._check_call(inp, tensors, switches)
        state = current()
        active = trace_call(self, self.tracing_key, state)
        if state.enabled or state.calibrating:
            self._check_parameter_recipe(state.recipe)
        if active.has_state and may_be_recomputed():
            active = repeatable(type(self).__name__, self.tracing_key, active)
        make_update = functools.partial(traced_update, self, self.tracing_key, state.group)
        return type(self).build(
            self._build_uncached_call(inp, tensors, switches, active)._replace(
                make_update=make_update
            )
        )

    def check_call_under(
        self, recipe: Recipe, inp: Any, tensors: Tensors, switches: CallSwitches
    ) -> None:
        """Raise the errors of `check_call`, and an error if a recipe does not support the parameters."""
        self._check_call(inp, tensors, switches)
        self._check_parameter_recipe(recipe)

    def _check_call(self, inp: Any, tensors: Tensors, switches: CallSwitches) -> None:
        """Raise TypeError, ValueError or RuntimeError for a call that the layer does not support."""
        call = self._build_uncached_call(inp, tensors, switches, unquantized(self.num_products))
        check_call(call, self._input_features(tensors))

    def _input_features(self, tensors: Sequence[Tensor | None]) -> int:
        """Return the last input dimension, or this rank's part in a call with shard parameters."""
        return self._config.input_features()

    def _targets(self) -> tuple[tuple[torch.nn.Parameter, ...], ...]:
        """Parameters in each product's weight, into whose main_grad or grad gradients are accumulated."""
        return tuple([tuple(get_parameter_values(self, names)) for names in self._config._weights])

    def quantizable_products(
        self, state: AutocastState, inp: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> tuple[ProductQuantizers, ...]:
        """Return the quantizers for an input's products, given (in_features, out_features) per product weight."""
        return quantizers_of_call(
            self._build_uncached_call(inp, (), NO_SWITCHES, self.numerics.of_call(self, state)),
            shapes,
        )

    def pack_outputs(self, y: Tensor, bias: Tensor | None, norm_output: Tensor | None) -> Any:
        """Outputs of a layer with a norm: y, or `(y[, bias][, norm(x)])` by the settings `return_*`.

        norm(x) has the rows of this rank, or of the whole sequence with return_layernorm_output_gathered.
        """
        config = self._config
        if not (config.return_bias or config.return_layernorm_output):
            return y
        outputs = (y, bias) if config.return_bias else (y,)
        if not config.return_layernorm_output:
            return outputs
        if (
            config.return_layernorm_output_gathered
            and config.sequence_parallel
            and norm_output is not None
        ):
            norm_output = gather_sequence(norm_output, config.tp_group)
        return *outputs, norm_output

    def begin_first_microbatch(self) -> None:
        """Let the next gradient overwrite main_grad; the second run of a checkpoint begins no step."""
        if not self._config.fuse_wgrad_accumulation or _is_compiling() or is_backward_pass():
            return
        if torch.is_grad_enabled() or is_first_run():
            begin_first_microbatch([weights[0] for weights in self._targets()])

    def with_cached_weight(
        self, key: str, weight: Tensor, spec: LinearSpec, first: bool
    ) -> LinearSpec:
        """Return the spec with the weight as quantized for the first microbatch of the step."""
        cached = self.numerics.cached_weight(
            key, weight, spec.weight_quantizer, spec.needs_grad_input, first
        )
        if cached is None:
            return spec
        parts = tuple([part for part in cached.flatten()[0] if part is not None])
        return replace_fields(spec, cached_weight=cached, cached_tensors=parts)
