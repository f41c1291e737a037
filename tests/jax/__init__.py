"""Tests for `transformer_engine.jax`."""
