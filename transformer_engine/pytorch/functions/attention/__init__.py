"""Attention as something to differentiate: autograd shells around its passes, and FP8 attention around them."""
