"""Tests for CUDA graphs."""
