"""Names from `transformer_engine.pytorch.optimizers.newton_schulz` under their earlier path."""

from .optimizers.newton_schulz import (
    CoeffIterMode,
    CoeffT,
    CusolverMpCtx,
    NSCoeffT,
    get_coefficient_iterator,
    get_coefficients,
    newton_schulz,
    newton_schulz_tp,
)

__all__ = [
    "CoeffIterMode",
    "CoeffT",
    "CusolverMpCtx",
    "NSCoeffT",
    "get_coefficient_iterator",
    "get_coefficients",
    "newton_schulz",
    "newton_schulz_tp",
]
