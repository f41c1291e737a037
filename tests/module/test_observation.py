"""te.observe does not change the model's results, reports tensor statistics and finds the first NaN."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.common.optional import installed
from transformer_engine.pytorch.quantization import all_families
from transformer_engine.pytorch.tensor.observing import Observing

RECIPES = pytest.mark.parametrize(
    "kind", [row.recipe for row in all_families() if row.checkpointed]
)


class Grouped(torch.nn.Module):
    """Apply two weights to a batch's two halves."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.experts = te.GroupedLinear(2, 64, 64, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, [x.shape[0] // 2] * 2)


def model(device: torch.device) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        te.Linear(64, 64, device=device),
        te.LayerNormLinear(64, 64, device=device),
        te.LayerNormMLP(64, 128, activation="swiglu", device=device),
        Grouped(device),
    )


def train(
    module: torch.nn.Module, recipe, device, steps: int = 3, end=lambda: None
) -> list[torch.Tensor]:
    """Losses, and the gradients and parameters after the last step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(5)  # for stochastic rounding
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 64, generator=generator).to(device).requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = module(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end()
        losses.append(loss.detach())
    return [
        *losses,
        *(p.grad for p in module.parameters()),
        *(p.detach() for p in module.parameters()),
    ]


@RECIPES
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.sampled
def test_an_observed_model_computes_the_same_bits(kind, every: int, device: torch.device):
    plain = train(model(device), kind(), device)
    module = model(device)
    with te.observe(module, every=every) as observation:
        observed = train(module, kind(), device, end=observation.step)
    assert len(observation.reports) == {1: 3, 2: 2}[every]
    for a, b in zip(observed, plain, strict=True):
        if device.type == "cpu":
            assert torch.equal(a, b)
        else:  # where bias gradients are summed in another order
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


@RECIPES
def test_every_product_shows_its_three_tensors(kind, device: torch.device):
    module = model(device)
    with te.observe(module) as observation:
        train(module, kind(), device, 1, observation.step)
    assert observation.report is not None
    names = {tensor.name for tensor in observation.report.quantized}
    products = ["0", "1", "2.1", "2.2", "3.experts.1", "3.experts.2"]
    assert names == {
        f"{product}.{role}" for product in products for role in ("input", "weight", "grad_output")
    }
    # Delayed scaling has recorded no gradient yet: in the first step, gradients are too small for a scale of 1.
    least = -1.0 if kind is recipes.DelayedScaling else 10.0
    assert all(
        tensor.sqnr is not None and tensor.sqnr > least for tensor in observation.report.quantized
    )
    assert observation.report.first_nonfinite is None


def test_reported_statistics_equal_the_tensors_statistics(device: torch.device):
    linear = te.Linear(64, 96, device=device)
    x = torch.randn(32, 64, device=device) * 10.0 ** torch.randint(-8, 1, (32, 64), device=device)
    with te.observe(linear) as observation:
        with te.autocast(recipe=recipes.Float8CurrentScaling()):
            linear(x).sum().backward()
        report = observation.step()
    assert report is not None
    (listing,) = [tensor for tensor in report.tensors if tensor.name == "input"]
    quantized = (
        te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)(x).dequantize().double()
    )
    noise = (x.double() - quantized).square().sum()
    assert (listing.format, listing.elements) == ("e4m3 float8", x.numel())
    assert listing.maximum == x.abs().max().item()
    assert listing.underflow == ((x != 0) & (quantized == 0)).double().mean().item() > 0.1
    assert listing.sqnr == pytest.approx(
        10 * math.log10(x.double().square().sum() / noise), abs=1e-4
    )


def test_an_outdated_delayed_scale_shows_saturation(device: torch.device):
    linear = te.Linear(64, 64, device=device)
    with te.observe(linear, every=1) as observation:
        for size in (1.0, 100.0):
            with te.autocast(recipe=recipes.DelayedScaling(amax_history_len=1)):
                linear(torch.randn(32, 64, device=device) * size).sum().backward()
            observation.step()
    before, after = (
        next(tensor.saturation for tensor in report.tensors if tensor.name == "input")
        for report in observation.reports
    )
    assert before == 0.0 and after > 0.5


class Breaking(torch.autograd.Function):
    """x, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, float("nan"))


