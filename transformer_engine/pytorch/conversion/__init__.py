"""Weights of other libraries as stacks of TransformerLayer, and back: `load_model`, `save_model`, `convert`."""

from ...common import absent
from .decoder import Decoder
from .decoder_config import DecoderConfig, RotaryConfig
from .folders import convert, load_model, save_model

__all__ = ["Decoder", "DecoderConfig", "RotaryConfig", "convert", "load_model", "save_model"]

absent.install_getters(__name__)
