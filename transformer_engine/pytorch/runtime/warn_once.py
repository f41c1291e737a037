"""Warnings that a process issues once per reason."""

from __future__ import annotations

import warnings

from .tracing import constant_while_tracing

_issued: set[str] = set()


@constant_while_tracing
def warn_once(reason: str, message: str) -> None:
    """Issue a UserWarning unless the process has issued one for the same reason.

    Args:
        reason: Short fixed name of the reason, such as `"ub_overlap_ag"`. It holds no sizes or other values of a
            call, so that the number of reasons is bounded.
        message: The argument, why it has no effect, and the alternative.
    """
    if reason in _issued:
        return
    _issued.add(reason)
    warnings.warn(message, UserWarning, stacklevel=3)
