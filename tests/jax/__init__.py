"""Tests of `transformer_engine.jax`."""
