"""Modules whose forward and backward are recorded once and replayed, as CUDA graphs on a GPU."""
