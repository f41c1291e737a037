"""Checkpoints of other libraries as stacks of TransformerLayer, and back, quantized for servers on request."""

from ...common import absent
from .decoder import Decoder
from .decoder_config import DecoderConfig, RotaryConfig
from .folders import convert, load_model, save_model
from .quantized_folders import save_quantized

__all__ = [
    "Decoder",
    "DecoderConfig",
    "RotaryConfig",
    "convert",
    "load_model",
    "save_model",
    "save_quantized",
]

absent.install_getters(__name__)
