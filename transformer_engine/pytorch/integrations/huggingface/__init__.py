"""Models of Hugging Face's transformers on this engine: `convert_hf` and its way back, `revert_hf`."""

from .convert import convert_hf, revert_hf

__all__ = ["convert_hf", "revert_hf"]
