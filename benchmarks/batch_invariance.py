"""Count differing bits in random compositions of batches under te.batch_invariant(), and time a layer with and without.

    python benchmarks/batch_invariance.py [--compositions N] [--device DEVICE] [--seconds S] [--json FILE]

A composition chooses rows or sequences of a pool, their order, a layout (padded or packed), and for cached steps the
chunks of a prefill and the decoded tokens. Every output and input gradient is compared with that of another
composition: rows with a batch of the whole pool, sequences with the sequence alone. `control` repeats the comparison
without te.batch_invariant(). Times are for the forward and backward pass of a layer of an 8-billion-parameter Llama
with 8192 tokens, alternately with and without.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import llama_layers
import torch
from record import parser, write
from torch import Tensor

import transformer_engine.pytorch as te
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    Recipe,
)
from transformer_engine.pytorch.primitives.attention.call import AttentionCall, AttentionInputs
from transformer_engine.pytorch.primitives.attention.choose import choose_passes
from transformer_engine.pytorch.primitives.attention.mask import resolve
from transformer_engine_tools.bench.measure import measure_in_turns


def _constant_scale(amax: Any, scale: Any, fp8_max: Any, recipe: Any) -> Any:
    """Scales that no step changes, as in an evaluation."""
    return scale


RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": DelayedScaling(scaling_factor_compute_algo=_constant_scale, amax_history_len=1),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}
Layout = Literal["bshd", "sbhd", "thd"]
LAYOUTS: tuple[Layout, ...] = ("bshd", "sbhd", "thd")
ROWS = 32  # divisor of the row counts that MXFP8 quantizes along the tokens, for weight gradients


class Sizes(NamedTuple):
    """Extents of the layers and the pools.

    Attributes:
        rows: Rows of a pool.
        lengths: Sequences of a pool, and the tokens of the longest one.
        classes: Classes of a loss.
        attention: Query heads, and key and value heads.
        widths: Hidden and inner features.
    """

    rows: int
    lengths: tuple[int, int]
    classes: int
    attention: tuple[int, int]
    widths: tuple[int, int]

    @property
    def head(self) -> int:
        return self.widths[0] // self.attention[0]


SIZES = {
    "cuda": Sizes(4096, (24, 700), 32000, (8, 2), (1024, 2048)),
    "cpu": Sizes(256, (10, 150), 40000, (4, 2), (64, 128)),
}


class Difference(NamedTuple):
    """Elements of one comparison that differ, and the largest difference."""

    compared: int
    differing: int
    largest: float
    gradient: bool


def difference(actual: Tensor, expected: Tensor, gradient: bool = False) -> Difference:
    """Compare two tensors bit for bit; zeros with different signs count as different."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    unequal = int((actual.contiguous().view(bits) != expected.contiguous().view(bits)).sum())
    largest = float((actual.float() - expected.float()).abs().max()) if unequal else 0.0
    return Difference(actual.numel(), unequal, largest, gradient)


