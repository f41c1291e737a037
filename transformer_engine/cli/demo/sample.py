"""text = prompt, then one byte at a time drawn from softmax(logits / temperature)."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from ... import pytorch as te
from .config import Config
from .model import ByteGPT


@torch.no_grad()
def generate(
    model: ByteGPT,
    config: Config,
    prompt: bytes,
    count: int,
    *,
    temperature: float = 0.7,
    seed: int = 0,
    cached: bool = True,
) -> bytes:
    """The count bytes that follow prompt; computed in the parameters' precision, outside any recipe.

    cached keeps the keys and values of earlier bytes; without it the whole text is computed again for every
    byte, to the same end.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one byte")
    if len(prompt) + count > config.sequence:
        raise ValueError(
            f"{len(prompt)} + {count} bytes exceed the {config.sequence} positions that the model knows; "
            f"ask for at most {config.sequence - len(prompt)} bytes"
        )
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    device = torch.device(config.device)
    text = torch.tensor([list(prompt)], device=device)
    cache = _cache(config) if cached else None
    fresh = text
    for _ in range(count):
        if cache is not None:
            cache.pre_step(OrderedDict({0: fresh.shape[1]}))
        logits = model(text if cache is None else fresh, cache)[:, -1]
        fresh = _draw(logits[0], temperature, generator).view(1, 1).to(device)
        text = torch.cat([text, fresh], dim=1)
    model.train()
    return bytes(text[0, len(prompt) :].tolist())


def _cache(config: Config) -> te.InferenceParams:
    return te.InferenceParams(
        max_batch_size=1,
        max_sequence_length=config.sequence,
        num_heads_kv=config.heads,
        head_dim_k=config.hidden // config.heads,
        dtype=config.parameter_dtype,
        is_paged=False,
        qkv_format="bshd",
    )


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One byte; temperature 0 takes the likeliest."""
    logits = logits.float().cpu()
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)
