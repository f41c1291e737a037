"""softmax(scale * q k^T + bias) v as two plain passes: calls, masks, layouts, backends and their table.

`call` describes an attention, `choose` holds the backend table, `passes` the functions that a backend is bound to;
`reference` is the literal float32 maths. Autograd, modules and quantized tensors are in higher layers.
"""