class Counts:
    """Differences by recipe and operation."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.compositions = 0

    @property
    def differing(self) -> int:
        return sum(entry["differing"] for entry in self.found.values())

    def compare(self, name: str, compare: Callable[..., list[Difference]], *args: Any) -> None:
        """Add the differences that a comparison finds, or the error that it raises."""
        try:
            self.add(name, *compare(*args))
        except Exception as error:
            self.errors.setdefault(name, f"{type(error).__name__}: {error}")

    def add(self, name: str, *differences: Difference) -> None:
        fresh = {
            "compositions": 0,
            "compared": 0,
            "differing": 0,
            "differing_gradients": 0,
            "largest": 0.0,
            "compositions_differing": 0,
        }
        entry = self.found.setdefault(name, fresh)
        entry["compositions"] += 1
        entry["compositions_differing"] += any(part.differing for part in differences)
        for part in differences:
            entry["compared"] += part.compared
            entry["differing"] += part.differing
            entry["differing_gradients"] += part.differing * part.gradient
            entry["largest"] = max(entry["largest"], part.largest)


@contextmanager
def under(recipe: Recipe | None) -> Iterator[None]:
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        yield


class RowOperation:
    """An operation on rows [m, width]: outputs and input gradients of chosen rows of a pool.

    Args:
        call: The operation.
        width: Input width.
        dtype: Input dtype.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Tensor],
        width: int,
        sizes: Sizes,
        device: str,
        dtype: torch.dtype,
        takes_index: bool = False,
    ):
        self.name, self.call, self.takes_index = name, call, takes_index
        self.x = torch.randn(sizes.rows, width, device=device).to(dtype)
        self.dy: Tensor | None = None
        self.expected: dict[Any, tuple[Tensor, Tensor]] = {}

    def run(
        self, index: Tensor, recipe: Recipe | None, trains: bool
    ) -> tuple[Tensor, Tensor | None]:
        x = self.x[index].requires_grad_(trains)
        more = (index,) if self.takes_index else ()
        with under(recipe), torch.set_grad_enabled(trains):
            y = self.call(x, *more)
        if self.dy is None:
            self.dy = torch.randn(self.x.shape[0], *y.shape[1:], device=y.device).to(y.dtype)
        if trains:
            y.backward(self.dy[index])
        return y.detach(), x.grad

    def compare(self, draw: random.Random, recipe: Recipe | None, key: Any) -> list[Difference]:
        rows = self.x.shape[0]
        if key not in self.expected:
            self.expected[key] = self.run(torch.arange(rows, device=self.x.device), recipe, True)  # pyright: ignore
        trains = draw.random() < 0.5
        count = _row_count(draw, rows)
        if trains and isinstance(recipe, MXFP8BlockScaling):
            count = -(-count // ROWS) * ROWS
        index = torch.tensor(draw.sample(range(rows), count), device=self.x.device)
        return self.differences(index, recipe, trains, key)

    def differences(
        self, index: Tensor, recipe: Recipe | None, trains: bool, key: Any
    ) -> list[Difference]:
        """Compare the chosen rows with the batch of all rows."""
        y, dx = self.run(index, recipe, trains)
        expected, expected_dx = self.expected[key]
        found = [difference(y, expected[index])]
        if dx is not None:
            found.append(difference(dx, expected_dx[index], gradient=True))
        return found


def _row_count(draw: random.Random, most: int) -> int:
    """A number of rows, often small or close to a multiple of a tile."""
    kind = draw.random()
    if kind < 0.3:
        return draw.randint(1, 17)
    if kind < 0.6:
        return max(1, min(most, draw.choice((32, 64, 128, 256, 512, 1024)) + draw.randint(-1, 1)))
    return draw.randint(1, most)


class GroupedOperation(RowOperation):
    """GroupedLinear: rows of each group in any number."""

    def __init__(
        self, layer: te.GroupedLinear, count: int, sizes: Sizes, device: str, dtype: torch.dtype
    ):
        super().__init__("GroupedLinear", layer, sizes.widths[0], sizes, device, dtype)
        self.layer, self.count = layer, count

    def compare(self, draw: random.Random, recipe: Recipe | None, key: Any) -> list[Difference]:
        rows, groups = self.x.shape[0], self.count
        each = rows // groups
        if key not in self.expected:
            splits = [each] * groups
            self.call = lambda x: self.layer(x, splits)
            self.expected[key] = self.run(torch.arange(rows, device=self.x.device), recipe, True)  # pyright: ignore
        trains = draw.random() < 0.5
        multiple = ROWS if trains and isinstance(recipe, MXFP8BlockScaling) else 1
        splits = [
            min(each, -(-draw.randint(0, each) // multiple) * multiple) for _ in range(groups)
        ]
        if not sum(splits):
            splits[0] = multiple
        chosen = [
            group * each + row
            for group, count in enumerate(splits)
            for row in draw.sample(range(each), count)
        ]
        index = torch.tensor(chosen, device=self.x.device)
        self.call = lambda x: self.layer(x, splits)
        return self.differences(index, recipe, trains, key)


class Composition(NamedTuple):
    """Sequences of a batch, in order.

    Attributes:
        sequences: Indices in the pool.
        layout: "bshd", "sbhd" or "thd".
        extra: Padding tokens behind the longest sequence, or a filler sequence in a packed batch.
    """

    sequences: list[int]
    layout: str
    extra: int


class SequenceOperation:
    """An operation on sequences [tokens, width] of a pool: outputs and input gradients by sequence."""

    def __init__(self, name: str, width: int, lengths: list[int], device: str, dtype: torch.dtype):
        self.name, self.lengths = name, lengths
        self.x = [torch.randn(n, width, device=device).to(dtype) for n in lengths]
        self.dy: list[Tensor] = []
        self.expected: dict[Any, list[tuple[Tensor, Tensor]]] = {}

    def call(self, x: Tensor, layout: str, lengths: list[int]) -> Tensor:
        raise NotImplementedError

    def run(
        self, composition: Composition, recipe: Recipe | None, trains: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        chosen, layout, extra = composition
        lengths = [self.lengths[i] for i in chosen]
        if layout == "thd":
            x = torch.cat(
                [*(self.x[i] for i in chosen), self.x[0].new_ones(extra, self.x[0].shape[1])]
            )
            padded = [*lengths, extra] if extra else lengths
        else:
            padded = [max(lengths) + extra] * len(lengths)
            x = self.x[0].new_ones(len(lengths), padded[0], self.x[0].shape[1])
            for row, i in enumerate(chosen):
                x[row, : lengths[row]] = self.x[i]
            x = x if layout == "bshd" else x.transpose(0, 1).contiguous()
        x.requires_grad_(trains)
        with under(recipe), torch.set_grad_enabled(trains):
            y = self.call(x, layout, padded)
        if not self.dy:
            self.dy = [
                torch.randn(n, y.shape[-1], device=y.device).to(y.dtype) for n in self.lengths
            ]
        if trains:
            dy = torch.zeros_like(y)
            for part, i in zip(self.parts(dy, layout, lengths), chosen, strict=True):
                part.copy_(self.dy[i])
            y.backward(dy)
        outputs = self.parts(y.detach(), layout, lengths)
        grads = [None] * len(chosen) if x.grad is None else self.parts(x.grad, layout, lengths)
        return list(zip(outputs, grads, strict=True))

    @staticmethod
    def parts(x: Tensor, layout: str, lengths: list[int]) -> list[Tensor]:
        if layout == "thd":
            return list(x[: sum(lengths)].split(lengths))
        rows = x if layout == "bshd" else x.transpose(0, 1)
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]

    def compare(self, draw: random.Random, recipe: Recipe | None, key: Any) -> list[Difference]:
        multiple = ROWS if isinstance(recipe, MXFP8BlockScaling) else 1
        if key not in self.expected:
            alone = [Composition([i], "bshd", -n % multiple) for i, n in enumerate(self.lengths)]
            self.expected[key] = [self.run(one, recipe, True)[0] for one in alone]  # pyright: ignore
        chosen = draw.sample(range(len(self.lengths)), draw.randint(1, len(self.lengths)))
        layout = draw.choice(LAYOUTS)
        lengths = [self.lengths[i] for i in chosen]
        extra = draw.choice((0, 0, 1, 7, 40))
        if layout == "thd":
            extra += -(sum(lengths) + extra) % multiple
        else:
            extra += -(max(lengths) + extra) % multiple
        trains = draw.random() < 0.6
        results = self.run(Composition(chosen, layout, extra), recipe, trains)
        expected = [self.expected[key][i] for i in chosen]
        found = [
            difference(torch.cat([y for y, _ in results]), torch.cat([y for y, _ in expected]))
        ]
        if trains:
            dx, expected_dx = (
                torch.cat([dx for _, dx in pairs if dx is not None])
                for pairs in (results, expected)
            )
            found.append(difference(dx, expected_dx, gradient=True))
        return found


class AttentionOperation(SequenceOperation):
    """DotProductAttention of q, k and v in one matrix [tokens, (heads + 2 groups) * head]."""

    def __init__(self, sizes: Sizes, lengths: list[int], device: str, dtype: torch.dtype):
        self.sizes = sizes
        width = (sizes.attention[0] + 2 * sizes.attention[1]) * sizes.head
        super().__init__("DotProductAttention", width, lengths, device, dtype)
        self.layer = te.DotProductAttention(
            sizes.attention[0], sizes.head, num_gqa_groups=sizes.attention[1], attention_dropout=0.0
        )

    def call(self, x: Tensor, layout: str, lengths: list[int]) -> Tensor:
        sizes = self.sizes
        heads = x.unflatten(-1, (-1, sizes.head))
        q, k, v = heads.split([sizes.attention[0], sizes.attention[1], sizes.attention[1]], dim=-2)
        if layout != "thd":
            return self.layer(q, k, v, qkv_format=layout, attn_mask_type="causal")
        starts, longest = _starts(lengths, x.device), max(lengths)
        return self.layer(
            q,
            k,
            v,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor(
        [0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device
    )


class LayerOperation(SequenceOperation):
    """TransformerLayer with rotary positions, as in Llama; also in cached steps."""

    def __init__(self, sizes: Sizes, lengths: list[int], device: str, dtype: torch.dtype):
        super().__init__("TransformerLayer", sizes.widths[0], lengths, device, dtype)
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.layers: dict[str, te.TransformerLayer] = {
            layout: self._layer(layout) for layout in LAYOUTS
        }
        for layout in LAYOUTS:
            self.layers[layout].load_state_dict(self.layers["bshd"].state_dict())
        self.angles = te.attention.RotaryPositionEmbedding(sizes.head)(4096).to(device)

    def _layer(self, layout: Layout) -> te.TransformerLayer:
        sizes = self.sizes
        return te.TransformerLayer(
            *sizes.widths,
            sizes.attention[0],
            num_gqa_groups=sizes.attention[1],
            layer_number=1,
            bias=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            normalization="RMSNorm",
            activation="swiglu",
            fuse_qkv_params=True,
            self_attn_mask_type="padding_causal" if layout == "thd" else "causal",
            attn_input_format=layout,
            params_dtype=self.dtype,
            device=self.device,
        )

    def call(self, x: Tensor, layout: str, lengths: list[int]) -> Tensor:
        packed: dict[str, Any] = {}
        if layout == "thd":
            starts, longest = _starts(lengths, x.device), max(lengths)
            packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
            packed |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        return self.layers[layout](x, rotary_pos_emb=self.angles, **packed)

    @torch.no_grad()
    def compare_cached(
        self, draw: random.Random, recipe: Recipe | None, key: Any
    ) -> list[Difference]:
        """Chunked prefills and decoding steps with a cache of keys and values, against each sequence alone."""
        sizes = self.sizes
        layer = self.layers["bshd"]
        places = draw.randint(1, 6)
        waiting = draw.sample(
            range(len(self.lengths)), draw.randint(places, min(8, len(self.lengths)))
        )
        paged = draw.random() < 0.5
        longest = -(-max(self.lengths) // 64) * 64
        cache = te.InferenceParams(
            max_batch_size=places,
            max_sequence_length=longest,
            num_heads_kv=sizes.attention[1],
            head_dim_k=sizes.head,
            dtype=self.dtype,
            is_paged=paged,
            page_size=64 if paged else None,
        )
        running: dict[int, int] = {}
        found: list[tuple[Tensor, Tensor]] = []
        for _ in range(10):
            while waiting and len(running) < places:
                running[waiting.pop()] = 0
            if not running:
                break
            # A step mixes chunks of prompts with decoded tokens; one in three steps decodes only.
            decodes = draw.random() < 0.35
            step = {}
            for i, done in running.items():
                left = self.lengths[i] - done
                step[i] = 1 if decodes or (done and draw.random() < 0.3) else draw.randint(1, left)
            x = self.x[0].new_ones(len(step), max(step.values()), sizes.widths[0])
            for row, (i, count) in enumerate(step.items()):
                x[row, :count] = self.x[i][running[i] : running[i] + count]
            cache.pre_step(step)
            with under(recipe):
                y = layer(x, rotary_pos_emb=self.angles, inference_params=cache)
            for row, (i, count) in enumerate(step.items()):
                found.append(
                    (y[row, :count], self.expected[key][i][0][running[i] : running[i] + count])
                )
                running[i] += count
            order = [i for i, done in running.items() if done < self.lengths[i]]
            draw.shuffle(order)
            running = {i: running[i] for i in order}
        actual, expected = (torch.cat([pair[side] for pair in found]) for side in (0, 1))
        return [difference(actual, expected)]


class Subjects:
    """All operations with their pools; the same seed gives the same values."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int):
        torch.manual_seed(seed)
        sizes = SIZES[device]
        lengths = [
            random.Random(seed + i).randint(1, sizes.lengths[1]) for i in range(sizes.lengths[0])
        ]
        lengths[:4] = [1, 64, 129, 33]

        def rows(name: str, call: Any, width: int, **more: Any) -> RowOperation:
            return RowOperation(name, call, width, sizes, device, dtype, **more)

        hidden, inner = sizes.widths[0], sizes.widths[1]
        outputs: dict[str, Any] = {"params_dtype": dtype, "device": device}
        targets = torch.randint(sizes.classes, (sizes.rows,), device=device)

        def entropy(x: Tensor, index: Tensor) -> Tensor:
            return te.parallel_cross_entropy(x[:, None], targets[index][:, None])[:, 0]

        head = torch.randn(2000, hidden, device=device).to(dtype).requires_grad_()

        def linear_entropy(x: Tensor, index: Tensor) -> Tensor:
            return te.fused_linear_cross_entropy(x, head, targets[index] % 2000, reduce_loss=False)

        chain = te.ops.Sequential(
            te.ops.RMSNorm(hidden, dtype=dtype, device=device),
            te.ops.Linear(hidden, 2 * inner, dtype=dtype, device=device),
            te.ops.SwiGLU(),
            te.ops.Linear(inner, hidden, dtype=dtype, device=device),
        )
        self.rows: list[RowOperation] = [
            rows("Linear", te.Linear(hidden, inner, **outputs), hidden),
            rows(
                "LayerNormLinear",
                te.LayerNormLinear(hidden, inner, normalization="RMSNorm", **outputs),
                hidden,
            ),
            rows(
                "LayerNormMLP swiglu",
                te.LayerNormMLP(hidden, inner, activation="swiglu", **outputs),
                hidden,
            ),
            rows(
                "LayerNormMLP gelu",
                te.LayerNormMLP(hidden, inner, activation="gelu", **outputs),
                hidden,
            ),
            GroupedOperation(
                te.GroupedLinear(4, hidden, inner, **outputs), 4, sizes, device, dtype
            ),
            rows("te.ops chain", chain, hidden),
            rows("linear cross entropy", linear_entropy, hidden, takes_index=True),
            rows("LayerNorm", te.LayerNorm(hidden, dtype=dtype, device=device), hidden),
        ]
        if device == "cuda" or sizes.rows <= 256:
            self.rows.append(rows("cross entropy", entropy, sizes.classes, takes_index=True))
        self.attention = AttentionOperation(sizes, lengths, device, dtype)
        self.layer = LayerOperation(sizes, lengths, device, dtype)


def count_differences(
    subjects: Subjects, count: int, seed: int, invariant: bool, deadline: float = float("inf")
) -> Counts:
    """Run `count` compositions: one recipe after another, with the operations in turn, each until its share of time."""
    counts, draw = Counts(), random.Random(seed)
    names = list(RECIPES)
    with te.batch_invariant() if invariant else nullcontext():
        for index, name in enumerate(names):
            recipe, key = RECIPES[name], (name, invariant)
            left = deadline - time.monotonic()
            end = time.monotonic() + left / (len(names) - index)
            for turn in range(count * index // len(names), count * (index + 1) // len(names)):
                operations: list[Any] = [subjects.rows[turn % len(subjects.rows)]]
                operations.append(
                    subjects.attention if turn % 2 and recipe is None else subjects.layer
                )
                for operation in operations:
                    counts.compare(
                        f"{name}: {operation.name}", operation.compare, draw, recipe, key
                    )
                if turn % 3 == 0 and key in subjects.layer.expected:
                    counts.compare(
                        f"{name}: cached steps", subjects.layer.compare_cached, draw, recipe, key
                    )
                counts.compositions += 1
                if time.monotonic() > end:
                    break
    return counts


class ProbedCase(NamedTuple):
    """Causal sequences with one length: their number, their layout, and the length of a further sequence."""

    batch: int
    length: int
    layout: str
    extra: int = 0


def probe_backends(device: str, runs: int) -> Iterator[dict[str, Any]]:
    """Compare the bits from single attention backends, which te.batch_invariant() does not choose, without a cache.

    Every sequence is compared with the sequence alone: a backend's output, and its gradients for q, k and v from the
    Triton kernels' output and lse. Times are for one sequence with 8192 tokens.

    Yields:
        Differing elements by backend, tensor and case, or a backend's error.
    """
    lengths, heads = (
        ((25, 128, 700, 2048), (32, 8, 128)) if device == "cuda" else ((25, 40), (2, 1, 16))
    )
    cases = [ProbedCase(4, length, layout) for length in lengths for layout in ("bshd", "sbhd")]
    cases += [ProbedCase(4, length, "thd", extra) for length in lengths for extra in (0, 77)]
    for name in ("triton", "cudnn", "flash4") if device == "cuda" else ("reference",):
        row: dict[str, Any] = {"backend": name}
        for case in cases:
            try:
                row["_".join(map(str, case))] = _probe_case(name, case, heads, device)
            except Exception as error:
                row["_".join(map(str, case))] = f"{type(error).__name__}: {error}"[:300]
        if device == "cuda":
            try:
                row["ms"] = _time_backend(name, heads, runs)
            except Exception as error:
                row["ms"] = f"{type(error).__name__}: {error}"[:300]
        yield row


def _attention_call(case: ProbedCase, batch: int, heads: tuple[int, int, int], device: str) -> Any:
    """Describe `batch` sequences with deterministic gradients, without te.batch_invariant()."""
    query_heads, groups, head = heads
    packed = case.layout == "thd"
    longest = max(case.length, case.extra) if batch > 1 else case.length
    return AttentionCall.on(
        device,
        deterministic=1,
        dtype=torch.bfloat16,
        batch=batch + (packed and case.extra > 0 and batch > 1),
        heads=query_heads,
        groups=groups,
        seqlen_q=longest,
        seqlen_kv=longest,
        head_dim_qk=head,
        head_dim_v=head,
        q_format=case.layout,
        kv_format=case.layout,
        mask=resolve("padding_causal" if packed else "causal", (-1, 0), None),
        scale=head**-0.5,
        same_lengths=True,
    )


def _inputs(call: Any, case: ProbedCase, tensors: Sequence[Tensor]) -> AttentionInputs:
    """q, k and v [batch, length, h, d] as a call's inputs; a packed batch ends with a sequence of ones."""
    if case.layout != "thd":
        q, k, v = (_stored(x, case.layout) for x in tensors)
        return AttentionInputs(q, k, v)
    extra = case.extra if call.batch > tensors[0].shape[0] else 0
    q, k, v = (
        torch.cat([x.flatten(0, 1), x.new_ones(extra, *x.shape[2:])]).contiguous() for x in tensors
    )
    lengths = [case.length] * tensors[0].shape[0] + [extra] * (extra > 0)
    starts = _starts(lengths, q.device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    return AttentionInputs(q, k, v, counts, counts, starts, starts)


def _stored(x: Tensor, layout: str) -> Tensor:
    return x if layout == "bshd" else x.transpose(0, 1).contiguous()


def _unstored(x: Tensor, case: ProbedCase, batch: int) -> Tensor:
    """A result as [batch, length, h, d]."""
    if case.layout == "thd":
        return x[: batch * case.length].unflatten(0, (batch, case.length))
    return x if case.layout == "bshd" else x.transpose(0, 1)


def _attend(
    name: str, case: ProbedCase, heads: tuple[int, int, int], tensors: Sequence[Tensor], dy: Tensor
) -> list[Tensor]:
    """Output and gradients [batch, length, h, d]; the gradients from the Triton kernels' (on a CPU: its own) output."""
    batch = tensors[0].shape[0]
    call = _attention_call(case, batch, heads, dy.device.type)
    inputs = _inputs(call, case, tensors)
    with use_backend(attention=name):
        passes = choose_passes(call)
    with use_backend(attention="triton" if dy.is_cuda else name), te.batch_invariant():
        own = choose_passes(replace(call, batch_invariant=True))
        attended = own.forward(replace(call, batch_invariant=True), inputs)
    assert attended.lse is not None
    attended = attended._replace(lse=attended.lse.contiguous())
    output = passes.forward(call, inputs).output
    gradient = _inputs(call, case, [dy] * 3).q.contiguous()
    found = passes.backward(call, inputs, attended, gradient)
    return [_unstored(x, case, batch) for x in (output, found.q, found.k, found.v)]


def _probe_case(
    name: str, case: ProbedCase, heads: tuple[int, int, int], device: str
) -> dict[str, int]:
    """Count differing elements per tensor between sequences in a batch and the sequences alone."""
    torch.manual_seed(case.length)
    q, k, v, dy = (
        torch.randn(case.batch, case.length, count, heads[2], device=device, dtype=torch.bfloat16)
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    together = _attend(name, case, heads, (q, k, v), dy)
    counts: dict[str, int] = dict.fromkeys(("output", "dq", "dk", "dv"), 0)
    alone = ProbedCase(1, case.length, "bshd")
    for i in range(case.batch):
        part = slice(i, i + 1)
        single = _attend(name, alone, heads, (q[part], k[part], v[part]), dy[part])
        for key, whole, one in zip(counts, together, single, strict=True):
            counts[key] += difference(whole[part], one).differing
    return counts


def _time_backend(name: str, heads: tuple[int, int, int], runs: int) -> list[float]:
    """Measure the forward and the deterministic backward pass over one sequence with 8192 tokens, in milliseconds."""
    case = ProbedCase(1, 8192, "bshd")
    q, k, v, dy = (
        torch.randn(1, case.length, count, heads[2], device="cuda", dtype=torch.bfloat16)
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    call = _attention_call(case, 1, heads, "cuda")
    with use_backend(attention=name):
        passes = choose_passes(call)
    inputs = AttentionInputs(q, k, v)
    attended = passes.forward(call, inputs)
    calls: list[Callable[[], Any]] = [
        lambda: passes.forward(call, inputs),
        lambda: passes.backward(call, inputs, attended, dy),
    ]
    return [round(time, 4) for time in measure_in_turns(calls, runs)]


class Pass:
    """Forward and backward pass of a Llama-8B layer, in or outside of te.batch_invariant()."""

    def __init__(self, layer: torch.nn.Module, x: Tensor, recipe: Recipe | None, invariant: bool):
        self.layer, self.x, self.recipe, self.invariant = layer, x, recipe, invariant
        self.dy = torch.randn_like(x)

    def __call__(self) -> None:
        self.x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None
        with te.batch_invariant() if self.invariant else nullcontext():
            with under(self.recipe):
                y = self.layer(self.x)
            y.backward(self.dy)


def measure_layers(runs: int, only: str) -> Iterator[dict[str, dict[str, float]]]:
    """Yield milliseconds without and with te.batch_invariant(), in turns, case by case."""
    layer = llama_layers.MODELS["layer llama8b"].make("cuda")
    for sequence, batch in ((8192, 1), (2048, 4)):
        x = torch.randn(sequence, batch, llama_layers.HIDDEN, dtype=torch.bfloat16, device="cuda")
        x.requires_grad_()
        for name in ("none", "delayed", "block"):
            if only not in (case := f"{name} b{batch} s{sequence}"):
                continue
            recipe = DelayedScaling() if name == "delayed" else RECIPES[name]
            pair = [Pass(layer, x, recipe, invariant) for invariant in (False, True)]
            yield {case: _ratio(*measure_in_turns(pair, runs))}


def _ratio(without: float, within: float) -> dict[str, float]:
    times = {"without_ms": round(without, 4), "with_ms": round(within, 4)}
    return {**times, "ratio": round(within / without, 4)}


class Attention:
    """Forward, or forward and backward, of causal attention with 32 query and 8 key heads of 128."""

    def __init__(self, sequence: int, batch: int, trains: bool, invariant: bool):
        self.invariant, self.trains = invariant, trains
        self.layer = te.DotProductAttention(32, 128, num_gqa_groups=8, attention_dropout=0.0)
        shapes = [(sequence, batch, heads, 128) for heads in (32, 8, 8)]
        self.qkv = [torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        self.dy = torch.randn(sequence, batch, 4096, dtype=torch.bfloat16, device="cuda")
        for x in self.qkv:
            x.requires_grad_(trains)

    def __call__(self) -> None:
        with te.batch_invariant() if self.invariant else nullcontext():
            with torch.set_grad_enabled(self.trains):
                y = self.layer(*self.qkv, qkv_format="sbhd", attn_mask_type="causal")
            if self.trains:
                y.backward(self.dy)


class Decoding:
    """One new token for each of `batch` sequences with `length` cached tokens, in a layer of the same sizes."""

    def __init__(self, batch: int, length: int, invariant: bool):
        self.invariant, self.batch = invariant, batch
        self.layer = te.DotProductAttention(
            32,
            128,
            num_gqa_groups=8,
            attention_dropout=0.0,
            layer_number=1,
            attn_mask_type="causal",
            qkv_format="bshd",
        ).eval()
        self.cache = te.InferenceParams(
            max_batch_size=batch,
            max_sequence_length=length + 4096,
            num_heads_kv=8,
            head_dim_k=128,
            dtype=torch.bfloat16,
        )
        q, k = (
            torch.randn(batch, 1, heads, 128, dtype=torch.bfloat16, device="cuda")
            for heads in (32, 8)
        )
        self.qkv = (q, k, k.clone())
        self.cache.pre_step(dict.fromkeys(range(batch), length))
        long = torch.randn(batch, length, 8, 128, dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            self.layer(
                long.repeat_interleave(4, 2)[:, :, :32], long, long, inference_params=self.cache
            )

    @torch.no_grad()
    def __call__(self) -> None:
        self.cache.pre_step(dict.fromkeys(range(self.batch), 1))
        with te.batch_invariant() if self.invariant else nullcontext():
            self.layer(*self.qkv, inference_params=self.cache)


def measure_attention(runs: int, only: str) -> Iterator[dict[str, dict[str, float]]]:
    """Yield milliseconds of attention alone, and of decoding steps."""
    for sequence, batch in ((8192, 1), (2048, 4)):
        for trains in (False, True):
            kind = "forward and backward" if trains else "forward"
            if only not in (case := f"{kind} b{batch} s{sequence}"):
                continue
            pair = [Attention(sequence, batch, trains, invariant) for invariant in (False, True)]
            yield {case: _ratio(*measure_in_turns(pair, runs))}
    for batch, length in ((64, 8000), (8, 8000), (64, 1000)):
        if only in (case := f"decode b{batch} s{length}"):
            decoding = [Decoding(batch, length, invariant) for invariant in (False, True)]
            yield {case: _ratio(*measure_in_turns(decoding, runs))}


def main() -> None:
    result: argparse.ArgumentParser = parser(
        __doc__, only="time the cases whose name contains this"
    )
    result.add_argument("--compositions", type=int, default=1000, help="random compositions")
    result.add_argument(
        "--control",
        type=int,
        default=40,
        help="compositions without the requirement, for comparison",
    )
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    result.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--runs", type=int, default=10, help="runs per time")
    result.add_argument(
        "--seconds", type=float, default=float("inf"), help="limit; compositions come last"
    )
    result.add_argument(
        "--probe", action="store_true", help="also compare single attention backends"
    )
    result.add_argument("--skip-times", action="store_true", help="count differences only")
    chosen = result.parse_args()
    deadline = time.monotonic() + chosen.seconds
    on_gpu = chosen.device == "cuda"
    te.emulate()  # MXFP8 on a GPU without its products
    figures: dict[str, Any] = {"dtype": chosen.dtype}

    def record(**part: Any) -> None:
        """Print a part of the measurements, and write all of them."""
        figures.update(part)
        print(json.dumps(part), flush=True)
        write(chosen.json, **figures)

    if on_gpu and not chosen.skip_times:
        for name, cases in (("layers", measure_layers), ("attention", measure_attention)):
            figures[name] = {}
            for case in cases(chosen.runs, chosen.only):
                record(**{name: figures[name] | case})
    subjects = Subjects(chosen.device, getattr(torch, chosen.dtype), chosen.seed)
    if chosen.probe:
        probed: list[dict[str, Any]] = []
        for row in probe_backends(chosen.device, chosen.runs):
            probed.append(row)
            record(backends=probed)
    counts = count_differences(subjects, chosen.compositions, chosen.seed, True, deadline)
    record(
        compositions=counts.compositions,
        differing=counts.differing,
        errors=counts.errors,
        invariant=counts.found,
    )
    counts = count_differences(subjects, chosen.control, chosen.seed, False)
    record(
        control_compositions=counts.compositions, control_errors=counts.errors, control=counts.found
    )


if __name__ == "__main__":
    main()
