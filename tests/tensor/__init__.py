"""Tests of the quantized tensors."""
