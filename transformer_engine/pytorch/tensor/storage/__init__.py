"""Payloads of quantized tensors outside of torch.Tensor: the class of each file is a name of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....common.folder import exports_of, modules_of

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a class of one of the files."""


globals().update(exports_of(modules_of(__name__, __path__, "_tensor_storage")))
