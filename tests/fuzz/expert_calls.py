"""Bad calls to mixture-of-experts functions (permutation, router, padding) and to the optimizers' methods."""

from __future__ import annotations

from typing import Any

import torch

import transformer_engine.pytorch as te
from tests.fuzz.bad_values import FLAG, NUMBER, OPTIONAL_SIZE, REQUIRED_SIZE, WORD, Call, Made
from tests.fuzz.forward_calls import WRONG_KIND, tensor
from transformer_engine.pytorch import optimizers, router

ROUTES = torch.tensor([[1, 0], [1, 1], [0, 1], [1, 0]])
TOKENS = (*WRONG_KIND, tensor(3, 8), tensor(4))
MAPS = (*WRONG_KIND, ROUTES[:3], ROUTES[0])
PROBS = (*WRONG_KIND, tensor(4, 3))


def expert_calls() -> list[Call]:
    """One call per function."""
    return [*_permutation(), *_router(), *_padding(), *_optimizers()]


def _permutation() -> list[Call]:
    x, probs = tensor(4, 8), tensor(4, 2)
    permuted, rows = te.moe_permute(x, ROUTES, num_out_tokens=5)
    splits, order = torch.tensor([1, 3]), torch.tensor([1, 0])
    chunks = {
        "split_sizes": (*WRONG_KIND, torch.tensor([1, 9])),
        "sorted_index": (*WRONG_KIND, torch.tensor([0, 0])),
    }
    return [
        Call(
            "moe_permute",
            lambda: Made(te.moe_permute, {"inp": x, "routing_map": ROUTES, "num_out_tokens": 5}),
            {
                "inp": TOKENS,
                "routing_map": MAPS,
                "map_type": (WORD, 3, None),
                "num_out_tokens": (2.5, "5", 3),
            },
        ),
        Call(
            "moe_permute_with_probs",
            lambda: Made(
                te.moe_permute_with_probs,
                {"inp": x, "probs": probs, "routing_map": ROUTES, "num_out_tokens": 5},
            ),
            {"inp": TOKENS, "probs": PROBS, "routing_map": MAPS},
        ),
        Call(
            "moe_permute_and_pad_with_probs",
            lambda: Made(
                te.moe_permute_and_pad_with_probs,
                {
                    "inp": x,
                    "probs": probs,
                    "routing_map": ROUTES,
                    "tokens_per_expert": torch.tensor([3, 2]),
                    "align_size": 4,
                },
            ),
            {
                "inp": TOKENS,
                "probs": PROBS,
                "align_size": REQUIRED_SIZE,
                "tokens_per_expert": (
                    *WRONG_KIND,
                    tensor(2),
                    torch.tensor([1, 1]),
                    torch.tensor([3]),
                ),
            },
        ),
        Call(
            "moe_unpermute",
            lambda: Made(
                te.moe_unpermute, {"inp": permuted, "row_id_map": rows, "restore_shape": x.shape}
            ),
            {
                "inp": WRONG_KIND,
                "row_id_map": (*WRONG_KIND, rows.float()),
                "map_type": (WORD, 3, None),
                "merging_probs": (3, "probs", tensor(3, 2)),
            },
        ),
        Call(
            "moe_sort_chunks_by_index",
            lambda: Made(
                te.moe_sort_chunks_by_index,
                {"inp": x, "split_sizes": splits, "sorted_index": order},
            ),
            {"inp": WRONG_KIND, **chunks},
        ),
        Call(
            "moe_sort_chunks_by_index_with_probs",
            lambda: Made(
                te.moe_sort_chunks_by_index_with_probs,
                {"inp": x, "probs": tensor(4), "split_sizes": splits, "sorted_index": order},
            ),
            {"inp": WRONG_KIND, "probs": (*WRONG_KIND, tensor(3)), **chunks},
        ),
    ]


