"""Tests of the differentiable functions."""
