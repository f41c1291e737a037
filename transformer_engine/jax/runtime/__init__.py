"""The platform, axes of devices, and checks of values, below all computation."""
