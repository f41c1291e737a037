"""The one place that holds the version: API level of the original, then our own release as local part."""

__version__ = "2.20.2+py0.3.0"
