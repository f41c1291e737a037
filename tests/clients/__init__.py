"""Tests of published libraries that use the engine, unmodified."""
