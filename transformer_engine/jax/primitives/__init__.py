"""Stateless maths on arrays and operands, with one backend table per operation."""
