"""transformer_engine.pytorch.utils: layouts for gated weights."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch import utils


@pytest.mark.parametrize("shape", [(12, 5), (12,), (24, 2, 3)])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_interleaved_glu_tensors_alternate_gate_and_product_blocks(shape, size):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    gate, product = tensor.chunk(2)
    blocks = [part[i : i + size] for i in range(0, len(gate), size) for part in (gate, product)]
    transposed = te.interleave_glu_tensor(tensor, size)
    assert torch.equal(transposed, torch.cat(blocks)) and transposed.is_contiguous()
    back = te.deinterleave_glu_tensor(transposed, size)
    assert (
        torch.equal(back, tensor)
        and back.is_contiguous()
        and back.data_ptr() != transposed.data_ptr()
    )


@pytest.mark.parametrize("change", [te.interleave_glu_tensor, te.deinterleave_glu_tensor])
def test_partial_row_blocks_are_rejected(change):
    for shape in ((10, 4), ()):
        with pytest.raises(ValueError, match=r"is no multiple of 2 interleave_size = 8"):
            change(torch.zeros(shape), 4)
    with pytest.raises(ValueError, match="interleave_size=0 is below 1"):
        change(torch.zeros(8, 4), 0)
    with pytest.raises(TypeError, match=r"tensor is \[1\]"):
        change([1], 1)


@pytest.mark.parametrize(
    ("capability", "supported"),
    [((9, 0), False), ((10, 0), True), ((12, 0), False), ((13, 0), True)],
)
def test_blackwell_multiplies_fp8_without_transposes(monkeypatch, capability, supported):
    monkeypatch.setattr(utils, "_hardware", lambda: nvidia(*capability))
    assert utils.is_non_tn_fp8_gemm_supported() is supported
