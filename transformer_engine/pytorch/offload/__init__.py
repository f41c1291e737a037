"""Saved activations of some layers wait in pinned host memory between their forward and their backward."""
