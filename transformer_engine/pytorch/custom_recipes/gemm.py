"""Names that the `qgemm` of a custom quantizer is called with."""

from ..tensor.custom_operand import GEMMType, MMParams

__all__ = ["GEMMType", "MMParams"]
