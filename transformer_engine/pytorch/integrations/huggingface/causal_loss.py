"""loss = mean(-ln(softmax(logits [b, s, V])[next token])), as transformers' causal language models call it.

Their own makes a float32 copy of the logits, the largest tensor of a step; this reads them in their dtype and computes
in float32.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...cross_entropy import parallel_cross_entropy


def causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The mean over the tokens that count, or the sum over them divided by num_items_in_batch.

    The logits stay whole: callers read them after the backward.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows = logits.reshape(1, -1, vocab_size)
    targets = shift_labels.reshape(1, -1).to(logits.device)
    mean = num_items_in_batch is None
    loss = parallel_cross_entropy(rows, targets, reduce_loss=mean, ignore_idx=ignore_index, keep_logits=True)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss.sum() / num_items_in_batch
