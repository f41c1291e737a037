"""TB/s for norms, activations and RoPE on one GPU, forward and forward + backward, and for a plain copy.

    python benchmarks/norms.py [--json FILE] [--only TEXT]

gpu ms is the median over calls whose launches are all queued before the first runs, the L2 cache overwritten before
each; TB/s counts every input once and every output once. The copy is measured in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from record import GPU, copy_rate, options, parser, select_cases, write

from transformer_engine.pytorch import LayerNorm, RMSNorm
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from transformer_engine.pytorch.functions.activation import activation
from transformer_engine.pytorch.primitives.activation import ACTIVATIONS
from transformer_engine_tools.bench.measure import measure

DTYPE = torch.bfloat16


class Case(NamedTuple):
    """One line of the table: the call, and the elements that it must read and write."""

    name: str
    call: Callable[[], object]
    elements: int


def main() -> None:
    chosen = options(parser(__doc__))
    rows, roofs = [], {}
    print(f"{'case':44} {'gpu ms':>8} {'cpu ms':>8} {'TB/s':>6} {'% of copy':>9}")
    for case in select_cases(cases(), chosen.only):
        gpu, cpu, _ = measure(case.call, GPU)
        assert gpu is not None and cpu is not None
        size = case.elements * DTYPE.itemsize
        rate = size / gpu / 1e9
        roof = roofs.setdefault(size, copy_rate(size))
        rows.append(
            {"case": case.name, "gpu_ms": gpu, "cpu_ms": cpu, "tb_s": rate, "copy_tb_s": roof}
        )
        print(
            f"{case.name:44} {gpu:8.4f} {cpu:8.4f} {rate:6.2f} {100 * rate / roof:8.0f}%",
            flush=True,
        )
    write(chosen.json, cases=rows)


def cases() -> Iterator[Case]:
    yield from norm_cases()
    yield from activation_cases()
    yield from rope_cases()


def norm_cases() -> Iterator[Case]:
    for width in (1024, 2048, 4096, 5120, 8192, 12288, 16384):
        for kind in (LayerNorm, RMSNorm):
            rows = 16384 if width in (4096, 8192) else (1 << 26) // width
            norm, x = kind(width, dtype=DTYPE, device="cuda"), _random(rows, width)
            parameters = tuple(norm.parameters())
            yield Case(f"{kind.__name__} f {rows}x{width}", _forward(norm, x), 2 * x.numel())
            yield Case(
                f"{kind.__name__} fb {rows}x{width}",
                _both(norm, x, x.shape, parameters),
                5 * x.numel(),
            )


def activation_cases() -> Iterator[Case]:
    rows, width = 8192, 14336
    for name in ("gelu", "srelu", "swiglu", "geglu", "clamped_swiglu"):
        gated = ACTIVATIONS[name].gated
        x = _random(rows, 2 * width if gated else width)

        def call(x: torch.Tensor, name: str = name) -> torch.Tensor:
            return activation(name, x)

        outputs = rows * width
        yield Case(f"{name} f {rows}x{width}", _forward(call, x), x.numel() + outputs)
        yield Case(
            f"{name} fb {rows}x{width}", _both(call, x, (rows, width)), 3 * x.numel() + 2 * outputs
        )


def rope_cases() -> Iterator[Case]:
    angles = RotaryPositionEmbedding(128)(max_seq_len=8192).to("cuda")
    for interleaved in (False, True):
        x = _random(8192, 2, 32, 128)

        def call(x: torch.Tensor, interleaved: bool = interleaved) -> torch.Tensor:
            return apply_rotary_pos_emb(
                x, angles, tensor_format="sbhd", interleaved=interleaved, fused=True
            )

        kind = " interleaved" if interleaved else ""
        yield Case(f"rope{kind} f s8192 b2 h32 d128", _forward(call, x), 2 * x.numel())
        yield Case(f"rope{kind} fb s8192 b2 h32 d128", _both(call, x, x.shape), 4 * x.numel())


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def _forward(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            function(x)

    return call


def _both(
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    output_shape: tuple[int, ...],
    parameters: tuple[torch.Tensor, ...] = (),
) -> Callable[[], object]:
    leaf, gradient = x.clone().requires_grad_(), _random(*output_shape)

    def call() -> None:
        leaf.grad = None
        for parameter in parameters:
            parameter.grad = None
        function(leaf).backward(gradient)

    return call


if __name__ == "__main__":
    main()
