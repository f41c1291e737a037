"""Tests with random calls and bad input."""
