"""Choice: how experts are chosen and weighted; and what a router is told before a backend says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch

SOFTMAX, SOFTMAX_AFTER, SIGMOID, SQRTSOFTPLUS = "softmax", "softmax_after", "sigmoid", "sqrtsoftplus"
BYTES, BITS, INDICES = "bytes", "bits", "indices"


class Choice(NamedTuple):
    """The k experts of each token.

    score    SOFTMAX, SIGMOID, SQRTSOFTPLUS of the logits; SOFTMAX_AFTER: the logits, and a softmax over those chosen
    whole    weights are those of all experts, which add up to 1; else of those chosen
    groups   (how many, how many of them are chosen from, by the sum of their k / that many largest); None: one
    scale    what the weights of those chosen are multiplied by
    map      BYTES uint8 [T, E], BITS uint8 [T, ceil(E / 8)], expert e in bit e % 8 of byte e // 8, or INDICES, [T, k]
    """

    k: int
    score: str
    whole: bool = False
    groups: tuple[int, int] | None = None
    scale: float = 1.0
    map: str = BYTES


class RouterRequest(NamedTuple):
    """One operation: "choose", "gradient" and "margins" of logits [T, E], the "loss" of probabilities [rows, columns].

    dtype   of the logits or probabilities that are read;  made  of what is made of them
    keeps   are scores kept for the gradient?
    factor  of a loss; dynamic: it is yet to be divided by a number of tokens on the device, squared
    bins    of a histogram of margins
    """

    operation: str
    shape: tuple[int, int]
    dtype: torch.dtype
    made: torch.dtype
    device: torch.device
    choice: Choice = Choice(1, SOFTMAX)
    keeps: bool = True
    factor: float = 1.0
    dynamic: bool = False
    bins: int = 0
