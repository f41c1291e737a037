"""Tests for the code's structure: layers, sizes, names, repeated lines."""
