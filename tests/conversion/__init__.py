"""Tests of the conversion of published checkpoints."""
