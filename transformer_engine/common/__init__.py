"""Code shared by all frameworks: recipes, formats, environment variables and backend selection."""

from . import absent, recipe
from .cudnn import MIN_CUDNN_VERSION, check_cudnn_version, decode_cudnn_version

__all__ = ["MIN_CUDNN_VERSION", "check_cudnn_version", "decode_cudnn_version", "recipe"]

absent.install_getters(__name__)
