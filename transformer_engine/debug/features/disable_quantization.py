"""Products in high precision: DisableQuantizationGEMM and DisableQuantizationLayer, and their former names."""

from __future__ import annotations

import warnings
from typing import Any

from nvdlfw_inspect.registry import api_method

from transformer_engine.debug.features.api import TEConfigAPIMapper, feature


@feature
class DisableQuantizationGEMM(TEConfigAPIMapper):
    """Computes some products of a layer in high precision.

    Args:
        gemms: The products: "fprop", "dgrad" and "wgrad".

    Example:
        ```yaml
        fprop_in_high_precision:
          enabled: True
          layers:
            layer_types: [fc1]
          transformer_engine:
            DisableQuantizationGEMM:
              enabled: True
              gemms: [fprop]
        ```
    """

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Return False for the configured products."""
        unknown = sorted(set(config) - {"gemm", "gemms"})
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: unknown settings of {type(self).__name__}; give `gemms` only"
            )
        return False, None


@feature
class DisableQuantizationLayer(TEConfigAPIMapper):
    """Computes all products of a layer in high precision; it has no settings.

    Example:
        ```yaml
        attention_in_high_precision:
          enabled: True
          layers:
            layer_types: [qkv, proj]
          transformer_engine:
            DisableQuantizationLayer:
              enabled: True
        ```
    """

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Return False."""
        return False, None

    def parse_config_and_api(
        self, config: dict[str, Any], **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return True: the feature applies to the whole layer."""
        return True, None


@feature
class DisableFP8GEMM(DisableQuantizationGEMM):
    """Former name for DisableQuantizationGEMM."""

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Return False for the configured products."""
        _deprecation_error("DisableFP8GEMM", "DisableQuantizationGEMM")
        return super().fp8_gemm_enabled(config, layer_name, gemm, iteration)


@feature
class DisableFP8Layer(DisableQuantizationLayer):
    """Former name for DisableQuantizationLayer."""

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Return False."""
        _deprecation_error("DisableFP8Layer", "DisableQuantizationLayer")
        return super().fp8_gemm_enabled(config, layer_name, gemm, iteration)


def _deprecation_error(name: str, other: str) -> None:
    message = f"the debug feature {name} is deprecated; use {other} with the same settings"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
