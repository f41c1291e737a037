"""Tests with several ranks."""
