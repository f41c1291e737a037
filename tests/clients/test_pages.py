"""The examples of the pages on accelerate, Lightning, peft and Hugging Face, each page in a separate process."""

from __future__ import annotations

import re

import pytest

from tests.clients import installed, processes
from tests.support.programs import ROOT

PAGES = {
    "accelerate": ("accelerate", "transformers"),
    "lightning": ("lightning",),
    "peft": ("peft", "transformers"),
    "huggingface": ("transformers",),
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=installed.needs(*clients)) for page, clients in PAGES.items()]
)
def test_the_examples_of_a_page_run(page, tmp_path):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    examples = re.findall(r"```python-clients\n(.*?)```", text, re.DOTALL)
    assert examples
    processes.output(["-c", "\n".join(examples)], tmp_path)
