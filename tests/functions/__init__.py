"""Tests for the differentiable functions."""
