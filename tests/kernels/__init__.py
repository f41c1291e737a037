"""Tests of the Triton kernels without a GPU."""
