"""Tests for recipes, autocast and scaling states."""
