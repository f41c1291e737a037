"""Tests of what both frameworks share."""
