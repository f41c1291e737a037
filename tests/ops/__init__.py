"""Tests for fusible operations."""