def _router() -> list[Call]:
    logits = torch.linspace(-1, 1, 24).view(3, 8)
    histogram = torch.zeros(8, 4, dtype=torch.int32)
    logits_of = (*WRONG_KIND, tensor(), logits.double(), logits.long(), logits[:0])
    choice = {
        "logits": logits_of,
        "topk": (*REQUIRED_SIZE, 9),
        "score_function": (WORD, 3, None),
        "routing_map_format": (WORD, 7, 0.5, None),
    }
    options = {
        "logits": logits,
        "topk": 2,
        "use_pre_softmax": False,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "score_function": "sigmoid",
        "expert_bias": torch.zeros(8),
    }
    counts = {
        "qb_histogram": histogram,
        "qb_bin_bounds": torch.tensor([0.0, 1.0]),
        "qb_histogram_mode": "two_kernel",
    }
    probs, tokens = logits.softmax(1), torch.ones(8, dtype=torch.int64)
    bad_counts = {
        "qb_histogram": (3, None, histogram.long(), histogram[:4], histogram.t()),
        "qb_bin_bounds": (
            3,
            None,
            torch.tensor([1.0, 0.0]),
            torch.tensor([0.0, 1.0]).double(),
            torch.zeros(3),
        ),
        "qb_histogram_mode": (WORD, 3, None),
    }
    return [
        Call(
            "fused_topk_with_score_function",
            lambda: Made(router.fused_topk_with_score_function, options),
            {
                **choice,
                "use_pre_softmax": FLAG,
                "scaling_factor": NUMBER,
                "num_groups": (2.5, "2"),
                "expert_bias": (3, "bias", tensor(7)),
                "topk_indices": (3, tensor(3, 2), torch.zeros(3, 3, dtype=torch.int64)),
            },
        ),
        Call(
            "fused_topk_with_score_function, counted",
            lambda: Made(router.fused_topk_with_score_function, {**options, **counts}),
            bad_counts,
        ),
        Call(
            "fused_compute_score_for_moe_aux_loss",
            lambda: Made(
                router.fused_compute_score_for_moe_aux_loss,
                {"logits": logits, "topk": 2, "score_function": "sigmoid"},
            ),
            choice,
        ),
        Call(
            "fused_moe_aux_loss",
            lambda: Made(
                router.fused_moe_aux_loss,
                {
                    "probs": probs,
                    "tokens_per_expert": tokens,
                    "total_num_tokens": 3,
                    "num_experts": 8,
                    "topk": 2,
                    "coeff": 0.01,
                },
            ),
            {
                "probs": (*WRONG_KIND, tensor(8), tensor(3, 7)),
                "tokens_per_expert": (*WRONG_KIND, tensor(7)),
                "total_num_tokens": (0, 2.5, "3", None),
                "num_experts": (0, 3, "8", None),
                "topk": REQUIRED_SIZE,
                "coeff": (*NUMBER, None),
            },
        ),
    ]


def _padding() -> list[Call]:
    x, splits = tensor(5, 16), [2, 3]
    wrong = (3, None, "ab", [1, "4"], [2.5, 2.5], [-1, 6], [2], [2, 4])
    return [
        Call(
            kind.__name__,
            lambda kind=kind: Made(kind, {"num_gemms": 2}),
            {"num_gemms": REQUIRED_SIZE, "align_size": OPTIONAL_SIZE},
        )
        for kind in (te.Fp8Padding, te.Fp8Unpadding)
    ] + [
        Call(
            "Fp8Padding.forward",
            lambda: Made(te.Fp8Padding(2, 4), {"inp": x, "m_splits": splits}),
            {"inp": (*WRONG_KIND, x.to_sparse()), "m_splits": wrong},
        ),
    ]


def _optimizers() -> list[Call]:
    def adam(**options: Any) -> optimizers.FusedAdam:
        return optimizers.FusedAdam([torch.nn.Parameter(tensor(4))], **options)

    def sgd(**options: Any) -> optimizers.FusedSGD:
        return optimizers.FusedSGD([torch.nn.Parameter(tensor(4))], **options)

    flags = dict.fromkeys(("bias_correction", "adam_w_mode", "capturable", "master_weights"), FLAG)
    return [
        Call(
            "FusedAdam",
            lambda: Made(adam, {}),
            {
                **flags,
                "lr": (*NUMBER, None),
                "eps": ("1", None),
                "weight_decay": ("1", None),
                "betas": (0.9, "ab", (0.9,), None),
                "amsgrad": (True,),
                "exp_avg_dtype": ("float32", torch.int32),
            },
        ),
        Call(
            "FusedSGD",
            lambda: Made(sgd, {"lr": 0.1}),
            {
                "lr": ("1", None),
                "momentum": ("1", None, -1.0),
                "weight_decay": ("1", None),
                "nesterov": FLAG,
            },
        ),
    ]
