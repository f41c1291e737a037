"""LayerNorm and RMSNorm as modules: constructor, parameters, dtypes, errors, compilation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.rmsnorm import RMSNorm

CLASSES = pytest.mark.parametrize("cls", [LayerNorm, RMSNorm])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1234)


@CLASSES
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [16, (16,), [4, 16]], ids=str)
def test_a_fresh_module_normalizes_without_scaling(cls, zero_centered, shape, device):
    module = cls(shape, zero_centered_gamma=zero_centered, device=device)
    x = torch.randn(3, 4, 16, device=device)
    dims = (16,) if shape != [4, 16] else (4, 16)
    expected = F.layer_norm(x, dims) if cls is LayerNorm else F.rms_norm(x, dims, eps=1e-5)
    assert module.weight.shape == dims
    assert bool((module.weight == (0.0 if zero_centered else 1.0)).all())
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


@CLASSES
def test_state_dict_holds_the_parameters_only(cls, device):
    expected = {"weight", "bias"} if cls is LayerNorm else {"weight"}
    assert set(cls(8, device=device).state_dict()) == expected


@CLASSES
def test_a_torch_module_and_ours_exchange_weights_and_gradients(cls, device):
    reference = torch.nn.LayerNorm(8) if cls is LayerNorm else torch.nn.RMSNorm(8, eps=1e-5)
    reference = reference.to(device)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter)
    ours = cls(8, device=device)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(5, 8, device=device)
    dy = torch.randn(5, 8, device=device)
    ours(x).backward(dy)
    reference(x).backward(dy)
    for actual, other in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, other.grad, rtol=1e-4, atol=1e-5)


@CLASSES
def test_old_keyword_names_work_and_warn(cls, device):
    with pytest.warns(DeprecationWarning, match="hidden_size"):
        assert cls(hidden_size=8, device=device).weight.shape == (8,)
    with pytest.warns(DeprecationWarning, match="params_dtype"):
        assert cls(8, params_dtype=torch.bfloat16, device=device).weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="normalized_shape only"):
        cls(8, hidden_size=8)


@CLASSES
@pytest.mark.parametrize("shape", [None, 0, ()], ids=str)
def test_an_empty_normalized_shape_is_rejected(cls, shape):
    with pytest.raises(ValueError, match="normalized_shape"):
        cls(shape)


@CLASSES
def test_sequence_parallel_marks_parameters_only_when_given(cls, device):
    assert not hasattr(cls(8, device=device).weight, "sequence_parallel")
    for flag in (True, False):
        assert all(
            p.sequence_parallel is flag
            for p in cls(8, sequence_parallel=flag, device=device).parameters()
        )


@CLASSES
def test_deferred_parameters_are_allocated_by_reset_with_their_attributes(cls, device):
    module = cls(
        8, device="meta", dtype=torch.bfloat16, sequence_parallel=True, zero_centered_gamma=True
    )
    module.weight.mark = "kept"
    assert all(p.is_meta for p in module.parameters())
    with pytest.raises(RuntimeError, match="reset_parameters"):
        module(torch.zeros(2, 8))
    module.reset_parameters(defer_init=True)
    assert module.weight.is_meta
    module.reset_parameters()
    assert module.weight.device.type == device.type
    assert module.weight.dtype == torch.bfloat16 and not module.weight.any()
    assert module.weight.sequence_parallel is True and module.weight.mark == "kept"


@CLASSES
def test_reset_keeps_the_parameter_objects_that_an_optimizer_holds(cls, device):
    module = cls(8, device=device)
    weight = module.weight
    weight.data.fill_(3.0)
    module.reset_parameters()
    assert module.weight is weight and bool((weight == 1.0).all())


@CLASSES
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_torch_autocasts_dtype_or_the_inputs_dtype(cls, weight_dtype, device):
    module = cls(8, dtype=weight_dtype, device=device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    assert module(x).dtype == torch.float32
    assert module(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32 and module.weight.grad.dtype == weight_dtype


@CLASSES
def test_a_wrong_last_dimension_or_dtype_is_rejected(cls, device):
    module = cls((4, 8), device=device)
    with pytest.raises(ValueError, match=r"\(4, 8\)"):
        module(torch.zeros(2, 8, device=device))
    with pytest.raises(TypeError, match="int64"):
        module(torch.zeros(4, 8, device=device, dtype=torch.int64))


@CLASSES
def test_sm_margins_are_one_number_or_one_per_stage_with_old_attribute_names(cls, device):
    module = cls(8, sm_margin=3, device=device)
    assert (module.fwd_ln_sm_margin, module.bwd_ln_sm_margin, module.inf_ln_sm_margin) == (3, 3, 3)
    module = cls(8, sm_margin={"forward": 1, "backward": 2, "inference": 4}, device=device)
    assert (module.fwd_ln_sm_margin, module.bwd_ln_sm_margin, module.inf_ln_sm_margin) == (1, 2, 4)
    module.fwd_ln_sm_margin, module.bwd_ln_sm_margin, module.inf_ln_sm_margin = 5, 6, 7
    assert (module.fwd_ln_sm_margin, module.bwd_ln_sm_margin, module.inf_ln_sm_margin) == (5, 6, 7)
    with pytest.raises(ValueError, match="inference"):
        cls(8, sm_margin={"forward": 1}, device=device)


@CLASSES
def test_zero_tokens_give_an_empty_output_and_zero_gradients(cls, device):
    module = cls(8, device=device)
    y = module(torch.zeros(0, 3, 8, device=device, requires_grad=True))
    y.sum().backward()
    assert y.shape == (0, 3, 8) and not module.weight.grad.any()


@CLASSES
def test_repr_shows_the_shape(cls, device):
    assert (
        repr(cls((4, 8), device=device))
        == f"{cls.__name__}((4, 8), eps=1e-05, zero_centered_gamma=False)"
    )


def test_modules_compile_into_one_graph(device):
    module = torch.nn.Sequential(LayerNorm(8, device=device), RMSNorm(8, device=device))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 8, device=device, requires_grad=True)
    expected, actual = module(x), compiled(x)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (actual, expected)]
    assert gradients[1].abs().amax() > 0.1
    torch.testing.assert_close(*gradients)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16
