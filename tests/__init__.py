"""Tests of the engine, a folder for each part of the package."""
