"""Warnings that a process issues once per reason, usable in compiled code."""

from __future__ import annotations

from ...common import warning
from .tracing import constant_while_tracing


@constant_while_tracing
def warn_once(reason: str, message: str, stacklevel: int = 3) -> None:
    """Issue a UserWarning unless the process has issued one for the same reason; see `common.warning.warn_once`."""
    warning.warn_once(reason, message, stacklevel + 1)
