"""Tests of CUDA graphs."""
