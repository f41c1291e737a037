"""`batch_invariant()`: the result of a token does not depend on the other tokens of the batch."""

from __future__ import annotations

import itertools
import threading
import weakref
from contextlib import ContextDecorator
from typing import Any

from ...common.checks import suggests_keywords, switch
from ...common.dispatch import is_batch_invariant, require_batch_invariance
from ..quantization.autocast import current
from ..quantization.support import check_batch_invariance
from ..runtime.tracing import run_eagerly

__all__ = ["batch_invariant", "is_batch_invariant"]


class _Requirement:
    """The requirement of the process: that of the innermost open block; outside of blocks, the latest setting.

    A new `batch_invariant` object is a setting until a `with` statement enters it or a function is decorated with it,
    because its constructor cannot know which of them follows. If an object is collected before, its setting stays.

    Attributes:
        lock: Reentrant, because garbage collection may run `keep` at any time.
        open: (key, requirement) of the open blocks of all threads, in order of entry.
        settings: {number: requirement}; larger numbers are later settings.
        kept: Number of the setting that stays.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.open: list[tuple[object, bool]] = []
        self.settings: dict[int, bool] = {0: False}
        self.kept = 0
        self._numbers = itertools.count(1)

    def apply(self) -> None:
        latest = self.settings[max(self.settings)]
        require_batch_invariance(self.open[-1][1] if self.open else latest)

    def add(self, enabled: bool) -> int:
        """Add a setting; return its number."""
        with self.lock:
            number = next(self._numbers)
            self.settings[number] = enabled
            self.apply()
        return number

    def remove(self, number: int) -> None:
        """Remove a setting, unless a later one has replaced it."""
        with self.lock:
            self.settings.pop(number, None)
            self.apply()

    def keep(self, number: int) -> None:
        """Let a setting stay, and remove the kept one before it."""
        with self.lock:
            if number in self.settings:
                earlier, self.kept = sorted((self.kept, number))
                self.settings.pop(earlier)

    def enter(self, key: object, enabled: bool) -> None:
        with self.lock:
            self.open.append((key, enabled))
            self.apply()

    def leave(self, key: object) -> None:
        with self.lock:
            self.open = [block for block in self.open if block[0] is not key]
            self.apply()


_requirement = _Requirement()


class batch_invariant(ContextDecorator):
    """Require results that do not depend on the batch: te.batch_invariant(), or for a block: with te.batch_invariant():

    The bits of a token's output are the same for every batch size, order of samples, packing, padding and chunk of a
    prefill, and in a decoding step with a key-value cache. In the backward pass, the gradient of a token's input is
    the same for every batch size, order, packing and padding. Sums over tokens, such as weight gradients, depend on
    the batch. Backends whose tiles or split sums depend on the number of rows are unsupported, for a reason that
    `te.explain` prints, and so are recipes whose scales depend on the batch.

    The requirement holds for all threads of the process while the block is open, so a block contains the forward and
    the backward pass. docs/batch_invariance.md lists the conditions.

    Args:
        enabled: False lifts the requirement.

    Raises:
        RuntimeError: The recipe of the surrounding `te.autocast` has scales that depend on the batch.

    Example:
        >>> import torch
        >>> import transformer_engine.pytorch as te
        >>> layer, x = te.Linear(64, 64, device="cpu"), torch.randn(5, 64)
        >>> with te.batch_invariant(), torch.no_grad():
        ...     print(torch.equal(layer(x)[3:4], layer(x[3:4])))
        True
    """

    @suggests_keywords
    def __init__(self, enabled: bool = True):
        switch("enabled", enabled)
        self._enabled = enabled
        self._keys: list[object] = []
        self._set()

    def __call__(self, function: Any) -> Any:
        """Decorate a function, whose calls run in a block; the decoration itself leaves the process as before."""
        self._unset()
        return super().__call__(function)

    def _recreate_cm(self) -> batch_invariant:
        """Return a new context, so that each decorated function call sets the requirement again."""
        return batch_invariant(self._enabled)

    @run_eagerly("te.batch_invariant() changes the choice of backends for all threads")
    def __enter__(self) -> batch_invariant:
        """Enter the block, and remove the setting that the constructor added."""
        key = object()
        _requirement.enter(key, self._enabled)
        self._keys.append(key)
        self._unset()
        try:
            _check_recipe()
        except RuntimeError:
            self._leave()
            raise
        return self

    @run_eagerly("te.batch_invariant() changes the choice of backends for all threads")
    def __exit__(self, *exception: object) -> None:
        self._leave()

    def _leave(self) -> None:
        _requirement.leave(self._keys.pop())

    @run_eagerly("te.batch_invariant() changes the choice of backends for all threads")
    def _set(self) -> None:
        """Add the setting of this object; without one if the recipe does not support it."""
        self._number = _requirement.add(self._enabled)
        try:
            _check_recipe()
        except RuntimeError:
            _requirement.remove(self._number)
            raise
        self._collected = weakref.finalize(self, _requirement.keep, self._number)
        self._collected.atexit = False

    def _unset(self) -> None:
        """Remove the setting of this object, if it is still one."""
        if self._collected.detach() is not None:
            _requirement.remove(self._number)


def _check_recipe() -> None:
    """Raise RuntimeError if this thread's autocast block has a recipe whose scales depend on the batch."""
    state = current()
    if is_batch_invariant() and state.enabled and state.recipe is not None:
        check_batch_invariance(state.recipe)
