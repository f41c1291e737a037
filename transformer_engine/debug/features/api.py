"""Calls from layers to features: their defaults, and feature selection by the configuration file.

A feature is a class with methods under these names, marked by `nvdlfw_inspect.registry.api_method`. The methods get the
feature's configuration, the layer's name, and the keyword arguments below.

| method | arguments | result |
| --- | --- | --- |
| `fp8_gemm_enabled` | gemm, iteration | quantize the operands of this product? |
| `modify_tensor_enabled` | gemm, tensor_name, iteration | does `modify_tensor` make the operand? |
| `modify_tensor` | gemm, tensor_name, tensor, default_quantizer, iteration, out, dtype | the operand |
| `inspect_tensor_enabled` | tensor_name, iteration | is `inspect_tensor` called? |
| `inspect_tensor` | tensor_name, tensor, rowwise_quantized_tensor, columnwise_quantized_tensor, quantizer, iteration, \
tp_group, tp_size | None |

The methods `.._enabled` return a bool, or (bool, next step). The next step is that in which the answer may differ, for
`inspect_tensor_enabled` the next step that is inspected; None for no step. These methods are called between steps, the
others when a layer computes. A method gets only the arguments that its signature lists.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from nvdlfw_inspect import logging as inspect_logging
from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI
from nvdlfw_inspect.registry import Registry

from transformer_engine.common.warning import warn_once
from transformer_engine.debug.features.utils.stats_buffer import STATS_BUFFERS
from transformer_engine.debug.pytorch.debug_quantization import GEMMS as TENSORS
from transformer_engine.debug.pytorch.session import SESSION

NAMESPACE = "transformer_engine"
GEMMS = ("fprop", "dgrad", "wgrad")
_BY_GEMM = frozenset({"fp8_gemm_enabled", "modify_tensor_enabled", "modify_tensor"})
_BY_TENSOR = frozenset(
    {"modify_tensor_enabled", "modify_tensor", "inspect_tensor_enabled", "inspect_tensor"}
)
_ENABLED = frozenset({"fp8_gemm_enabled", "modify_tensor_enabled", "inspect_tensor_enabled"})
# Exceptions whose type is kept when the feature, the layer and the tensor are added to the message.
_KEPT_TYPES = (ValueError, TypeError, AssertionError, NotImplementedError, RuntimeError, KeyError)


def feature(cls: type) -> type:
    """Register a feature while a session loads the folder; an import outside a session registers nothing."""
    return cls if inspect_logging.LOGGER is None else Registry.register_feature(NAMESPACE)(cls)


class TEConfigAPIMapper(BaseConfigAPIMapper):
    """Base class for features: selects the part of a configuration that applies to a product and a tensor.

    A configuration names products by `gemms: [fprop, ..]` or `gemms_struct: [{gemm: fprop, ..}, ..]`, and tensors by
    `tensors: [activation, ..]` or `tensors_struct: [{tensor: activation, ..}, ..]`, within an entry in `gemms_struct`
    or next to `gemms`. Structure entries have individual settings.
    """

    def parse_config_and_api(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, config: dict[str, Any], **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether a configuration applies to a call, and its part for the product and tensor of the call.

        Args:
            config: The feature's configuration.
            **kwargs: The call's arguments; `gemm_parsing` and `tensor_parsing` say by what to select.

        Raises:
            ValueError: The configuration names no products or no tensors.
            AssertionError: A product is unknown, or an entry in `gemms_struct` has `enabled`.
        """
        selected: dict[str, Any] | None = copy.deepcopy(config)
        if kwargs.get("gemm_parsing", False):
            selected = self._gemm_config(selected, kwargs["gemm"])
        if selected is not None and kwargs.get("tensor_parsing", False):
            for name in selected.get("tensors", ()):
                if name not in TENSORS:
                    warn_once(
                        f"debug tensor {name}",
                        f"{type(self).__name__}: tensor {name!r} has no effect; choose from {', '.join(TENSORS)}",
                    )
            selected = self._process_tensor_config(selected, kwargs["tensor_name"])
        if selected is None:
            return False, None
        selected.pop("enabled", None)
        return True, selected

    def _gemm_config(self, config: dict[str, Any], gemm: str) -> dict[str, Any] | None:
        if "gemms_struct" in config:
            entries = config.pop("gemms_struct")
            _check_gemms([entry["gemm"] for entry in entries])
            for entry in entries:
                if "enabled" in entry:
                    raise AssertionError(
                        f"gemms_struct: the entry of {entry['gemm']} has `enabled`; set it for the whole feature"
                    )
            matches = [entry for entry in entries if entry["gemm"] == gemm]
            return config | matches[0] if matches else None
        if "gemms" in config:
            gemms = config.pop("gemms")
            _check_gemms(gemms)
            return config | {"gemm": gemm} if gemm in gemms else None
        raise ValueError(
            f"{type(self).__name__}: the configuration names no products; add `gemms: [fprop, dgrad, wgrad]` or "
            "`gemms_struct`"
        )


def _check_gemms(gemms: list[str]) -> None:
    for gemm in gemms:
        if gemm not in GEMMS:
            raise AssertionError(f"gemm {gemm!r} is unknown; choose from {', '.join(GEMMS)}")


