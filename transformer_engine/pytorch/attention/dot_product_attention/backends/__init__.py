"""NVIDIA's attention backend names for its callers; this package's backends are table rows.

`fused_attn_fwd` and `fused_attn_bwd` come from `cpp_extensions`, imported on first use. Other libraries wrap
them by assigning to this module. Attention does not call them through this module, so an assignment warns.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .....common import absent
from ....compat import by_name
from ....runtime.warn_once import warn_once
from ..unfused import UnfusedDotProductAttention as UnfusedDotProductAttention

if TYPE_CHECKING:
    fused_attn_bwd: Callable[..., Any]
    fused_attn_fwd: Callable[..., Any]

_EXTENSIONS = ("fused_attn_bwd", "fused_attn_fwd")


class _Backends(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _EXTENSIONS:
            warn_once(
                f"{__name__}.{name}",
                f"replacing {__name__}.{name} has no effect on attention layers, which call the backends that "
                "te.explain reports; call the replacement directly",
                stacklevel=3,
            )


absent.install_getter(
    __name__, {name: functools.partial(by_name.extension, name) for name in _EXTENSIONS}
)
sys.modules[__name__].__class__ = _Backends
