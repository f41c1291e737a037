"""quantize() and dequantize() as callers see them: rejected calls, shapes, dtypes, special values, compilation."""

from __future__ import annotations

import pytest
import torch

from tests.support import quantized
from tests.support.quantized import assert_same, sample, uniform
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import (
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
    TensorFormat,
)
from transformer_engine.pytorch.primitives.operand import Operand, plain
from transformer_engine.pytorch.primitives.quantize import (
    TABLE,
    Quantized,
    QuantizeRequest,
    QuantizeSpec,
    absolute_maximum,
    dequantize,
    hadamard_transform,
    quantize,
    torch_dtype,
)
from transformer_engine.pytorch.primitives.quantize.format_row import QuantizeInputs

SPECS = {
    name: spec for name, spec in quantized.SPECS.items() if name not in ("block2d-float32-scale",)
}
every_spec = pytest.mark.parametrize("name", SPECS)


def operands(q: Quantized, spec: QuantizeSpec, dtype=torch.float32) -> tuple[Operand, Operand]:
    assert q.codes is not None and q.codes_t is not None
    return (
        Operand(q.codes, q.scale, spec.format, q.amax, dtype),
        Operand(q.codes_t, q.scale_t, spec.format, q.amax_t, dtype),
    )


class TestShapes:
    SCALES = {
        "float8": ((1,), (1,)),
        "block1d": ((48, 2), (130, 1)),
        "block2d": ((1, 2), (2, 1)),
        "mxfp8": ((48, 5), (130, 2)),
        "mxfp8-2d": ((48, 5), (130, 2)),
        "nvfp4": ((48, 9), (130, 3)),
        "nvfp4-hadamard": ((48, 9), (130, 3)),
        "nvfp4-2d": ((48, 9), (130, 3)),
        "nvfp4-stochastic": ((48, 9), (130, 3)),
    }

    @every_spec
    def test_codes_and_scales_have_the_operands_shapes(self, name, device):
        spec, x = SPECS[name], sample(48, 130, device)
        q = quantize(x, spec, random=uniform(x))
        packing = spec.format.packing
        assert (
            q.codes is not None
            and q.codes_t is not None
            and q.scale is not None
            and q.scale_t is not None
        )
        assert q.codes.dtype == q.codes_t.dtype == torch_dtype(spec.element)
        assert (q.codes.shape, q.codes_t.shape) == ((48, 130 // packing), (130, 48 // packing))
        assert (tuple(q.scale.shape), tuple(q.scale_t.shape)) == self.SCALES[name]
        for codes in (q.codes, q.codes_t):  # scales may be views of the layout that products read
            assert codes.is_contiguous() and codes.stride(-1) == 1

    @every_spec
    @pytest.mark.parametrize("rows, depth", [(0, 32), (32, 0), (0, 0)])
    def test_an_empty_matrix_quantizes(self, name, rows, depth, device):
        spec, x = SPECS[name], sample(rows, depth, device)
        q = quantize(x, spec, random=uniform(x))
        row_operand, column_operand = operands(q, spec)
        assert dequantize(row_operand).shape == (rows, depth)
        assert dequantize(column_operand).shape == (depth, rows)
        if q.amax is not None:
            assert q.amax.tolist() == [0.0]

    @every_spec
    def test_strides_do_not_matter(self, name, device):
        spec, wide = SPECS[name], sample(96, 160, device)
        view = wide[::2, 8:136]
        assert_same(
            quantize(view, spec, random=uniform(view)),
            quantize(view.contiguous(), spec, random=uniform(view)),
        )
        transposed = wide[:48].t()
        assert_same(
            quantize(transposed, spec, random=uniform(transposed)),
            quantize(transposed.contiguous(), spec, random=uniform(transposed)),
        )

    @every_spec
    def test_wider_inputs_of_the_same_values_quantize_the_same(self, name, device):
        spec, x = SPECS[name], sample(48, 130, device)
        if spec.hadamard:
            pytest.skip("the transform rounds to the input's precision")
        expected = quantize(x, spec, random=uniform(x))
        assert_same(quantize(x.float(), spec, random=uniform(x)), expected)
        assert_same(quantize(x.double(), spec, random=uniform(x)), expected)

    @every_spec
    def test_the_input_is_left_alone(self, name, device):
        x = sample(32, 48, device, torch.float32)
        before = x.clone()
        quantize(x, SPECS[name], random=uniform(x))
        assert torch.equal(x, before)


class TestSpecialValues:
    @every_spec
    def test_zeros_come_back_as_zeros(self, name, device):
        spec, x = SPECS[name], torch.zeros(32, 48, dtype=torch.bfloat16, device=device)
        q = quantize(x, spec, random=uniform(x))
        for operand in operands(q, spec):
            assert (dequantize(operand) == 0).all()

    @every_spec
    def test_nan_comes_back_as_nan(self, name, device):
        spec, x = SPECS[name], sample(32, 48, device)
        x[3, 5] = torch.nan
        q = quantize(x, spec, random=uniform(x))
        rows, columns = operands(q, spec)
        assert dequantize(rows)[3, 5].isnan() and dequantize(columns)[5, 3].isnan()

    @pytest.mark.parametrize("name", ["float8", "block1d", "block2d", "mxfp8"])
    def test_infinity_saturates_and_spoils_only_its_scale(self, name, device):
        spec, x = SPECS[name], sample(32, 48, device)
        x[3, 5] = -torch.inf
        q = quantize(x, spec)
        assert q.codes is not None
        assert q.codes.float()[3, 5].item() == -spec.element.maximum
        values = dequantize(operands(q, spec)[0])
        assert not values[4:].isnan().any()

    def test_maximum_propagates_nan_and_counts_signs(self, device):
        assert absolute_maximum(torch.tensor([[1.0, -3.0]], device=device)).tolist() == [3.0]
        assert absolute_maximum(torch.tensor([torch.nan, 9.0], device=device)).isnan().all()
        assert absolute_maximum(torch.empty(0, 4, device=device)).tolist() == [0.0]
        assert (
            absolute_maximum(torch.tensor(-2.0, dtype=torch.bfloat16, device=device)).dtype
            == torch.float32
        )


class TestChoices:
    def test_random_numbers_are_unused_without_stochastic_rounding(self, device):
        x = sample(32, 48, device)
        assert_same(quantize(x, SPECS["nvfp4"], random=uniform(x)), quantize(x, SPECS["nvfp4"]))

    def test_each_direction_reads_its_own_random_numbers(self, device):
        x = sample(32, 48, device)
        rows, columns = uniform(x)
        spec = SPECS["nvfp4-stochastic"]
        base = quantize(x, spec, random=(rows, columns))
        other = quantize(x, spec, random=(rows, 1 - columns - 2.0**-24))
        assert base.codes is not None and other.codes is not None
        assert torch.equal(base.codes, other.codes)
        assert base.codes_t is not None and other.codes_t is not None
        assert not torch.equal(base.codes_t, other.codes_t)

    def test_stochastic_rounding_averages_closer_than_nearest(self, device):
        x = sample(16, 64, device, torch.float32)
        spec = QuantizeSpec(NVFP4, E2M1, stochastic=True)
        generator = torch.Generator().manual_seed(2)

        def decode(q: Quantized) -> torch.Tensor:
            assert q.codes is not None
            return dequantize(Operand(q.codes, q.scale, NVFP4, q.amax))

        total = torch.zeros_like(x)
        for _ in range(64):
            u = torch.rand(x.shape, generator=generator).to(device)
            total += decode(quantize(x, spec, random=(u, u)))
        nearest_error = (decode(quantize(x, QuantizeSpec(NVFP4, E2M1))) - x).norm()
        assert (total / 64 - x).norm() < 0.5 * nearest_error

    def test_columnwise_hadamard_alone_measures_only_the_transformed(self, device):
        x = sample(32, 48, device)
        spec = QuantizeSpec(NVFP4, E2M1, rowwise=False, columnwise=True, hadamard=True)
        q = quantize(x, spec)
        assert q.amax is None
        assert q.amax_t is not None
        assert torch.equal(q.amax_t, absolute_maximum(hadamard_transform(x.t().contiguous())))

    def test_two_dimensional_maximum_serves_both_directions(self, device):
        x = sample(32, 48, device)
        q = quantize(x, SPECS["nvfp4-2d"], amax=torch.tensor([9.0], device=device))
        assert q.amax is not None and q.amax_t is not None
        assert q.amax.item() == q.amax_t.item() == 9.0

    def test_the_forced_reference_takes_every_request(self, device):
        x = sample(32, 48, device)
        request = QuantizeRequest(SPECS["mxfp8"], (32, 48), x.dtype, x.device)
        reference = TABLE.named("reference")
        assert reference.rejection_reason(request) is None
        with use_backend(quantize="reference"):
            assert_same(quantize(x, SPECS["mxfp8"]), reference.bind(request)(x, QuantizeInputs()))


class TestDequantize:
    @every_spec
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_rounds_once_to_the_nominal_dtype(self, name, dtype, device):
        spec, x = SPECS[name], sample(32, 48, device)
        q = quantize(x, spec, random=uniform(x))
        exact, _ = operands(q, spec)
        narrow, _ = operands(q, spec, dtype)
        assert dequantize(narrow).dtype == dtype
        assert torch.equal(dequantize(narrow), dequantize(exact).to(dtype))

    @pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
    def test_every_code_is_widened_exactly(self, element, device):
        codes = torch.arange(256, dtype=torch.uint8).view(torch_dtype(element))[None]
        values = dequantize(Operand(codes.to(device), torch.ones(1, device=device), FLOAT8))
        torch.testing.assert_close(values.cpu(), codes.float(), rtol=0, atol=0, equal_nan=True)

    def test_a_plain_operand_is_itself(self, device):
        x = sample(4, 6, device)
        assert torch.equal(dequantize(plain(x)), x)

    def test_missing_parts_are_named(self, device):
        codes = torch.zeros(2, 8, dtype=torch.uint8, device=device)
        scale = torch.ones(2, 1, device=device).to(torch.float8_e4m3fn)
        with pytest.raises(ValueError, match="mxfp8 needs its scale"):
            dequantize(Operand(codes.view(torch.float8_e4m3fn), None, MXFP8))
        with pytest.raises(ValueError, match="tensor's amax"):
            dequantize(Operand(codes, scale, NVFP4))
        with pytest.raises(ValueError, match="no rule to dequantize format 'ternary'"):
            dequantize(Operand(codes, scale, TensorFormat("ternary", None, "float32")))


class TestRejections:
    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"rowwise": False}, "ask for nothing"),
            ({"element": E2M1}, "float8 cannot hold element e2m1"),
            ({"format": NVFP4}, "nvfp4 cannot hold element e4m3"),
            ({"two_dimensional": True}, "two_dimensional is a choice of mxfp8 and nvfp4"),
            ({"stochastic": True}, "belong to nvfp4, not to float8"),
            (
                {"format": NVFP4, "element": E2M1, "two_dimensional": True, "hadamard": True},
                "choose one",
            ),
        ],
    )
    def test_contradictory_specs_are_rejected(self, fields, message):
        with pytest.raises(ValueError, match=message):
            QuantizeSpec(**{"format": FLOAT8, "element": E4M3, **fields})

    def test_only_matrices_of_floats_are_quantized(self, device):
        with pytest.raises(ValueError, match=r"not \[2, 3, 4\]; flatten"):
            quantize(torch.zeros(2, 3, 4, device=device), SPECS["float8"])
        with pytest.raises(TypeError, match=r"not torch.int32"):
            quantize(torch.zeros(2, 4, dtype=torch.int32, device=device), SPECS["float8"])

    def test_only_float8_takes_a_scale(self, device):
        with pytest.raises(ValueError, match="not to mxfp8"):
            quantize(
                torch.zeros(2, 4, device=device),
                SPECS["mxfp8"],
                multiplier=torch.ones(1, device=device),
            )

    @pytest.mark.parametrize(
        "name, rows, depth, message",
        [
            ("nvfp4", 16, 15, "K=15"),
            ("nvfp4", 15, 16, "M=15"),
            ("nvfp4-hadamard", 18, 16, "M=18 is not a multiple of 16"),
        ],
    )
    def test_nvfp4_rejects_shapes_that_do_not_fill_bytes_or_groups(
        self, name, rows, depth, message, device
    ):
        with pytest.raises(ValueError, match=message):
            quantize(torch.zeros(rows, depth, device=device), SPECS[name])

    def test_an_odd_axis_is_accepted_if_it_is_not_packed(self, device):
        assert quantize(sample(15, 16, device), QuantizeSpec(NVFP4, E2M1)).codes is not None
        transposed = QuantizeSpec(NVFP4, E2M1, rowwise=False, columnwise=True)
        assert quantize(sample(16, 15, device), transposed).codes_t is not None

    def test_stochastic_rounding_needs_one_random_number_an_element(self, device):
        x = sample(32, 48, device)
        rows, columns = uniform(x)
        spec = SPECS["nvfp4-stochastic"]
        with pytest.raises(ValueError, match="needs random"):
            quantize(x, spec)
        with pytest.raises(ValueError, match=r"random\[0\] is \[48, 32\]"):
            quantize(x, spec, random=(columns, columns))
        with pytest.raises(ValueError, match=r"random\[1\] is \[32, 48\]"):
            quantize(x, spec, random=(rows, rows))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a CUDA device with the CPU")
@every_spec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_and_cpu_give_the_same_bits(name, dtype):
    spec, x = SPECS[name], sample(272, 400, "cpu", dtype)
    x = x * torch.exp2(torch.arange(272) % 60 - 30)[:, None].to(dtype)
    on_cpu = quantize(x, spec, random=uniform(x))
    on_cuda = quantize(x.cuda(), spec, random=uniform(x.cuda()))
    assert_same(Quantized(*(None if t is None else t.cpu() for t in on_cuda)), on_cpu)
    for a, b in zip(operands(on_cpu, spec), operands(on_cuda, spec), strict=True):
        assert torch.equal(dequantize(a), dequantize(b).cpu())
