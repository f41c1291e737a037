"""Text that a terminal can display."""

from __future__ import annotations


def printable(text: bytes) -> str:
    """Decode bytes to text; bytes that are not UTF-8 and control characters become the replacement character."""
    characters = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters)
