"""Tests of the primitives and their backends."""
