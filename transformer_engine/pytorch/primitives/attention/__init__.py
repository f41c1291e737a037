"""softmax(scale * q k^T + bias) v as two plain passes: requests, masks, layouts, backends and the table that chooses.

`request` says what is asked, `choose` who computes it, `passes` what a backend is bound to; `reference` is the literal
float32 maths. Nothing here knows autograd, modules or quantized tensors.
"""
