"""Megatron-core's dynamic inference context on a CPU: its own requests, pages and padding, tensors of the host."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

PINNED = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "tensor",
    "zeros",
    "zeros_like",
)
GENERATED = 4


class HostEvent:
    """An event that has always completed, because no stream exists."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def read_on_host() -> Iterator[None]:
    """Replace CUDA's current device, events and pinned memory, which Megatron uses, by the CPU's."""
    stream = types.SimpleNamespace(wait_event=lambda event: None)
    replacements = {
        (torch.cuda, "current_device"): lambda: torch.device("cpu"),
        (torch.cuda, "current_stream"): lambda *args: stream,
        (torch.cuda, "Event"): HostEvent,
        (torch.Tensor, "pin_memory"): lambda tensor, *args: tensor,
    }
    for name in PINNED:
        replacements[torch, name] = _ignore_pinning(getattr(torch, name))
    with ExitStack() as stack:
        for (owner, name), value in replacements.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _ignore_pinning(make: Any) -> Any:
    @functools.wraps(make)
    def create(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return create


def worst_difference(gpt: Any, prompts: list[torch.Tensor]) -> float:
    """Largest next-token logit difference between batched steps for all requests and one call per sequence.

    The first step takes all prompts, packed and padded to Megatron's size. Later steps take one token per request.
    """
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.inference.inference_request import DynamicInferenceRequest
    from megatron.core.inference.sampling_params import SamplingParams

    settings = InferenceConfig(max_sequence_length=32, buffer_size_gb=0.01, block_size_tokens=256)  # pyright: ignore
    sequences, worst = list(prompts), 0.0
    with (
        read_on_host(),
        mock.patch.object(dynamic_context, "triton_append_key_value_cache", None),
        torch.no_grad(),
    ):
        context = dynamic_context.DynamicInferenceContext(gpt.config, settings)
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(num_tokens_to_generate=GENERATED)
            request = DynamicInferenceRequest(
                request_id=number, prompt_tokens=prompt, sampling_params=sampling
            )
            context.add_request(request)
        for _ in range(GENERATED):
            context.initialize_attention_state()
            context.transfer_bookkeeping_to_gpu()
            tokens, positions = context.current_input_and_position_ids()
            logits = gpt(
                tokens, positions, None, inference_context=context, runtime_gather_output=True
            )
            result = context.last_token_logits(logits)[: len(prompts)]
            each = (
                gpt(sequence[None], torch.arange(len(sequence))[None], None)
                for sequence in sequences
            )
            worst = max(
                worst, (result - torch.stack([full[0, -1] for full in each])).abs().max().item()
            )
            following = result.argmax(-1)
            sequences = [
                torch.cat((s, new[None])) for s, new in zip(sequences, following, strict=True)
            ]
            context.update_requests(torch.ones(len(prompts), dtype=torch.uint8), following)
    return worst
