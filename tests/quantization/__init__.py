"""Tests of recipes, autocast and scaling states."""
