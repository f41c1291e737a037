"""Triton device code and the records that describe its launches; only a backend that runs a kernel imports it."""
