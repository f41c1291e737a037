"""Plain PyTorch models: torch.nn modules, in any model, that compute with this engine.

* `convert(model, recipe=.., sample=..)` converts linear layers, norms and attention in place, where that pays.
* `restore(model)` undoes it, and `conversion_table(model)` returns the choices.
"""

from .conversion import conversion_table, convert, restore
from .table import ConversionTable, LayerChoice

__all__ = ["ConversionTable", "LayerChoice", "conversion_table", "convert", "restore"]
