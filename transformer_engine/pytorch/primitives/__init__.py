"""Stateless maths on plain tensors: one folder an operation, one file a backend, no autograd."""
