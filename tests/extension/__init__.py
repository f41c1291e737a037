"""Tests for `transformer_engine_torch`."""