class TEDefaultFeatures:
    """Calls from a layer for which no feature is enabled."""

    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, **kwargs: Any
    ) -> tuple[bool, int | None]:
        """Quantize the product's operands, as the recipe says."""
        return True, None

    def modify_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, **kwargs: Any
    ) -> tuple[bool, int | None]:
        """Let the layer's own quantizer make the operand."""
        return False, None

    def modify_tensor(self, config: dict[str, Any], layer_name: str, **kwargs: Any) -> Any:
        """Raise NotImplementedError: `modify_tensor_enabled` of a feature is True, but it returns no tensor."""
        raise NotImplementedError(
            f"no feature makes {kwargs.get('tensor_name')} of layer {layer_name}; define modify_tensor with "
            "modify_tensor_enabled"
        )

    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, **kwargs: Any
    ) -> tuple[bool, int | None]:
        """Do not call `inspect_tensor`."""
        return False, None

    def inspect_tensor(self, config: dict[str, Any], layer_name: str, **kwargs: Any) -> None:
        """Do nothing."""


class TransformerEngineAPI(BaseNamespaceAPI):
    """The namespace "transformer_engine" in `nvdlfw_inspect`: it begins and ends the layers' session."""

    def __init__(self) -> None:
        super().__init__()
        self._default_api_impl = TEDefaultFeatures()
        SESSION.begin()

    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        """Raise AssertionError for a call without the names that select its features."""
        if api_name in _BY_GEMM and kwargs.get("gemm") not in GEMMS:
            raise AssertionError(f"{api_name}: gemm={kwargs.get('gemm')!r}; choose from {GEMMS}")
        if api_name in _BY_TENSOR:
            tensor = kwargs.get("tensor_name")
            if tensor not in TENSORS:
                raise AssertionError(
                    f"{api_name}: tensor_name={tensor!r}; choose from {tuple(TENSORS)}"
                )

    def routing_condition(
        self,
        api_name: str,
        config: dict[str, Any],
        layer_name: str,
        feature_obj: Any,
        **kwargs: Any,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether a feature is called, and its part of the configuration."""
        kwargs |= {"gemm_parsing": api_name in _BY_GEMM, "tensor_parsing": api_name in _BY_TENSOR}
        try:
            return feature_obj.parse_config_and_api(config, **kwargs)
        except Exception as error:
            raise _locate_error(error, type(feature_obj).__name__, layer_name, kwargs) from error

    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        """Raise AssertionError for a result that layers cannot read."""
        if api_name in _ENABLED:
            pair = (
                isinstance(ret, tuple)
                and len(ret) == 2
                and (ret[1] is None or isinstance(ret[1], int))
            )
            if not (isinstance(ret, bool) or pair):
                raise AssertionError(
                    f"{api_name} returned {ret!r}; return a bool, or (bool, next step)"
                )

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether several features may serve one call; only one of them may make an operand."""
        return api_name in _ENABLED - {"modify_tensor_enabled"} or api_name == "inspect_tensor"

    def handle_multi_feature_output(
        self,
        api_name: str,
        multi_feature_outputs: list[Any],
        features_to_invoke: Any,
        **kwargs: Any,
    ) -> Any:
        """Combine the results of several features: whether any is enabled, and the earliest next step."""
        if api_name not in _ENABLED:
            return None
        answers = [
            ret if isinstance(ret, tuple) else (ret, kwargs["iteration"] + 1)
            for ret in multi_feature_outputs
        ]
        next_iterations = [following for _, following in answers if following is not None]
        return any(enabled for enabled, _ in answers), min(next_iterations, default=None)

    def call_feature(
        self, call: Callable[..., Any], feat_config: dict[str, Any], layer_name: str, **kwargs: Any
    ) -> Any:
        """Call a method of a feature; an exception gets the feature, layer and tensor in its message."""
        parameters = inspect.signature(call).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            kwargs = {name: value for name, value in kwargs.items() if name in parameters}
        try:
            return call(feat_config, layer_name, **kwargs)
        except Exception as error:
            owner = type(getattr(call, "__self__", call)).__name__
            raise _locate_error(error, owner, layer_name, kwargs) from error

    def step(self) -> None:
        """Write the ending step's statistics, and request the next step's plans from the features."""
        STATS_BUFFERS.log_stats()
        SESSION.step()

    def end_debug(self) -> None:
        """End the session."""
        STATS_BUFFERS.reset()
        SESSION.end()


if inspect_logging.LOGGER is not None:
    Registry.register_namespace_api(NAMESPACE)(TransformerEngineAPI)


def _locate_error(
    error: Exception, name: str, layer_name: str, kwargs: dict[str, Any]
) -> Exception:
    """Extend an exception by the feature, the layer and the tensor."""
    where = [f"layer {layer_name}"]
    where += [f"{key} {kwargs[key]}" for key in ("gemm", "tensor_name") if key in kwargs]
    message = f"debug feature {name}, {', '.join(where)}: {type(error).__name__}: {error}"
    return (type(error) if type(error) in _KEPT_TYPES else RuntimeError)(message)
