"""Tests of `transformer_engine_torch`."""
