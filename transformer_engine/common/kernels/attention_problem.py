"""Attention sizes and settings as plain numbers, and tile sizes for its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..formats import ceil_div


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes and settings for one attention; strides are (batch, token, head), or for a broadcast [b, h, i, j].

    Attributes:
        window: (left, right); -1: unlimited.
        scales: Factors for q k^T and for the bias.
        page_size: Tokens per page, where k's batch stride is the page stride. 0: a sequence's keys are
            contiguous.
        outer: Batch strides of the slopes and the page table.
        varied: There is a bias, slopes, a mask tensor or dropout, so that a tile needs more registers.
        tokens: Maximum total query and key counts in packed sequences; None: unknown.
        softcap: Limit c in c * tanh(scale * q k^T / c); 0: no limit.
        caps_bias: The bias is added before the softcap.
        batch_invariant: The bits of a row must not depend on the number of rows, sequences and keys other than its
            own: tiles depend on the head sizes only, and no product is fused with a sum, because masked and unmasked
            tiles would be fused differently.
    """

    dtype: str
    batch: int
    heads: int
    groups: int
    seqlen_q: int
    seqlen_kv: int
    size_qk: int
    size_v: int
    scales: tuple[float, float]
    window: tuple[int, int]
    bottom_right: bool
    dropout: float
    page_size: int
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    out: tuple[int, int, int]
    lse: tuple[int, int, int]
    masked: tuple[int, int, int, int]
    bias: tuple[int, int, int, int]
    outer: tuple[int, int]
    varied: bool
    shared_memory: int
    tokens: tuple[int, int] | None = None
    softcap: float = 0.0
    caps_bias: bool = False
    batch_invariant: bool = False

    @property
    def scalars(self) -> tuple[int | float, ...]:
        """Scalar arguments for every kernel, between its tensors and its output strides."""
        logarithm = math.log2(math.e)  # logits are in units of log 2
        left, right = self.window
        return (
            self.seqlen_q,
            self.seqlen_kv,
            self.heads,
            self.heads // self.groups,
            left,
            right,
            self.scales[0] * logarithm,
            self.scales[1] * logarithm,
            self.softcap * logarithm,
            self.dropout,
            *self.q,
            *self.k,
            *self.v,
            *self.masked,
            *self.bias,
            *self.outer,
            *self.lse,
        )

    @property
    def band(self) -> tuple[bool, bool, bool]:
        """(whether the diagonal ends bottom right, whether the window is limited to the left, and to the right)."""
        left, right = self.window
        return self.bottom_right, left >= 0, right >= 0

    @property
    def capping(self) -> int:
        """0 without a softcap, 1 if the bias is added after it, 2 if the bias is added before it."""
        return 0 if self.softcap == 0.0 else 1 + self.caps_bias

    @property
    def sizes(self) -> tuple[int, ...]:
        """The head sizes, each followed by its two parts; see `halves`."""
        return self.size_qk, *halves(self.size_qk), self.size_v, *halves(self.size_v)

    @property
    def widths(self) -> tuple[int, int]:
        """The padded head sizes."""
        return sum(halves(self.size_qk)), sum(halves(self.size_v))

    @property
    def bytes(self) -> int:
        """Bytes per element of q, k and v."""
        return 4 if self.dtype == "float32" else 2

    def query_tiles(self, rows: int) -> tuple[int, int]:
        """Same as `_tiles` for the queries."""
        return self._tiles(0, self.seqlen_q, rows)

    def key_tiles(self, rows: int) -> tuple[int, int]:
        """Same as `_tiles` for the keys."""
        return self._tiles(1, self.seqlen_kv, rows)

    def _tiles(self, side: int, longest: int, rows: int) -> tuple[int, int]:
        """Compute (programs per head, number of sequences that share them); with 0, each sequence has its own programs.

        Shared programs: each sequence has at most one partly filled tile. Own programs: each sequence needs as many
        tiles as the longest one. A shared program reads all lengths to find its tile, which limits the number of
        sequences.
        """
        each = ceil_div(longest, rows)
        if self.tokens is None or self.batch > 1024:
            return each, 0
        shared = self.tokens[side] // rows + self.batch
        return (shared, self.batch) if shared < each * self.batch else (each, 0)

    def key_parts(self, rows: int, processors: int) -> int:
        """Number of programs that share a tile of `rows` keys: 1, or a group's heads if tiles are few.

        Example: 16 sequences in 8192 tokens, one key head and 64 keys per tile make 144 tiles; 16 sequences with 8192
        tokens each would make 2048.
        """
        if self.batch_invariant:
            return 1
        tiles, sequences = self.key_tiles(rows)
        programs = tiles * self.groups * (1 if sequences else self.batch)
        return self.heads // self.groups if programs < 2 * processors else 1

    @property
    def precision(self) -> str:
        """Precision of float32 products; 16-bit types ignore it."""
        # Three products of tf32 halves are faster, but their gradients have four times the float32 error.
        return "ieee" if self.dtype == "float32" else "tf32"


