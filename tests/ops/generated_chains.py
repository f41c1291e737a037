"""Print {chain and recipe: differences} between a chain's steps and its compiled passes, on a simulated GPU.

See `tests/module/generated_launches.py`: memory holds symbols for the kernels that wrote it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "module"))
import transformer_engine.pytorch as te
from tests.module import generated_launches
from tests.module.generated_launches import memory, read
from transformer_engine.common.dispatch import observing
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.ops.prepared_chain import PreparedChain

PLACE = {"device": "cpu", "dtype": torch.bfloat16}
SHARED: dict[str, Any] = {**PLACE, "sequence_parallel": True}  # sharded over two ranks
CHAINS = {
    "linear": lambda: [ops.Linear(512, 512, **PLACE)],
    "mlp": lambda: [
        ops.LayerNorm(512, **PLACE),
        ops.Linear(512, 512, **PLACE),
        ops.GELU(),
        ops.Linear(512, 512, **PLACE),
    ],
    "residual": lambda: [
        ops.MakeExtraOutput(),
        ops.RMSNorm(512, **PLACE),
        ops.Linear(512, 1024, bias=False, **PLACE),
        ops.SwiGLU(),
        ops.BasicLinear(512, 512, **PLACE),
        ops.Identity(),
    ],
    "parallel": lambda: [
        ops.RMSNorm(512, **PLACE),
        ops.BasicLinear(512, 2048, tensor_parallel_mode="column", **SHARED),
        ops.SwiGLU(),
        ops.BasicLinear(1024, 512, tensor_parallel_mode="row", **SHARED),
    ],
    "reduced": lambda: [
        ops.Linear(
            512, 1024, tensor_parallel_mode="column", **{**SHARED, "sequence_parallel": False}
        ),
        ops.ReLU(),
        ops.Linear(1024, 512, tensor_parallel_mode="row", **{**SHARED, "sequence_parallel": False}),
    ],
}
STEPS = 7  # both passes of the fourth call are compiled


def step(chain: Any, recipe: Any, observed: bool = False) -> dict[str, Any]:
    """Symbols for results, gradients and states after a step."""
    x = torch.zeros(128, 1, 512, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(128, 1, 512, dtype=torch.bfloat16)
    dy_extra = torch.zeros(128, 1, 512, dtype=torch.bfloat16)
    states = {
        f"{number}.{mode}.{index}.{name}": getattr(state, name)
        for number, op in enumerate(chain.modules())
        if isinstance(op, ops.BasicOperation)
        for mode in ("forward", "backward")
        for index, state in enumerate(op.delayed_states(mode))
        for name in ("scale_in_place", "amax_history")
    }
    options = {"x": x, "dy": dy, "dy_extra": dy_extra, **states, **dict(chain.named_parameters())}
    memory.clear()
    for name, tensor in options.items():
        memory[tensor.data_ptr()] = name
    for parameter in chain.parameters():
        parameter.grad = None
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        if observed:
            with observing(lambda operation, request: None):  # runs the steps
                result = chain(x)
        else:
            result = chain(x)
    outputs = result if isinstance(result, tuple) else (result,)
    # An extra output is the input, and its gradient is added by torch, which computes no symbols.
    torch.autograd.backward(outputs[0], dy)
    left = {"y": outputs[0], "dx": x.grad, **states}
    left |= {f"d{name}": parameter.grad for name, parameter in chain.named_parameters()}
    return {name: read(tensor.data_ptr()) for name, tensor in left.items()}


def differences(name: str, kind: str) -> str | None:
    chain, recipe = ops.Sequential(*CHAINS[name]()), generated_launches.host_calls.RECIPES[kind]()
    step(chain, recipe)  # the first call creates the states, which have no names before
    expected = step(chain, recipe, observed=True)
    results = [step(chain, recipe) for _ in range(STEPS)]
    (prepared,) = [
        output
        for output in chain._module_groups[0]._prepared.values()
        if isinstance(output, PreparedChain)
    ]  # pyright: ignore
    if prepared.compiled is None:
        return f"not listed: {sorted({type(local).__name__ for local in prepared.passes if not local.listed})}"
    compiled = [
        [pass_kind.reason for pass_kind in output.kinds.values() if pass_kind.generated is None]
        + [None] * (not output.kinds)
        for output in prepared.compiled.passes
    ]
    if any(compiled):
        return f"not compiled: {compiled}"
    if "?" in expected.values():
        return f"{expected}"
    for number, result in enumerate(results):
        unlike = [part for part in expected if result[part] != expected[part]]
        if unlike:
            return f"step {number}: {unlike}"
    return None


if __name__ == "__main__":
    generated_launches.pretend()
    cases = [(name, kind) for name in CHAINS for kind in generated_launches.host_calls.RECIPES]
    print(json.dumps({"/".join(case): differences(*case) for case in cases}))
