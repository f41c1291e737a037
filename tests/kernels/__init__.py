"""Tests for the Triton kernels without a GPU."""
