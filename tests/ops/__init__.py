"""Tests of fusible operations."""
