"""Tests of loading and saving state dictionaries."""
