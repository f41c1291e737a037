"""Forward and backward pairs as plain functions, each with a thin autograd.Function round it."""
