"""`te doctor`: what stands in the way of this installation, and what to do about it."""
