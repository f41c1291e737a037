"""GPU ms for kernels that quantize their results, and for separate steps; softmax, dropout, packed RoPE. One GPU.

    python benchmarks/fused.py [--json FILE] [--only TEXT]

GPU ms is the median over calls whose launches are all queued before the first runs, the L2 cache overwritten before
each. `bytes` counts each input and output of the fused call once; TB/s is `bytes` over its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from record import GPU, options, parser, select_cases, write

from transformer_engine.common.formats import BLOCK_1D, E4M3, E5M2, FLOAT8
from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb
from transformer_engine.pytorch.primitives import activation, norm
from transformer_engine.pytorch.primitives.column_sums import column_sums
from transformer_engine.pytorch.primitives.dropout import (
    bias_dropout_add_forward,
    dropout_backward,
    dropout_forward,
)
from transformer_engine.pytorch.primitives.quantize import Cast, QuantizeSpec, quantize
from transformer_engine.pytorch.primitives.rope import (
    Positions,
    RopeSpec,
    rope_backward,
    rope_qkv_backward,
    rope_qkv_forward,
)
from transformer_engine.pytorch.primitives.softmax import (
    scaled_softmax_backward,
    scaled_softmax_forward,
)
from transformer_engine_tools.bench.measure import measure

DTYPE = torch.bfloat16
PARAMS = activation.DEFAULT_PARAMS
SCORES = (
    ((4, 16, 2048, 2048), None),
    ((4, 16, 2048, 2048), "top_left"),
    ((1, 4, 8192, 8192), None),
    ((1, 2, 8192, 16384), None),
    ((1, 2, 4096, 32768), None),
)


class Case(NamedTuple):
    """One line: the fused call, the separate calls it replaces, and the bytes that it must move."""

    name: str
    fused: Callable[[], object]
    separate: Callable[[], object]
    size: float


def main() -> None:
    chosen = options(parser(__doc__))
    rows = []
    print(
        f"{'case':52} {'fused ms':>9} {'separate':>9} {'ratio':>6} {'TB/s':>6} {'host us':>8} {'separate':>8}"
    )
    for case in select_cases(cases(), chosen.only):
        (gpu, cpu, _), (separate, separate_cpu, _) = (
            measure(x, GPU) for x in (case.fused, case.separate)
        )
        assert (
            gpu is not None
            and cpu is not None
            and separate is not None
            and separate_cpu is not None
        )
        rate = case.size / gpu / 1e9
        rows.append(
            {
                "case": case.name,
                "gpu_ms": gpu,
                "separate_gpu_ms": separate,
                "ratio": gpu / separate,
                "tb_s": rate,
                "cpu_ms": cpu,
                "separate_cpu_ms": separate_cpu,
            }
        )
        print(
            f"{case.name:52} {gpu:9.4f} {separate:9.4f} {gpu / separate:6.2f} {rate:6.2f}"
            f" {cpu * 1e3:8.1f} {separate_cpu * 1e3:8.1f}",
            flush=True,
        )
        write(chosen.json, cases=rows)


def cases() -> Iterator[Case]:
    yield from norm_cases()
    yield from activation_cases()
    yield from bias_cases()
    yield from softmax_cases()
    yield from dropout_cases()
    yield from rope_cases()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def _scalings() -> Iterator[tuple[str, QuantizeSpec, dict[str, torch.Tensor], int, int]]:
    """Yield (name, spec, quantize arguments, bytes per element in codes and in an intermediate result)."""
    delayed = {"scale": torch.tensor([8.0], device="cuda"), "record": torch.zeros(1, device="cuda")}
    for columnwise in (False, True):
        spec = QuantizeSpec(FLOAT8, E4M3, True, columnwise)
        yield f"delayed {'both' if columnwise else 'row'}", spec, delayed, 1 + columnwise, 0
    for columnwise in (False, True):
        spec = QuantizeSpec(FLOAT8, E4M3, True, columnwise)
        yield f"current {'both' if columnwise else 'row'}", spec, {}, 1 + columnwise, 2 * 2
    for columnwise in (False, True):
        spec = QuantizeSpec(BLOCK_1D, E4M3, True, columnwise, power_of_two=True)
        yield f"block {'both' if columnwise else 'row'}", spec, {}, 1 + columnwise, 0


def norm_cases() -> Iterator[Case]:
    for rows, width in ((8192, 4096), (8192, 8192), (8192, 12288), (2048, 4096)):
        x, gamma = _random(rows, width), _random(width)
        for name, spec, argument, codes, stored in _scalings():
            if name == "block both":  # separate steps
                continue

            def fused(x=x, gamma=gamma, spec=spec, value=argument) -> object:
                return norm.rmsnorm_forward(x, gamma, 1e-5, False, Cast(spec, *value.values()))

            def separate(x=x, gamma=gamma, spec=spec, options=argument) -> object:
                y, rstdev = norm.rmsnorm_forward(x, gamma, 1e-5, False)
                return quantize(y, spec, **options), rstdev

            size = x.numel() * (2 + codes + stored)
            yield Case(f"rmsnorm {rows}x{width} {name}", fused, separate, size)

            def fused_layer(x=x, gamma=gamma, spec=spec, value=argument) -> object:
                return norm.layernorm_forward(
                    x, gamma, gamma, 1e-5, False, Cast(spec, *value.values())
                )

            def separate_layer(x=x, gamma=gamma, spec=spec, options=argument) -> object:
                y, *statistics = norm.layernorm_forward(x, gamma, gamma, 1e-5, False)
                return quantize(y, spec, **options), statistics

            yield Case(f"layernorm {rows}x{width} {name}", fused_layer, separate_layer, size)


def activation_cases() -> Iterator[Case]:
    for kind, rows, width in (
        ("gelu", 8192, 14336),
        ("swiglu", 8192, 14336),
        ("swiglu", 2048, 11008),
    ):
        gated = activation.ACTIVATIONS[kind].gated
        x, dy = _random(rows, 2 * width if gated else width), _random(rows, width)
        for name, spec, argument, codes, stored in _scalings():

            def fused(kind=kind, x=x, spec=spec, value=argument) -> object:
                return activation.activation_forward(kind, x, PARAMS, Cast(spec, *value.values()))

            def separate(kind=kind, x=x, spec=spec, options=argument) -> object:
                return quantize(activation.activation_forward(kind, x, PARAMS), spec, **options)

            size = 2 * x.numel() + dy.numel() * (codes + stored)
            yield Case(f"{kind} f {rows}x{x.shape[1]} {name}", fused, separate, size)

            back = replace(spec, element=E5M2)
            for bias in (None, DTYPE):
                if not activation.gradient_fuses(back, bias is not None):
                    continue

                def fused_back(
                    kind=kind, x=x, dy=dy, spec=back, value=argument, bias=bias
                ) -> object:
                    return activation.activation_backward(
                        kind, dy, x, PARAMS, Cast(spec, *value.values()), bias
                    )

                def separate_back(
                    kind=kind, x=x, dy=dy, spec=back, options=argument, bias=bias
                ) -> object:
                    dx = activation.activation_backward(kind, dy, x, PARAMS)
                    sums = None if bias is None else dx.sum(0, dtype=torch.float32).to(bias)
                    return quantize(dx, spec, **options), sums

                size = 2 * dy.numel() + x.numel() * (2 + codes + stored)
                label = f"{kind} b{'' if bias is None else ' dbias'} {rows}x{x.shape[1]} {name}"
                yield Case(label, fused_back, separate_back, size)


def bias_cases() -> Iterator[Case]:
    for rows, width in ((8192, 4096), (8192, 14336), (2048, 4096)):
        x = _random(rows, width)
        for name, spec, argument, codes, stored in _scalings():

            def fused(x=x, spec=spec, value=argument) -> object:
                return column_sums(x, DTYPE, Cast(spec, *value.values()))

            def separate(x=x, spec=spec, options=argument) -> object:
                return quantize(x, spec, **options), x.sum(0, dtype=torch.float32).to(DTYPE)

            size = x.numel() * (2 + codes + stored // 2)  # the second read hits the cache
            yield Case(f"cast dbias {rows}x{width} {name}", fused, separate, size)


def softmax_cases() -> Iterator[Case]:
    for shape, causal in SCORES:
        x = _random(*shape)
        y, dy = scaled_softmax_forward(x, 0.1, causal=causal), _random(*shape)
        observed = (
            None
            if causal is None
            else torch.ones(shape[-2:], dtype=torch.bool, device="cuda").tril()
        )

        def plain(x=x, records=observed) -> object:
            score = x * 0.1
            return torch.softmax(
                score if records is None else score.masked_fill(~records, float("-inf")), -1
            )

        def plain_backward(dy=dy, y=y) -> object:
            return torch.ops.aten._softmax_backward_data(dy, y, -1, DTYPE) * 0.1

        def forward(x=x, causal=causal) -> object:
            return scaled_softmax_forward(x, 0.1, causal=causal)

        def backward(dy=dy, y=y, causal=causal) -> object:
            return scaled_softmax_backward(dy, y, 0.1, causal=causal)

        share = 1.0 if causal is None else 0.5
        label = f"{'x'.join(map(str, shape))}{'' if causal is None else ' causal'}, against torch"
        yield Case(f"softmax f {label}", forward, plain, x.numel() * 2 * (share + 1))
        yield Case(f"softmax b {label}", backward, plain_backward, x.numel() * 2 * (2 * share + 1))


def dropout_cases() -> Iterator[Case]:
    x, residual, bias = _random(8192, 4096), _random(8192, 4096), _random(4096)
    _, mask = dropout_forward(x, 0.1)
    _, torch_mask = torch.native_dropout(x, 0.1, True)

    def plain() -> object:
        return torch.native_dropout(x, 0.1, True)

    yield Case(
        "dropout f 8192x4096, against torch",
        lambda: dropout_forward(x, 0.1),
        plain,
        4.125 * x.numel(),
    )
    yield Case(
        "dropout b 8192x4096, against torch",
        lambda: dropout_backward(x, mask, 0.1),
        lambda: torch.ops.aten.native_dropout_backward(x, torch_mask, 1 / 0.9),
        4.125 * x.numel(),
    )
    yield Case(
        "bias dropout add 8192x4096, against torch",
        lambda: bias_dropout_add_forward(x, bias, residual, 0.1),
        lambda: residual + torch.nn.functional.dropout(x + bias, 0.1),
        6.125 * x.numel(),
    )


def rope_cases() -> Iterator[Case]:
    sizes, spec, positions = (512, 128, 128), RopeSpec("sbhd"), Positions()
    qkv = _random(8192, 2, 8, sum(sizes))
    angles = torch.randn(8192, 128, device="cuda")
    freqs = angles[:, None, None]
    q, k, v = rope_qkv_forward(qkv, angles, angles, positions, sizes, spec)

    def separate() -> object:
        q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, sizes)
        return q, k, v.contiguous()

    def separate_backward() -> object:
        dq = rope_backward(q, angles, positions, spec).view(*k.shape[:-1], sizes[0])
        return torch.cat((dq, rope_backward(k, angles, positions, spec), v), -1)

    yield Case(
        "rope qkv f 8192x2x(32+8+8)x128",
        lambda: rope_qkv_forward(qkv, angles, angles, positions, sizes, spec),
        separate,
        4 * qkv.numel(),
    )
    yield Case(
        "rope qkv b 8192x2x(32+8+8)x128",
        lambda: rope_qkv_backward(q, k, v, angles, angles, positions, sizes, spec),
        separate_backward,
        4 * qkv.numel(),
    )


if __name__ == "__main__":
    main()
