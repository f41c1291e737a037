"""Names, signatures and paths from NVIDIA's engine and earlier releases, apart from the code that computes.

| file | content |
| --- | --- |
| `replaceable.py` | which names of a file programs have monkey-patched |
| `by_name.py` | layers that call these names |
| `argument_orders.py` | positional calls in the argument order of an earlier release |
| `functional_linear.py` | the static functions of NVIDIA's `BasicLinear` |
| `combined_quantization.py` | `combine_and_quantize`, a function of NVIDIA's engine that no layer calls |

`OLD_PATHS` lists modules that have moved. Both paths import the same module.
"""

from ...common import absent

_PACKAGE = "transformer_engine.pytorch"
OLD_PATHS = {
    f"{_PACKAGE}.{old}": f"{_PACKAGE}.{new}"
    for old, new in {
        "functions.attention.combined": "compat.combined_quantization",
        "functions.by_name": "compat.by_name",
        "functions.multi_tensor": "optimizers.multi_tensor",
        "functions.sequence": "functions.communication",
        "module.argument_orders": "compat.argument_orders",
        "module.userbuffers": "distributed.userbuffers",
        "ops.basic.functional_linear": "compat.functional_linear",
        "runtime.replaceable": "compat.replaceable",
    }.items()
}
absent.moved.update(OLD_PATHS)
