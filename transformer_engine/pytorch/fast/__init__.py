"""Pieces that exist for host time alone; layers and operations compute the same bits without them."""
