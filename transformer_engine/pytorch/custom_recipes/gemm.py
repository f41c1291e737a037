"""Names that the `qgemm` of a custom quantizer is called with."""

from ...common import absent
from ..tensor.custom_operand import GEMMType, MMParams

__all__ = ["GEMMType", "MMParams"]

__getattr__ = absent.getter(__name__)