class BrokenBackward(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Breaking.apply(x)


class Dividing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0.0


@pytest.mark.parametrize(
    ("broken", "named"),
    [(Dividing(), "1.forward"), (BrokenBackward(), "0.backward")],
    ids=["forward", "backward"],
)
@pytest.mark.parametrize("enabled", [False, True], ids=["high precision", "fp8"])
def test_the_first_module_that_produces_a_nan_is_named(
    broken, named: str, enabled: bool, device: torch.device
):
    module = torch.nn.Sequential(
        te.Linear(64, 64, device=device), broken, te.Linear(64, 64, device=device)
    )
    with te.observe(module) as observation:
        with te.autocast(enabled=enabled):
            module(torch.randn(32, 64, device=device)).sum().backward()
        report = observation.step()
    assert report is not None and report.first_nonfinite is not None
    assert report.first_nonfinite.name == named
    assert observation.first_nonfinite is report
    words = (
        "1 made the first NaN or infinity of step 1"
        if named == "1.forward"
        else "is in 0.backward: 2,048 of 2,048"
    )
    assert words in str(observation)


def test_a_nonfinite_weight_is_named_before_its_results(device: torch.device):
    module = model(device)
    with torch.no_grad():
        module[1].weight[3, 5] = float("inf")
    with te.observe(module) as observation:
        train(module, recipes.Float8CurrentScaling(), device, 1, observation.step)
    assert observation.report is not None
    first = observation.report.first_nonfinite
    assert first is not None and (first.name, first.nonfinite) == ("1.weight", 1)


def test_observation_restores_hooks_and_quantizers(device: torch.device):
    module = model(device)
    observation = te.observe(module, every=2)

    def observed() -> bool:
        train(module, recipes.Float8CurrentScaling(), device, 1)
        quantizer = module[0].numerics.cached.recipe.products[0].input
        assert bool(module[0]._forward_hooks) == isinstance(quantizer, Observing)
        return isinstance(quantizer, Observing)

    records = []
    for _ in range(4):
        records.append(observed())
        observation.step()
    assert records == [True, False, True, False]
    observation.close()
    assert not observed()
    twin = copy.deepcopy(module)
    assert not twin[0]._forward_hooks


def test_recomputation_is_counted_once_and_changes_nothing(device: torch.device):
    def run(observes: bool):
        torch.manual_seed(1)
        linear = te.Linear(64, 64, device=device)
        x = torch.randn(32, 64, device=device, requires_grad=True)
        observation = te.observe(linear) if observes else None
        with te.autocast(recipe=recipes.MXFP8BlockScaling()):
            te.checkpoint(linear, x).sum().backward()
        report = None if observation is None else observation.step()
        if observation is not None:
            observation.close()
        return x.grad, report

    (plain, _), (grad, report) = run(False), run(True)
    assert torch.equal(plain, grad)
    assert {tensor.name: tensor.elements for tensor in report.tensors}["input"] == 32 * 64


def test_a_paused_observation_records_nothing(device: torch.device):
    linear = te.Linear(64, 64, device=device)
    with te.observe(linear) as observation:
        with observation.pause():
            linear(torch.randn(32, 64, device=device))
        assert observation.step().tensors == ()


@pytest.mark.skipif(
    not (installed("rich") and installed("matplotlib")),
    reason="rich or matplotlib is not installed",
)
def test_log_table_and_plot_show_the_reports(tmp_path: Path, device: torch.device):
    from rich.console import Console

    module = model(device)
    with te.observe(module, every=1, log=tmp_path / "log.jsonl") as observation:
        train(module, recipes.Float8CurrentScaling(), device, 2, observation.step)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["first_nonfinite"] is None
    assert {"module": "0", "tensor": "input"}.items() <= lines[0]["tensors"][0].items()
    console = Console(width=160, record=True, file=(tmp_path / "table").open("w"))
    console.print(observation.table())
    text = console.export_text()
    assert "step 2" in text and "grad_output" in text and "all values are finite" in text
    observation.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(installed("tensorboard"), reason="tensorboard is installed")
def test_a_missing_tensorboard_is_named_before_anything_is_observed(
    tmp_path: Path, device: torch.device
):
    linear = te.Linear(64, 64, device=device)
    with pytest.raises(
        ValueError, match="tensorboard is not installed; pip install tensorboard, or read the log"
    ):
        te.observe(linear, tensorboard=tmp_path)
    assert linear.numerics.observer is None


@pytest.mark.skipif(
    not installed("tensorboard"), reason="tensorboard is not installed: pip install tensorboard"
)
def test_tensorboard_gets_the_scalars(tmp_path: Path, device: torch.device):
    linear = te.Linear(64, 64, device=device)
    with te.observe(linear, tensorboard=tmp_path) as observation:
        linear(torch.randn(32, 64, device=device)).sum().backward()
        observation.step()
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
def test_a_copy_of_an_observed_model_is_not_observed(copied, device: torch.device):
    module = torch.nn.Sequential(te.Linear(64, 64, device=device), torch.nn.ReLU())
    with te.observe(module, every=1) as observation:
        other = copied(module)
        other(torch.randn(32, 64, device=device)).sum().backward()
        report = observation.step()
    assert report is not None and not report.tensors
    with te.observe(other, every=1) as observation:
        other(torch.randn(32, 64, device=device)).sum().backward()
        report = observation.step()
    assert (
        report is not None and len([row for row in report.tensors if row.tensor == "forward"]) == 2
    )


def test_an_observed_model_in_a_compiled_function_raises(device: torch.device):
    module = torch.nn.Sequential(torch.nn.ReLU(), te.Linear(64, 64, device=device))
    compiled = torch.compile(lambda x: module(x).sum(), backend="eager", fullgraph=True)
    x = torch.randn(32, 64, device=device)
    with (
        te.observe(module, every=1),
        pytest.raises(RuntimeError, match="0 is compiled, and a compiled graph shows no"),
    ):
        compiled(x)
    assert torch.equal(compiled(x), module(x).sum())


def test_bad_calls_raise(device: torch.device):
    linear = te.Linear(64, 64, device=device)
    with pytest.raises(TypeError, match=r"model=3 is an int; give an nn\.Module"):
        te.observe(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="every=0 is below 1"):
        te.observe(linear, every=0)
    with pytest.raises(ValueError, match="is compiled"):
        te.observe(torch.compile(linear))
    observation = te.observe(linear)
    with pytest.raises(ValueError, match="is observed already"):
        te.observe(torch.nn.Sequential(linear))
    with pytest.raises(ValueError, match="no step has been observed"):
        observation.table()
    observation.close()
    with pytest.raises(ValueError, match="the observation is closed"):
        observation.step()


def test_log_that_is_a_directory_raises_its_path_and_the_remedy(tmp_path: Path):
    module = te.Linear(16, 16, device="cpu")
    with pytest.raises(
        IsADirectoryError,
        match=r"is a directory; give the path of a file, such as .*observation\.jsonl",
    ):
        te.observe(module, log=tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist; create it first"):
        te.observe(module, log=tmp_path / "missing" / "log.jsonl")
    te.observe(module, log=tmp_path / "log.jsonl").close()
