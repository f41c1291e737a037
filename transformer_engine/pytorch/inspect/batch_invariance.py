"""`batch_invariant()`: the result of a token does not depend on the other tokens of the batch."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator

from ...common.checks import suggests_keywords, switch
from ...common.dispatch import is_batch_invariant, require_batch_invariance
from ..quantization.autocast import current
from ..quantization.support import check_batch_invariance
from ..runtime.tracing import run_eagerly

__all__ = ["batch_invariant", "is_batch_invariant"]


class _Blocks:
    """The requirement of the process: that of the innermost open block, or `default` outside of all blocks."""

    def __init__(self) -> None:
        self.default = False
        self.open: list[tuple[object, bool]] = []
        self.lock = threading.Lock()

    def apply(self) -> None:
        require_batch_invariance(self.open[-1][1] if self.open else self.default)


_blocks = _Blocks()


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
        self._default_before: bool | None = _blocks.default
        self._keys: list[object] = []
        self._set_default(enabled)

    def _recreate_cm(self) -> batch_invariant:
        """Return a new context, so that each decorated function call sets the requirement again."""
        return batch_invariant(self._enabled)

    @run_eagerly("te.batch_invariant() changes the choice of backends for all threads")
    def __enter__(self) -> batch_invariant:
        """Enter the block; the first entry restores the process's requirement from before the construction."""
        if self._default_before is not None:
            _blocks.default, self._default_before = self._default_before, None
        key = object()
        with _blocks.lock:
            _blocks.open.append((key, self._enabled))
            _blocks.apply()
        self._keys.append(key)
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
        key = self._keys.pop()
        with _blocks.lock:
            _blocks.open = [block for block in _blocks.open if block[0] is not key]
            _blocks.apply()

    @run_eagerly("te.batch_invariant() changes the choice of backends for all threads")
    def _set_default(self, enabled: bool) -> None:
        with _blocks.lock:
            _blocks.default = enabled
            _blocks.apply()
        try:
            _check_recipe()
        except RuntimeError:
            with _blocks.lock:
                _blocks.default = bool(self._default_before)
                _blocks.apply()
            raise


def _check_recipe() -> None:
    """Raise RuntimeError if this thread's autocast block has a recipe whose scales depend on the batch."""
    state = current()
    if is_batch_invariant() and state.enabled and state.recipe is not None:
        check_batch_invariance(state.recipe)
