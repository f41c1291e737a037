"""FORMATS[name]: every file of this folder gives the rows of its formats; the folder is the table."""

from __future__ import annotations

from .....common.folder import modules_of
from ..format_row import FormatRow

FORMATS: dict[str, FormatRow] = {
    row.format.name: row for module in modules_of(__name__, __path__) for row in module.ROWS
}
