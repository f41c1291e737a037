"""A GPT of Megatron-core over two context-parallel ranks on gloo: {case: differences from one rank} as JSON.

Each rank runs the whole model without context parallelism first, then its half of the sequence with the same weights.
"""

from __future__ import annotations

import copy
import io
import sys
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.clients import megatron_cases
from tests.clients.ranked import said_by_the_first

# (communication, settings of the model, whether our attention layer replaces Megatron's)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "p2p": ("p2p", {}, False),
    "all_gather": ("all_gather", megatron_cases.LLAMA, False),
    "a2a": ("a2a", megatron_cases.LLAMA, False),
    "p2p own attention": ("p2p", megatron_cases.LLAMA, True),
}


def gpt(settings: dict[str, Any], ours: bool) -> Any:
    """A model on the layer spec for this engine; ours: with our attention layer and its core in Megatron's place."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(0)
    spec = get_gpt_layer_with_transformer_engine_spec()
    if ours:
        from transformer_engine.pytorch.integrations.megatron import SelfAttention
        from transformer_engine.pytorch.integrations.megatron.layers import CoreAttention

        spec = copy.deepcopy(spec)
        spec.submodules.self_attention.module = SelfAttention
        spec.submodules.self_attention.submodules.core_attention = CoreAttention
    return GPTModel(
        config=megatron_cases.config(**settings),
        transformer_layer_spec=spec,
        vocab_size=megatron_cases.VOCABULARY,
        max_sequence_length=megatron_cases.LENGTH,
        position_embedding_type="learned_absolute",
    )


def losses(model: Any, held: torch.Tensor) -> torch.Tensor:
    tokens, positions, mask = megatron_cases.batch()
    labels = torch.roll(tokens, -1, 1)
    return model(tokens[:, held], positions[:, held], mask, labels=labels[:, held]).float()


def compared(comm: str, settings: dict[str, Any], ours: bool) -> dict[str, float]:
    """Greatest differences of losses and gradients."""
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    length = megatron_cases.LENGTH
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(use_te_rng_tracker=True)
    alone = gpt(settings, False)
    expected = losses(alone, torch.arange(length))
    expected.sum().backward()
    parallel_state.destroy_model_parallel()

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    TEDotProductAttention.cp_stream = "no stream on a CPU"  # otherwise Megatron creates a CUDA stream
    rank = parallel_state.get_context_parallel_rank()
    shared = gpt({**settings, "context_parallel_size": 2, "cp_comm_type": comm}, ours)
    shared.load_state_dict(alone.state_dict())
    held = torch.arange(length).view(4, -1)[[rank, 3 - rank]].flatten()
    found = losses(shared, held)
    found.sum().backward()
    difference = (found - expected[:, held]).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    gradients = 0.0
    for one, two in zip(alone.parameters(), shared.parameters(), strict=True):
        dist.all_reduce(two.grad)
        gradients = max(gradients, float((one.grad - two.grad).abs().max() / one.grad.abs().max()))
    parallel_state.destroy_model_parallel()
    return {"losses": float(difference), "gradients": gradients}


def main() -> None:
    warnings.simplefilter("ignore")
    said, sys.stdout = sys.stdout, io.StringIO()  # Megatron prints
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            results[name] = compared(*case)
        except Exception:
            results[name] = traceback.format_exc()
            print(results[name], file=sys.stderr)
            break  # the ranks now differ in their next collective
    said_by_the_first(said, results)


if __name__ == "__main__":
    main()
