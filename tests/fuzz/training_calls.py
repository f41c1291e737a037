"""Bad calls to the losses and to the tensor-list operations."""

from __future__ import annotations

from typing import Any

import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from tests.fuzz.bad_values import FLAG, GROUP, NUMBER, SIZE, Call, Made
from tests.fuzz.forward_calls import WRONG_KIND, tensor

SMOOTHING = (-0.1, float("nan"), "0.1", None)
IGNORED = (2.5, "16", None, [16])
ADAM = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "epsilon": 1e-8,
    "step": 1,
    "mode": 1,
    "bias_correction": 1,
}


def training_calls() -> list[Call]:
    """One call per function."""
    return [*_losses(), *_lists()]


def _losses() -> list[Call]:
    logits, target = tensor(2, 3, 11), torch.tensor([[0, 10, -100], [1, 2, 3]])
    targets = (
        *WRONG_KIND,
        tensor(2, 3),
        target[:1],
        torch.full((2, 3), 11),
        torch.full((2, 3), -1),
    )
    shared = {
        "target": targets,
        "label_smoothing": SMOOTHING,
        "reduce_loss": FLAG,
        "ignore_idx": IGNORED,
    }
    values = (*WRONG_KIND, tensor(2, 3, 11, dtype=torch.int64))
    weights = (*WRONG_KIND, tensor(11, 7), tensor(11), tensor(11, 8).half())
    hidden = (*WRONG_KIND, tensor(2, 3, 7), tensor(2, 3, 8, dtype=torch.float64), tensor())
    return [
        Call(
            "parallel_cross_entropy",
            lambda: Made(te.parallel_cross_entropy, {"inp": logits, "target": target}),
            {
                **shared,
                "inp": (*values, tensor(6, 11)),
                "dist_process_group": GROUP,
                "is_cg_capturable": FLAG,
                "overwrite_input": FLAG,
            },
        ),
        Call(
            "fused_linear_cross_entropy",
            lambda: Made(
                te.fused_linear_cross_entropy,
                {"hidden": tensor(2, 3, 8), "weight": tensor(11, 8), "target": target},
            ),
            {
                **shared,
                "hidden": hidden,
                "weight": weights,
                "precise": FLAG,
                "bias": (3, "bias", tensor(10), tensor(11, 1), tensor(11).half()),
            },
        ),
    ]


def _lists() -> list[Call]:
    flag = torch.zeros(1, dtype=torch.int32)
    flags = (*WRONG_KIND, tensor(1), torch.zeros(2, dtype=torch.int32))
    two = [[tensor(4)], [tensor(4)]]
    lists = (
        3,
        None,
        "ab",
        [],
        two[:1],
        [two[0], []],
        [[3], [4]],
        [two[0], [tensor(5)]],
        [two[0], [target()]],
    )
    number = {"scale": ("1.0", [1.0], None)}
    calls = [
        _make_call(
            "multi_tensor_scale",
            {"tensor_lists": two, "scale": 2.0},
            {"tensor_lists": lists, **number},
            flag,
            flags,
        ),
        _make_call(
            "multi_tensor_l2norm",
            {"tensor_lists": two[:1]},
            {"tensor_lists": (*lists[:4], two, [[3]])},
            flag,
            flags,
        ),
        _make_call(
            "multi_tensor_unscale_l2norm",
            {"tensor_lists": two[:1], "inv_scale": tensor(1)},
            {"tensor_lists": lists[:4], "inv_scale": (*WRONG_KIND, tensor(2))},
            flag,
            flags,
        ),
    ]
    four = {"tensor_lists": [[tensor(4)] for _ in range(4)], **ADAM, "weight_decay": 0.0}
    steps = tuple(value for value in SIZE if value is not True)
    bad = {
        "tensor_lists": lists,
        "lr": (*NUMBER, None),
        "beta1": (*NUMBER, None),
        "step": steps,
        "mode": (2, -1),
    }
    return [*calls, _make_call("multi_tensor_adam", four, bad, flag, flags)]


def target() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64)


def _make_call(
    name: str, arguments: dict[str, Any], bad: dict[str, Any], flag: torch.Tensor, flags: Any
) -> Call:
    options = {"chunk_size": 65536, "noop_flag": flag, **arguments}
    return Call(
        f"tex.{name}", lambda: Made(getattr(tex, name), options), {**bad, "noop_flag": flags}
    )
