"""parallelize_module with DTensor parameters: values, gradients and optimizer steps of one device, for each recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from tests.distributed.threaded_ranks import run_on_threads
from transformer_engine.common import recipe
from transformer_engine.pytorch.integrations.tensor_parallel import ColwiseParallel, RowwiseParallel
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

WIDTH, INNER, ROWS = 64, 128, 32
RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}


class Model(nn.Module):
    """This package's norm, column- and row-parallel layers, with torch's embedding and linear layer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": "cpu", "params_dtype": dtype}
        self.norm = te.RMSNorm(WIDTH, device="cpu", dtype=dtype)
        self.first = te.LayerNormLinear(WIDTH, INNER, **options)
        self.second = te.Linear(INNER, WIDTH, **options)
        self.third = te.Linear(WIDTH, INNER, bias=False, **options)
        self.last = nn.Linear(INNER, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.nn.functional.gelu(self.first(self.norm(x))))
        return self.last(torch.nn.functional.silu(self.third(x)))


def create_layer(dtype: torch.dtype = torch.float32) -> Model:
    model = Model(dtype)
    drawn = torch.Generator().manual_seed(3)  # ranks that are threads share the default generator
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.1 * torch.randn(parameter.shape, generator=drawn) + (parameter.dim() == 1)
            )
    return model


