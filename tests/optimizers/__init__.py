"""Tests for the optimizers."""
