"""Tests of the structure of the code: layers, sizes, names, repeated lines."""
