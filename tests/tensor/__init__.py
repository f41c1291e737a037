"""Tests for the quantized tensors."""
