"""Layers and functions for models of other libraries, each library a folder, none of them needed for the others."""
