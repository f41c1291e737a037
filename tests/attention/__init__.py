"""Tests of dot-product attention and of the attention layers."""
