"""Stateless maths on arrays and operands, one table of backends an operation."""
