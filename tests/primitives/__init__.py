"""Tests for the primitives and their backends."""
