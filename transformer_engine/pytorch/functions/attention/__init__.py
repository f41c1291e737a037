"""Attention as something to differentiate: the autograd shells of its passes, and FP8 attention round them."""
