"""Calls with arguments in another form, each paired with the same call in plain spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch

import transformer_engine.pytorch as te

HIDDEN, HEADS, TOKENS, BATCH = 64, 4, 8, 2
OFF: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}


class Pair(NamedTuple):
    """Two calls whose results have to be bitwise equal."""

    name: str
    given: Callable[[], Any]
    plain: Callable[[], Any]


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hidden() -> torch.Tensor:
    return sample(TOKENS, BATCH, HIDDEN)


def outcome(
    layer: Callable[[], torch.nn.Module], *inputs: torch.Tensor, **options: Any
) -> tuple[Any, ...]:
    """Outputs from a layer with fixed initial values, and the gradient of its first input."""
    torch.manual_seed(1)
    module = layer()
    x = inputs[0].clone().requires_grad_()
    outputs = module(x, *inputs[1:], **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    tensors = [y for y in outputs if isinstance(y, torch.Tensor)]
    torch.autograd.backward(
        [y for y in tensors if y.requires_grad],
        [torch.ones_like(y) for y in tensors if y.requires_grad],
    )
    return (*tensors, x.grad)


# layer, positional inputs, arguments in another form, arguments in plain form
CONSTRUCTORS: list[tuple[Any, tuple[torch.Tensor, ...], dict[str, Any], dict[str, Any]]] = [
    (
        te.Linear,
        (sample(8, 16),),
        {"in_features": numpy.int64(16), "out_features": numpy.int32(32)},
        {"in_features": 16, "out_features": 32},
    ),
    (
        te.Linear,
        (sample(8, 16),),
        {"in_features": torch.tensor(16), "out_features": torch.tensor(32)},
        {"in_features": 16, "out_features": 32},
    ),
    (
        te.Linear,
        (sample(8, 16),),
        {"in_features": 16.0, "out_features": 32.0},
        {"in_features": 16, "out_features": 32},
    ),
    (
        te.Linear,
        (sample(8, 16),),
        {"in_features": 16, "out_features": 32, "bias": torch.tensor(False)},
        {"in_features": 16, "out_features": 32, "bias": False},
    ),
    (
        te.Linear,
        (sample(8, 16),),
        {"in_features": 16, "out_features": 32, "return_bias": numpy.bool_(True)},
        {"in_features": 16, "out_features": 32, "return_bias": True},
    ),
    (
        te.Linear,
        (sample(8, 16),),
        {"in_features": 16, "out_features": 32, "bias": 2, "tp_size": 1.0},
        {"in_features": 16, "out_features": 32},
    ),
    (
        te.Linear,
        (sample(8, 16),),
        {"in_features": 16, "out_features": 32, "name": 7},
        {"in_features": 16, "out_features": 32},
    ),
    (
        te.Linear,
        (sample(8, 16),),
        {
            "in_features": 16,
            "out_features": 32,
            "parameters_split": {"a": numpy.int64(8), "b": torch.tensor(24)},
        },
        {"in_features": 16, "out_features": 32, "parameters_split": {"a": 8, "b": 24}},
    ),
    (
        te.LayerNormLinear,
        (sample(8, 16),),
        {"in_features": 16, "out_features": 32, "eps": torch.tensor(0.125)},
        {"in_features": 16, "out_features": 32, "eps": 0.125},
    ),
    (
        te.LayerNormLinear,
        (sample(8, 16),),
        {"in_features": 16, "out_features": 32, "zero_centered_gamma": 1},
        {"in_features": 16, "out_features": 32, "zero_centered_gamma": True},
    ),
    (
        te.LayerNormMLP,
        (sample(8, 16),),
        {"hidden_size": 16, "ffn_hidden_size": 32, "eps": numpy.float32(0.125)},
        {"hidden_size": 16, "ffn_hidden_size": 32, "eps": 0.125},
    ),
    (
        te.LayerNormMLP,
        (sample(8, 16),),
        {"hidden_size": 16, "ffn_hidden_size": 32, "seq_length": 0, "micro_batch_size": 0},
        {"hidden_size": 16, "ffn_hidden_size": 32},
    ),
    (
        te.LayerNormMLP,
        (sample(8, 16),),
        {
            "hidden_size": 16,
            "ffn_hidden_size": 32,
            "activation": "clamped_swiglu",
            "activation_params": {"limit": torch.tensor(0.5), "alpha": numpy.float64(1.5)},
        },
        {
            "hidden_size": 16,
            "ffn_hidden_size": 32,
            "activation": "clamped_swiglu",
            "activation_params": {"limit": 0.5, "alpha": 1.5},
        },
    ),
    (
        te.LayerNorm,
        (sample(8, 16),),
        {"normalized_shape": torch.tensor([16])},
        {"normalized_shape": 16},
    ),
    (
        te.LayerNorm,
        (sample(8, 16),),
        {"normalized_shape": (size for size in (8, 16))},
        {"normalized_shape": (8, 16)},
    ),
    (te.LayerNorm, (sample(8, 16),), {"hidden_size": 16.0}, {"normalized_shape": 16}),
    (
        te.RMSNorm,
        (sample(8, 16),),
        {"normalized_shape": numpy.array([16]), "eps": torch.tensor(0.125)},
        {"normalized_shape": 16, "eps": 0.125},
    ),
    (
        te.GroupedLinear,
        (sample(8, 16), [4, 4]),
        {
            "num_gemms": numpy.int64(2),
            "in_features": 16,
            "out_features": 32,
            "use_grouped_tensor": 0,
        },
        {"num_gemms": 2, "in_features": 16, "out_features": 32},
    ),
    (
        te.MultiheadAttention,
        (hidden(),),
        {"hidden_size": HIDDEN, "num_attention_heads": 5, "attention_dropout": 0},
        {
            "hidden_size": HIDDEN,
            "num_attention_heads": 5,
            "kv_channels": 12,
            "attention_dropout": 0.0,
        },
    ),
    (
        te.MultiheadAttention,
        (hidden(),),
        {
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "return_layernorm_output": True,
            "attention_dropout": 0.0,
        },
        {"hidden_size": HIDDEN, "num_attention_heads": 4, "attention_dropout": 0.0},
    ),
    (
        te.TransformerLayer,
        (hidden(),),
        {"hidden_size": HIDDEN, "ffn_hidden_size": 128, "num_attention_heads": 5, **OFF},
        {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 128,
            "num_attention_heads": 5,
            "kv_channels": 12,
            **OFF,
        },
    ),
    (
        te.TransformerLayer,
        (hidden(),),
        {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 128,
            "num_attention_heads": 4,
            "layer_number": 0,
            "layernorm_epsilon": torch.tensor(0.125),
            **OFF,
        },
        {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 128,
            "num_attention_heads": 4,
            "layernorm_epsilon": 0.125,
            **OFF,
        },
    ),
]


def constructor_pairs() -> Iterator[Pair]:
    """Yield layers constructed with arguments in another form."""
    for number, (kind, inputs, argument, plain) in enumerate(CONSTRUCTORS):
        device = {} if "device" in argument else {"device": "cpu"}
        changed = [
            name for name in argument if name not in plain or argument[name] is not plain[name]
        ]
        yield Pair(
            f"{number} {kind.__name__}({', '.join(changed)})",
            lambda kind=kind, inputs=inputs, options=argument, device=device: outcome(
                lambda: kind(**options, **device), *inputs
            ),
            lambda kind=kind, inputs=inputs, plain=plain, device=device: outcome(
                lambda: kind(**plain, **device), *inputs
            ),
        )


def sample_heads(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(sample(tokens, BATCH, HEADS, 16, seed=seed) for seed in (1, 2, 3))  # pyright: ignore[reportReturnType]


DPA_CONSTRUCTORS: list[tuple[tuple[Any, Any], dict[str, Any], dict[str, Any]]] = [
    ((numpy.int64(4), numpy.int32(16)), {}, {}),
    ((torch.tensor(4), 16.0), {}, {}),
    ((4, [16, numpy.int64(16)]), {}, {}),
    ((4, 16), {"softmax_scale": torch.tensor(0.25)}, {"softmax_scale": 0.25}),
    ((4, 16), {"layer_number": 0}, {}),
    ((4, 16), {"num_gqa_groups": 4.0, "attention_dropout": numpy.float32(0)}, {}),
    ((4, 16), {"window_size": [4.0, 0.0]}, {"window_size": (4, 0)}),
    ((4, 16), {"window_size": numpy.array([4, 0])}, {"window_size": (4, 0)}),
    ((4, 16), {"return_max_logit": 1}, {"return_max_logit": True}),
]


def attention_constructor_pairs() -> Iterator[Pair]:
    """Yield attentions constructed with arguments in another form."""
    for number, (sizes, argument, plain) in enumerate(DPA_CONSTRUCTORS):
        yield Pair(
            f"{number} DotProductAttention{sizes!r} {', '.join(argument)}",
            lambda sizes=sizes, options=argument: outcome(
                lambda: te.DotProductAttention(*sizes, **options), *sample_heads()
            ),
            lambda plain=plain: outcome(
                lambda: te.DotProductAttention(4, 16, **plain), *sample_heads()
            ),
        )


FLAGS_OF_FORWARD: list[tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
    (
        te.Linear,
        (16, 32),
        {"is_first_microbatch": torch.tensor(True)},
        {"is_first_microbatch": True},
    ),
    (te.Linear, (16, 32), {"is_first_microbatch": 2}, {"is_first_microbatch": True}),
    (te.Linear, (16, 32), {"fp8_output": True}, {}),
    (te.Linear, (16, 32), {"fp8_grad": torch.tensor(True)}, {}),
    (te.LayerNormLinear, (16, 32), {"fp8_output": 1, "fp8_grad": 1}, {}),
    (
        te.LayerNormMLP,
        (16, 32),
        {"is_first_microbatch": numpy.bool_(True)},
        {"is_first_microbatch": True},
    ),
]


def forward_pairs() -> Iterator[Pair]:
    """Yield forward calls on layers with products."""
    for number, (kind, sizes, argument, plain) in enumerate(FLAGS_OF_FORWARD):
        yield Pair(
            f"{number} {kind.__name__}.forward({', '.join(argument)})",
            lambda kind=kind, sizes=sizes, options=argument: outcome(
                lambda: kind(*sizes, device="cpu"), sample(8, 16), **options
            ),
            lambda kind=kind, sizes=sizes, plain=plain: outcome(
                lambda: kind(*sizes, device="cpu"), sample(8, 16), **plain
            ),
        )


SPLITS = {
    "ndarray": numpy.array([5, 3]),
    "float ndarray": numpy.array([5.0, 3.0]),
    "floats": [5.0, 3.0],
    "float tensor": torch.tensor([5.0, 3.0]),
    "int32 tensor": torch.tensor([5, 3], dtype=torch.int32),
    "list of tensors": [torch.tensor(5), torch.tensor(3)],
    "generator": None,
}


def split_pairs() -> Iterator[Pair]:
    """Yield group row counts in other forms, for the three modules that take them."""
    for name, splits in SPLITS.items():

        def make_argument(splits: Any = splits) -> Any:
            return (rows for rows in (5, 3)) if splits is None else splits

        yield Pair(
            f"GroupedLinear m_splits {name}",
            lambda argument=make_argument: outcome(
                lambda: te.GroupedLinear(2, 16, 32, device="cpu"), sample(8, 16), argument()
            ),
            lambda: outcome(
                lambda: te.GroupedLinear(2, 16, 32, device="cpu"), sample(8, 16), [5, 3]
            ),
        )
        yield Pair(
            f"Fp8Padding m_splits {name}",
            lambda argument=make_argument: te.Fp8Padding(2, 16.0)(sample(8, 16), argument()),
            lambda: te.Fp8Padding(2, 16)(sample(8, 16), [5, 3]),
        )
        yield Pair(
            f"Fp8Unpadding m_splits {name}",
            lambda argument=make_argument: te.Fp8Unpadding(2, numpy.int64(16))(
                sample(32, 16), argument()
            ),
            lambda: te.Fp8Unpadding(2, 16)(sample(32, 16), [5, 3]),
        )


def all_pairs() -> list[Pair]:
    return [
        *constructor_pairs(),
        *attention_constructor_pairs(),
        *forward_pairs(),
        *split_pairs(),
    ]
