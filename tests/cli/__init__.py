"""Tests of the `te` command."""
