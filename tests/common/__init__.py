"""Tests of the code that both frameworks share."""
