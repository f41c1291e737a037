"""Unmodified published libraries run on the engine."""
