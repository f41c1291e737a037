"""Block scales in compiled products: a copy in cuBLASLt's layout has the form that its pass expects."""

from __future__ import annotations

import pytest
import torch

from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D
from transformer_engine.pytorch.fast.recorded_products import SymbolicOperand, _scales
from transformer_engine.pytorch.fast.symbols import Apply, Instructions, TensorLayout
from transformer_engine.pytorch.primitives.gemm.block_scales import block_scale_memory
from transformer_engine.pytorch.primitives.operand import Operand


@pytest.mark.parametrize(("rows", "depth"), [(256, 512), (256, 384), (128, 128), (640, 1152)])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows contiguous", "blocks contiguous"])
@pytest.mark.parametrize("form", [BLOCK_1D, BLOCK_2D], ids=["1x128", "128x128"])
def test_scales_are_copied_where_the_layout_differs(form, transposed, rows, depth):
    blocks = depth // 128
    shape = (rows, blocks) if form == BLOCK_1D else (rows // 128, blocks)
    scale = torch.rand(shape) if transposed else torch.rand(shape[::-1]).t()
    codes = torch.zeros(rows, depth, dtype=torch.uint8)
    operand = Operand(codes, scale, form, None, torch.bfloat16)
    instructions = Instructions([codes, scale], torch.device("cpu"))
    symbols = instructions.symbols()
    (listed,) = _scales(SymbolicOperand(*operand._replace(codes=symbols[0], scale=symbols[1])))
    expected = block_scale_memory(operand, codes.shape)
    assert TensorLayout.of(expected) == listed.layout
    copies = [step for step in instructions.steps if isinstance(step, Apply)]
    assert len(copies) == (expected is not scale)
    for copy in copies:
        (result,) = copy.function(scale)
        assert torch.equal(result, expected) and TensorLayout.of(result) == listed.layout
