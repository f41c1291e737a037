"""Warnings about arguments without effect: once per process and reason."""

from __future__ import annotations

import warnings

_issued: set[str] = set()


def warn_once(reason: str, message: str, stacklevel: int = 3) -> None:
    """Issue a UserWarning, unless the process has issued one for the same reason already.

    Args:
        reason: Short fixed name of the reason, such as "fused_attn_fwd: o_format", without sizes or other values of a
            call, so that the number of reasons is bounded.
        message: The argument without effect, and the reason.
        stacklevel: As in `warnings.warn`, counted from this function; 3 is the caller of the calling function.
    """
    if reason not in _issued:
        _issued.add(reason)
        warnings.warn(message, UserWarning, stacklevel=stacklevel)


def forget_issued() -> None:
    """Let every warning be issued again; for tests."""
    _issued.clear()