def parallel(model: Model, sequence: bool, mesh: DeviceMesh | None = None) -> Model:
    """Shard the model over a mesh, by default all ranks; with `sequence` activations between pairs of layers too."""
    between = {"output_layouts": Shard(0)} if sequence else {}
    plan = {
        "first": ColwiseParallel(input_layouts=Shard(0) if sequence else Replicate()),
        "second": RowwiseParallel(**between),
        "third": ColwiseParallel(input_layouts=Shard(0) if sequence else Replicate()),
        "last": RowwiseParallel(),
    }
    if sequence:
        plan["norm"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    return parallelize_module(
        model, mesh or init_device_mesh("cpu", (dist.get_world_size(),)), plan
    )


def steps(
    model: Model, x: torch.Tensor, used: Any, number: int = 2, factor: float = 1.0
) -> dict[str, torch.Tensor]:
    """Output, gradients and parameters after FusedAdam steps, for a loss multiplied by the factor."""
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3)
    results: dict[str, torch.Tensor] = {}
    for _ in range(number):
        optimizer.zero_grad(set_to_none=True)
        x = x.detach().requires_grad_()
        with te.autocast(enabled=used is not None, recipe=used):
            y = model(x)
        (factor * y.square().sum()).backward()
        results = {"output": y.detach(), "input": x.grad}
        results |= {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
        optimizer.step()
    results |= {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in results.items()
    }


def largest_errors(
    actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Each tensor's largest error, relative to its largest value."""
    return {
        name: float((actual[name] - value).abs().max() / value.abs().max())
        for name, value in exact.items()
    }


def compare_gradients(used: Any, sequence: bool) -> tuple[list[str], dict[str, str]]:
    """Tensors whose error exceeds twice the one-device error, and the parameter and gradient placements."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    exact = steps(create_layer(), x, None)
    of_one_device = largest_errors(steps(create_layer(), x, used), exact)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = parallel(create_layer(), sequence)
    local = x.chunk(size)[rank] if sequence else x
    actual = steps(model, local, used)
    if sequence:
        parts = [torch.empty_like(actual["input"]) for _ in range(size)]
        dist.all_gather(parts, actual["input"].contiguous())
        actual["input"] = torch.cat(parts)
    assert all(actual[name].shape == value.shape for name, value in exact.items())
    # Adam divides by the size of a gradient, so that noise around 0 becomes a whole step
    if used is not None:
        exact = {
            name: value
            for name, value in exact.items()
            if name in ("output", "input") or "grad" in name
        }
    errors = largest_errors(actual, exact)
    wrong = [
        f"{name}: {error}"
        for name, error in errors.items()
        if error > 2 * of_one_device[name] + 1e-5
    ]
    placed = {
        name: f"{p.placements[0]} {p.grad.placements[0]}" if isinstance(p, DTensor) else "plain"
        for name, p in model.named_parameters()
    }
    return wrong, placed


@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("name", ["none", "current", "mxfp8"])
def test_a_model_of_distributed_tensors_computes_the_gradients_of_one_device(
    emulated, name: str, sequence: bool
):
    for wrong, placed in run_on_threads(lambda rank: compare_gradients(RECIPES[name], sequence), 2):
        assert wrong == []
        assert placed["first.weight"] == placed["first.bias"] == "S(0) S(0)"
        assert placed["second.weight"] == "S(1) S(1)"
        assert placed["second.bias"] == placed["first.layer_norm_weight"] == "R R"


def _delayed(device: torch.device) -> list[str]:
    return compare_gradients(RECIPES["delayed"], False)[0]


def test_delayed_scaling_of_distributed_tensors_computes_the_gradients_of_one_device(tmp_path):
    assert run_on_ranks(_delayed, 2, tmp_path) == [[], []]


def _sharded_twice(device: torch.device) -> dict[str, float]:
    with te.emulate():  # MXFP8 on the CPU in a machine with a Hopper GPU
        return _largest_differences()


def _largest_differences() -> dict[str, float]:
    """Largest difference from one device over three steps, for each recipe."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    local, size = mesh.get_local_rank("data"), 2
    x = torch.randn(size * ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    results: dict[str, float] = {}
    for name in ("none", "delayed", "mxfp8"):
        used = RECIPES[name]
        FP8GlobalStateManager.reset()
        alone = steps(create_layer(), x, used, 3)
        FP8GlobalStateManager.reset()
        model = parallel(create_layer(), True, mesh["tensor"])
        for layer in model.children():
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        rows = x.chunk(size)[local].chunk(size)[mesh.get_local_rank("tensor")]
        joint = steps(model, rows, used, 3, float(size))  # fully_shard averages gradients
        full = [torch.empty_like(joint["output"]) for _ in range(size)]
        dist.all_gather(full, joint["output"].contiguous(), group=mesh.get_group("data"))
        joint["output"], joint["input"] = torch.cat(full), alone["input"]
        # Adam divides by the size of a gradient, so that noise around 0 becomes a whole step
        expected = {key: value for key, value in alone.items() if "grad" in key or key == "output"}
        results[name] = max(largest_errors(joint, expected).values())
    return results


def test_distributed_tensors_are_sharded_over_a_second_axis_of_the_mesh(tmp_path):
    """Ranks on both axes have one-device scales under delayed scaling and MXFP8, so that codes are equal."""
    for result in run_on_ranks(_sharded_twice, 4, tmp_path):
        assert result.keys() == {"none", "delayed", "mxfp8"} and max(result.values()) < 1e-4, result


def run_on_two_ranks(body) -> None:
    run_on_threads(lambda rank: body(init_device_mesh("cpu", (2,))), 2)


def test_replicated_weights_take_inputs_that_are_sharded_by_rows():
    def body(mesh) -> None:
        layer, x = (
            create_layer().third,
            torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(6)),
        )
        expected = layer(x)
        expected.square().sum().backward()
        gradient = layer.weight.grad
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
        y = layer(distribute_tensor(x, mesh, [Shard(0)]))
        assert y.placements == (Shard(0),)
        y.square().sum().backward()
        torch.testing.assert_close(y.full_tensor(), expected)
        torch.testing.assert_close(layer.weight.grad.full_tensor(), gradient)
        assert layer.weight.grad.placements == (Replicate(),)

    run_on_two_ranks(body)


@pytest.mark.parametrize("rows", [(), (3,), (2, 3)], ids=str)
def test_shards_may_be_uneven_and_inputs_have_any_dimensions(rows: tuple[int, ...]):
    """5 output features on two ranks; 7 input features; a frozen bias."""

    def body(mesh) -> None:
        drawn = torch.Generator().manual_seed(7)
        columns, features = te.Linear(8, 5, device="cpu"), te.Linear(7, 8, device="cpu")
        x = torch.randn(*rows, 7, generator=drawn)
        for parameter in (*columns.parameters(), *features.parameters()):
            parameter.data.copy_(torch.randn(parameter.shape, generator=drawn))
        features.bias.requires_grad_(False)
        expected = columns(features(x))
        expected.square().sum().backward()
        gradients = [columns.weight.grad, columns.bias.grad, features.weight.grad]
        columns = parallelize_module(columns, mesh, ColwiseParallel(output_layouts=Replicate()))
        features = parallelize_module(features, mesh, RowwiseParallel(input_layouts=Replicate()))
        for parameter in (*columns.parameters(), *features.parameters()):
            parameter.grad = None
        y = columns(features(x))
        y.square().sum().backward()
        torch.testing.assert_close(y, expected)
        results = [columns.weight.grad, columns.bias.grad, features.weight.grad]
        for value, gradient in zip(results, gradients, strict=True):
            torch.testing.assert_close(value.full_tensor(), gradient, rtol=1e-5, atol=1e-4)
        assert features.bias.grad is None

    run_on_two_ranks(body)


def test_calls_that_cannot_be_served_name_the_remedy():
    options: dict[str, Any] = {"device": "cpu"}

    def body(mesh) -> None:
        x = torch.randn(4, 32)
        for layer, style, text in (
            (
                te.LayerNormMLP(32, 32, **options),
                ColwiseParallel(),
                "Linear or LayerNormLinear.*tp_group",
            ),
            (
                te.LayerNormLinear(32, 32, **options),
                RowwiseParallel(),
                "does not shard a LayerNormLinear",
            ),
            (
                te.Linear(32, 32, parameters_split=("q", "k"), **options),
                ColwiseParallel(),
                "parameters_split",
            ),
            (
                te.Linear(32, 32, fuse_wgrad_accumulation=True, **options),
                ColwiseParallel(),
                "fuse_wgrad",
            ),
            (
                te.Linear(32, 32, delay_wgrad_compute=True, **options),
                RowwiseParallel(),
                "delay_wgrad_compute",
            ),
        ):
            with pytest.raises(NotImplementedError, match=text):
                parallelize_module(layer, mesh, style)
            assert not any(isinstance(parameter, DTensor) for parameter in layer.parameters())
        layer = parallelize_module(te.Linear(32, 32, **options), mesh, ColwiseParallel())
        with pytest.raises(NotImplementedError, match="fp8_output=True is not supported"):
            layer(x, fp8_output=True)
        layer.bias = nn.Parameter(torch.zeros(32))
        with pytest.raises(TypeError, match="bias of Linear and other tensors of the call mix"):
            layer(x)
        partial = te.Linear(32, 32, bias=False, **options)
        partial.weight = nn.Parameter(DTensor.from_local(torch.ones(32, 32), mesh, [Partial()]))
        with pytest.raises(NotImplementedError, match=r"shard its rows, Shard\(0\)"):
            partial(distribute_tensor(x, mesh, [Replicate()]))
        other = te.LayerNormMLP(32, 32, **options)
        other.fc1_weight = nn.Parameter(
            distribute_tensor(other.fc1_weight.detach(), mesh, [Shard(0)])
        )
        with pytest.raises(
            NotImplementedError, match="parameter fc1_weight of LayerNormMLP is a DTensor"
        ):
            other(x)

    run_on_two_ranks(body)
