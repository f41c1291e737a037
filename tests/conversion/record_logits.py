"""Record the logits of `transformers` for the tiny models: python tests/conversion/record_logits.py

The program needs `pip install transformers`. Without transformers, the tests compare with the record.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers

from tests.conversion.tiny_models import COLUMNS, GOLDEN, SETTINGS, tokens, weights


def theirs(name: str) -> torch.nn.Module:
    """Return the model of transformers; its weights must match its settings exactly."""
    settings = dict(SETTINGS[name])
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    given = weights(SETTINGS[name])
    left = set(model.state_dict()) - set(given)
    assert left <= {"lm_head.weight"}, left
    model.load_state_dict(given, strict=not left)
    model.tie_weights()
    return model


@torch.no_grad()
def logits(name: str) -> torch.Tensor:
    return theirs(name)(tokens()).logits


def _round_logits(values: Any) -> Any:
    """Return nested lists of float32 numbers with nine digits, which represent them exactly."""
    return (
        [_round_logits(value) for value in values]
        if isinstance(values, list)
        else float(f"{values:.9g}")
    )


if __name__ == "__main__":
    recorded = {name: _round_logits(logits(name)[..., COLUMNS].tolist()) for name in SETTINGS}
    content = {"transformers": transformers.__version__, "logits": recorded}
    GOLDEN.write_text(json.dumps(content, separators=(",", ":")).replace("]],", "]],\n") + "\n")
