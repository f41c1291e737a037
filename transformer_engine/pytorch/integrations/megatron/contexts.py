"""Key-value caches: one block per batch (static), or pages per request (dynamic).

Both have the Megatron-core inference context methods that attention layers call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common.checks import whole
from ...runtime.device import canonical_device
from .rotation import rotate, rotate_by_tables


class StaticContext:
    """A batch that is prefilled and decoded together: caches [max_sequence_length, max_batch_size, groups, size].

    `sequence_len_offset` counts the tokens per sequence in the caches; the caller advances it after each step.

    Args:
        max_batch_size: Most sequences.
        max_sequence_length: Most tokens in a sequence.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        whole("max_batch_size", max_batch_size)
        whole("max_sequence_length", max_sequence_length)
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.sequence_len_offset = 0
        self.batch_size_offset = 0
        self.key_value_memory_dict: dict[int, tuple[Tensor, Tensor]] = {}

    def is_static_batching(self) -> bool:
        return True

    def is_dynamic_batching(self) -> bool:
        return False

    def is_decode_only(self) -> bool:
        """Whether the caches contain the prompt."""
        return self.sequence_len_offset > 0


class PagedContext:
    """Requests with different lengths in a shared pool's pages; a step's new tokens are packed, request by request.

    ```python
    context.begin_step([7, 1, 1])  # request 0 has a prompt of 7 tokens, the others decode
    y, bias = attention(hidden, None, inference_context=context)  # hidden [9, 1, h]
    ```

    Pages are allocated when needed and never released: the context serves one request batch.

    Args:
        requests: Request count.
        layers: Layer count.
        pages: Page count in the pool.
        page_size: Tokens per page.
        groups: Key head count.
        size: Features per head.
        dtype: Key and value dtype.
        device: Pool device.
    """

    use_flashinfer_fused_rope = False

    def __init__(
        self,
        requests: int,
        layers: int,
        pages: int,
        page_size: int,
        groups: int,
        size: int,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
    ) -> None:
        shape, device = (layers, pages, page_size, groups, size), canonical_device(device)
        whole("requests", requests)
        for name, count in zip(
            ("layers", "pages", "page_size", "groups", "size"), shape, strict=True
        ):
            whole(name, count)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._page_size, self._free = page_size, list(range(pages))
        self._pages: list[list[int]] = [[] for _ in range(requests)]
        self._lengths = [0] * requests
        self._new: list[int] = []
        self._table = torch.zeros((requests, 1), dtype=torch.int32, device=device)
        self._slots = torch.zeros(0, dtype=torch.int64, device=device)
        self._positions = torch.zeros(0, dtype=torch.int64, device=device)

    def begin_step(self, new_tokens: list[int]) -> None:
        """Set the new token count per request; raise ValueError, with nothing changed, if pages are missing."""
        if len(new_tokens) != len(self._pages) or min(new_tokens) < 0 or sum(new_tokens) == 0:
            raise ValueError(
                f"new_tokens={new_tokens}; give {len(self._pages)} numbers >= 0 that are not all 0"
            )
        lengths = [cached + new for cached, new in zip(self._lengths, new_tokens, strict=True)]
        pages_needed = [
            -(-length // self._page_size) - len(pages)
            for length, pages in zip(lengths, self._pages, strict=True)
        ]
        if sum(pages_needed) > len(self._free):
            raise ValueError(
                f"{sum(pages_needed)} more pages are needed, {len(self._free)} are free; make the context larger"
            )
        for pages, count in zip(self._pages, pages_needed, strict=True):
            pages += [self._free.pop(0) for _ in range(count)]
        positions = [range(end - new, end) for end, new in zip(lengths, new_tokens, strict=True)]
        slots = [
            pages[p // self._page_size] * self._page_size + p % self._page_size
            for pages, request_positions in zip(self._pages, positions, strict=True)
            for p in request_positions
        ]
        device = self._keys.device
        most_pages = max(len(pages) for pages in self._pages)
        table = [pages + [0] * (most_pages - len(pages)) for pages in self._pages]
        self._table = torch.tensor(table, dtype=torch.int32, device=device)
        self._slots = torch.tensor(slots, device=device)
        self._positions = torch.tensor(
            [p for request_positions in positions for p in request_positions], device=device
        )
        self._lengths, self._new = lengths, list(new_tokens)

    def is_static_batching(self) -> bool:
        return False

    def is_dynamic_batching(self) -> bool:
        return True

    def is_decode_only(self) -> bool:
        """Whether each request has one new token."""
        return set(self._new) == {1}

    @property
    def padding_slice(self) -> slice:
        """Rows of a step's output that belong to no request: none."""
        return slice(len(self._positions), None)

    def cu_query_lengths(self) -> tuple[Tensor, int]:
        """Return the cumulative new-token counts, int32 [requests + 1], and the largest count."""
        return _cumulative(self._new, self._keys.device), max(self._new)

    def cu_kv_lengths(self) -> tuple[Tensor, Tensor, int]:
        """Return the cumulative lengths, int32 [requests + 1], the lengths, int32 [requests], and the largest length.

        The lengths include the tokens of this step.
        """
        lengths = torch.tensor(self._lengths, dtype=torch.int32, device=self._keys.device)
        return _cumulative(self._lengths, self._keys.device), lengths, max(self._lengths)

    def append_key_value_cache(self, layer_number: int, key: Tensor, value: Tensor) -> None:
        """Append the keys and values of a layer in this step.

        Args:
            layer_number: Number of the layer; the first one is 1.
            key: Keys [t, 1, groups, size] of all new tokens.
            value: Values of the same shape.

        Raises:
            ValueError: The keys or values have another shape; nothing is written.
        """
        expected = [len(self._slots), 1, *self._keys.shape[3:]]
        for name, new in (("keys", key), ("values", value)):
            if list(new.shape) == expected:
                continue
            raise ValueError(
                f"{name} are {list(new.shape)}, begin_step({self._new}) and the pages need {expected}; pass begin_step "
                "the number of new tokens, and make the context for the layer's groups and size"
            )
        for cache, new in ((self._keys, key), (self._values, value)):
            flat = cache[layer_number - 1].flatten(0, 1)
            flat.index_copy_(0, self._slots, new.squeeze(1).to(flat.dtype))

    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (keys, values [pages, page_size, groups, size], int32 [requests, pages per request])."""
        return self._keys[layer_number - 1], self._values[layer_number - 1], self._table

    def apply_rotary_emb_query(
        self,
        query: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        cp_group: Any = None,
        mscale: float = 1.0,
    ) -> Tensor:
        """Return query [t, 1, h, d], rotated by its token positions' angles."""
        return rotate(query, freqs[self._positions], config.rotary_interleaved, mscale)

    def apply_rotary_emb_key(
        self, key: Tensor, freqs: Tensor, config: Any, cp_group: Any = None, mscale: float = 1.0
    ) -> Tensor:
        """Return key [t, 1, h, d], rotated by its token positions' angles."""
        return rotate(key, freqs[self._positions], config.rotary_interleaved, mscale)

    def apply_fused_qk_rotary_emb(
        self, query: Tensor, key: Tensor, cos_sin: Tensor, config: Any
    ) -> tuple[Tensor, Tensor]:
        """Return query and key, rotated by one table [positions, d] with cosines before sines."""
        cos, sin = cos_sin[self._positions].chunk(2, dim=-1)
        tables = cos[:, None, None], sin[:, None, None]
        return tuple(rotate_by_tables(x, *tables, config.rotary_interleaved) for x in (query, key))  # pyright: ignore


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return torch.tensor(ends, dtype=torch.int32, device=device)
