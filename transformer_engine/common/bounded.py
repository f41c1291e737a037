"""What is remembered of earlier calls, in a dictionary that calls of ever new shapes cannot fill the memory with."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dictionary that is emptied before `keep` would make it hold more than `most` entries."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def keep(self, key: K, value: V) -> V:
        """value, remembered under key."""
        if len(self) >= self.most:
            self.clear()
        self[key] = value
        return value
