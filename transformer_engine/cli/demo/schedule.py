"""How far an optimizer goes in a step: the learning rate, and the norm that gradients are cut to."""

from __future__ import annotations

import math

CLIP = 1.0
BETAS = (0.9, 0.95)
DECAY = 0.1  # of matrices; vectors do not decay


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth (at most 100 steps), then a cosine down to a tenth of the peak."""
    warmup = max(1, min(100, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