def halves(size: int) -> tuple[int, int]:
    """Split size into a power of two and a smaller one (or 0) whose sum is size, at least 16, or exceeds it least."""
    main = 1 << (size.bit_length() - 1)
    if main < 16 or size == main:
        return max(16, main), 0
    # In 16-bit types, parts with 32 and 16 columns fault or give wrong sums on sm90 (Triton 3.6, head size 40).
    rest = max(32, 1 << (size - main - 1).bit_length())
    return (2 * main, 0) if rest >= main else (main, rest)


def forward_tile(problem: AttentionProblem) -> tuple[int, int, int, int]:
    """Forward-pass (rows, keys, warps, stages). TFLOP/s below are an H200's, causal, bfloat16."""
    qk, v = problem.widths
    if problem.bytes == 4:
        return (32, 32, 8, 1) if max(qk, v) <= 256 else (16, 16, 4, 1)
    if max(qk, v) > 256:
        candidates = ((64, 32, 8, 2), (64, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1))
    elif max(qk, v) > 128:
        candidates = (
            (128, 64, 8, 2),
            (64, 64, 4, 2),
            (64, 32, 4, 1),
            (32, 32, 4, 1),
            (16, 16, 4, 1),
        )
    elif max(qk, v) <= 64:
        candidates = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 1))  # 324 at 64; 128 keys 212
    elif problem.varied or problem.batch_invariant:
        # 1.2 times as fast as 128 rows with a bias, 1.1 times with dropout. One tile for all calls if batch-invariant.
        candidates = ((64, 64, 4, 2), (64, 32, 4, 1))
    else:
        candidates = ((128, 128, 8, 2), (64, 64, 4, 2), (64, 32, 4, 1))  # 455 at 128; 64 rows 430
    for rows, keys, warps, stages in candidates:
        # The compiler may also stage a tile from the bias and the mask.
        extra = stages * rows * keys * 5 if problem.varied else 0
        matrices = rows * qk + stages * keys * (qk + v)
        if matrices * problem.bytes + extra <= problem.shared_memory - 4096:
            return rows, keys, warps, stages
    return candidates[-1]


def keys_tile(problem: AttentionProblem) -> tuple[int, int, int, int]:
    """Choose (rows, keys, warps, stages) for the key and value gradients."""
    width = sum(problem.widths)
    if width <= 128:
        candidates = ((64, 64, 4, 2), (32, 64, 4, 1))
    elif width <= 256:
        candidates = ((64, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 1))
    else:
        candidates = ((64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 4, 1))
    return _fitting(problem, candidates)


def queries_tile(problem: AttentionProblem) -> tuple[int, int, int, int]:
    """Choose (rows, keys, warps, stages) for the query gradients."""
    width = sum(problem.widths)
    if width <= 256:
        candidates = ((64, 64, 4, 2), (64, 32, 4, 1))
    else:
        candidates = ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 1))
    return _fitting(problem, candidates)


def bias_tile(problem: AttentionProblem) -> tuple[int, int, int]:
    """Choose (rows, keys, warps) for the bias gradient."""
    width = sum(problem.widths)
    if problem.bytes == 4:
        return (32, 32, 8) if width <= 256 else (16, 16, 4)
    return (64, 64, 4) if width <= 256 else (32, 32, 4)


def decode_tile(problem: AttentionProblem, rows: int) -> tuple[int, int, int, int]:
    """Choose (rows, keys, warps, stages) for decoding, whose speed depends on the bytes in flight."""
    width = sum(problem.widths)
    block_rows = min(64, max(16, 1 << (rows - 1).bit_length()))
    if width > 512 or problem.bytes == 4:
        block_rows = min(block_rows, 16 if problem.bytes == 4 else 32)
    # TB/s on an H200, 64 sequences with 8192 keys: 4.35 with 128 keys, 4.2 with 64. With a page table, whose
    # entries need stages too: 4.2 with five stages, 4.0 with three; 4.3 for tiles within a page of 256.
    if problem.page_size and problem.page_size % 128 == 0 and block_rows == 16:
        candidates = ((128, 3), (64, 3), (32, 3), (16, 3))
    elif problem.page_size:
        candidates = ((64, 5), (32, 5), (32, 3), (16, 3))
    elif block_rows == 16:
        candidates = ((128, 2), (64, 2), (32, 2), (16, 2))
    else:
        candidates = ((64, 3), (64, 2), (32, 2), (16, 2))
    for keys, stages in candidates:
        buffers = (stages + 1) // 2 if problem.page_size else stages
        if (buffers * keys + block_rows) * width * problem.bytes <= min(
            problem.shared_memory - 4096, 200 * 1024
        ):
            return block_rows, keys, 4, stages
    return 16, 16, 4, 1


def _fitting(
    problem: AttentionProblem, candidates: tuple[tuple[int, int, int, int], ...]
) -> tuple[int, int, int, int]:
    """Find the first tile whose fixed operands, stages and logits fit into the shared memory; float32 has others."""
    if problem.bytes == 4:
        return (32, 32, 8, 1) if sum(problem.widths) <= 256 else (16, 16, 4, 1)
    for rows, keys, warps, stages in candidates:
        staged = stages * min(rows, keys) + max(rows, keys)
        extra = (stages * 5 if problem.varied else 2) * rows * keys
        if staged * sum(problem.widths) * problem.bytes + extra <= problem.shared_memory - 4096:
            return rows, keys, warps, stages
    return candidates[-1]
