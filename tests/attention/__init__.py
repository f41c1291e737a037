"""Tests for dot-product attention and the attention layers."""
