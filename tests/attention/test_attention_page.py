"""The attention page shows the backends' choices and the measurements."""

from __future__ import annotations

import os

from tests.support import forked
from tests.support.programs import ROOT


def test_the_attention_page_is_up_to_date():
    forked.output([str(ROOT / "docs" / "attention_table.py"), "--check"], ROOT, os.environ)
