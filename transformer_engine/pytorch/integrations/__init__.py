"""Layers and functions for models in other libraries; the folder of each library is independent of the others."""
