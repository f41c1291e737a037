"""Tests of the optimizers."""
