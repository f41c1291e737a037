"""Unmodified clients that share a page: the example of each, in a separate process."""

from __future__ import annotations

import re

import pytest

from tests.clients.processes import run
from tests.clients.test_small_clients import NEEDED
from tests.support.programs import ROOT

EXAMPLES = re.findall(
    r"```python-clients\n(.*?)```", (ROOT / "docs" / "other_clients.md").read_text(), re.DOTALL
)
CLIENTS = ("nemo_automodel", "modelopt", "esm", "olmo_core", "vortex", "composer", "thunder", "physicsnemo")

WINDOWED = """
import torch
from nemo_automodel._transformers.te_attention import get_te_attention_stats, inject_te_attention
import transformers

torch.manual_seed(0)
common = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=64)
qwen = transformers.Qwen2Config(**common, use_sliding_window=True, sliding_window=4, max_window_layers=1)
gemma = transformers.Gemma2Config(**common, head_dim=8, sliding_window=4, query_pre_attn_scalar=8,
                                  attn_logit_softcapping=None, attn_implementation="sdpa")
for config, kind in ((qwen, transformers.Qwen2ForCausalLM), (gemma, transformers.Gemma2ForCausalLM)):
    model = kind(config).eval()
    tokens = torch.randint(0, 64, (2, 16))
    before = model(tokens).logits
    inject_te_attention(model)
    torch.testing.assert_close(before, model(tokens).logits, rtol=1e-4, atol=1e-5)
    print(get_te_attention_stats())
"""


@pytest.mark.clients
@pytest.mark.parametrize("client, example", list(zip(CLIENTS, EXAMPLES, strict=True)), ids=list(CLIENTS))
def test_an_example_of_the_page_runs(client, example, tmp_path):
    run(example, NEEDED[client], tmp_path)


@pytest.mark.clients
def test_windows_of_qwen2_and_gemma2_are_those_of_transformers(tmp_path):
    run(WINDOWED, NEEDED["nemo_automodel"], tmp_path)
