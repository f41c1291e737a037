"""Layers and functions for models of other libraries; the folder of each library is independent of the others."""
