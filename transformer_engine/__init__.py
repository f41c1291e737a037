"""Transformer Engine in pure Python: FP8, MXFP8 and NVFP4 for Transformers on any machine."""

from importlib.util import find_spec

from . import common
from ._version import __version__

if find_spec("torch") is not None:
    from . import pytorch

__all__ = ["__version__", "common"]
