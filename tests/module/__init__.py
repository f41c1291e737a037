"""Tests for the modules."""
