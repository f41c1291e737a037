"""text = prompt, then one byte at a time drawn from softmax(logits / temperature)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from transformer_engine import pytorch as te

from .config import RunConfig, check_seed
from .model import ByteGPT, parameter_dtype


@torch.no_grad()
def generate(
    model: ByteGPT,
    config: RunConfig,
    prompt: bytes,
    count: int,
    *,
    temperature: float = 0.7,
    seed: int = 0,
    cached: bool = True,
    page_size: int | None = None,
    observe: Callable[[int], None] = lambda byte: None,
) -> bytes:
    """Generate the count bytes that follow prompt; computed in the parameters' precision, outside any recipe.

    Args:
        cached: Cache the keys and values for earlier bytes. Otherwise the whole text is computed again for every byte,
            with the same result.
        page_size: Bytes per cache page; None: one contiguous range.
        observe: Called with every byte.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one byte")
    if count < 1:
        raise ValueError(f"count={count} is below 1; ask for at least one byte")
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"temperature={temperature} is below 0 or not finite; 0 takes the likeliest byte, 1 follows the model"
        )
    check_seed(seed)
    if len(prompt) + count > config.sequence:
        left = config.sequence - len(prompt)
        raise ValueError(
            f"{len(prompt)} + {count} bytes exceed the {config.sequence} positions that the model knows; "
            + (f"ask for at most {left} bytes" if left > 0 else "give a shorter prompt")
        )
    model.eval()
    generator = torch.Generator(device="cpu").manual_seed(seed)
    device = torch.device(config.device)
    text = torch.tensor([list(prompt)], device=device)
    step = None
    if cached:
        step = CachedStep(model, create_cache(config, page_size))
    new_tokens = text
    for _ in range(count):
        logits = model(text)[:, -1] if step is None else step(new_tokens)
        likelihood = logits[0].float().cpu()
        if temperature == 0:
            drawn = likelihood.argmax()
        else:
            drawn = torch.multinomial(
                torch.softmax(likelihood / temperature, 0), 1, generator=generator
            )
        observe(int(drawn))
        new_tokens = drawn.view(1, 1).to(device)
        text = torch.cat([text, new_tokens], dim=1)
    model.train()
    return bytes(text[0, len(prompt) :].tolist())


def create_cache(config: RunConfig, page_size: int | None) -> te.InferenceParams:
    """Create a key and value cache for one text, in pages with `page_size` bytes unless it is None."""
    return te.InferenceParams(
        max_batch_size=1,
        max_sequence_length=config.sequence,
        num_heads_kv=config.heads,
        head_dim_k=config.hidden // config.heads,
        dtype=parameter_dtype(config),
        is_paged=page_size is not None,
        page_size=page_size,
        qkv_format="bshd",
        device=config.device,
    )


class CachedStep:
    """logits [1, 256] for the byte that follows those given so far; a single byte on CUDA is one graph replay.

    A small model's step is many short kernels: started one by one they take longer on the host than on the GPU.
    """

    def __init__(self, model: ByteGPT, cache: te.InferenceParams):
        self.model, self.cache = model, cache
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, new_tokens: Tensor) -> Tensor:
        self.cache.pre_step(OrderedDict({0: new_tokens.shape[1]}))
        if new_tokens.shape[1] > 1 or not new_tokens.is_cuda:
            return self._forward(new_tokens)
        if not self.warm:  # compiles the kernels before the capture
            self.warm = True
            return self._forward(new_tokens)
        if self.graph is None:
            self.graph, self.fresh = torch.cuda.CUDAGraph(), new_tokens.clone()
            with torch.cuda.graph(self.graph):
                self.logits = self._forward(self.fresh)
        self.fresh.copy_(new_tokens)
        self.graph.replay()
        return self.logits

    def _forward(self, new_tokens: Tensor) -> Tensor:
        return self.model(new_tokens, self.cache)[:, -1]
