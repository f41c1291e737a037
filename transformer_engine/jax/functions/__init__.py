"""Parts of the differentiable functions: products of operands, experts and their exchange between devices."""
