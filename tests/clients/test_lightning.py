"""Unmodified lightning trains with this package: precision as a plugin and as a string, with Trainer and Fabric."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from tests.clients import installed

# One code under two names: the package lightning, or pytorch_lightning and lightning_fabric.
WHOLE = importlib.util.find_spec("lightning") is not None
TRAINER, FABRIC = (
    ("lightning.pytorch", "lightning.fabric")
    if WHOLE
    else ("pytorch_lightning", "lightning_fabric")
)
pytestmark = [
    *installed.needs(TRAINER.split(".")[0], FABRIC.split(".")[0]),
    installed.EMULATED,
    # Lightning's own warning about a Trainer without loader workers
    pytest.mark.filterwarnings("ignore"),
]

FEATURES, STEPS = 64, 12
RECIPE = {"fp8_format": "HYBRID", "amax_history_len": 8, "amax_compute_algo": "max"}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, FEATURES),
        nn.LayerNorm(FEATURES),
        nn.GELU(),
        nn.Linear(FEATURES, FEATURES),
    )


def data() -> tuple[Tensor, Tensor]:
    """A linear map with noise, in float32: the plugin converts it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, FEATURES, generator=generator)
    return x, x @ torch.randn(FEATURES, FEATURES, generator=generator) / FEATURES**0.5


def plugin(library: str) -> dict[str, Any]:
    """The keywords that give a Trainer's or a Fabric's plugin."""
    precision = importlib.import_module(f"{library}.plugins").TransformerEnginePrecision
    return {
        "plugins": [precision(weights_dtype=torch.bfloat16, recipe=RECIPE, replace_layers=True)]
    }


def precision_options(how: str, library: str) -> dict[str, Any]:
    return plugin(library) if how == "plugin" else {"precision": how}


def fit_model(
    folder: Any, checkpoint: Any = None, steps: int = STEPS, **how: Any
) -> tuple[list[float], Any, Any]:
    """Fit a module with a Trainer; return (losses, trainer, module)."""
    lightning = importlib.import_module(TRAINER)

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if not hasattr(self, "network"):
                torch.manual_seed(0)
                self.network = network()

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.network(x[0]), y[0])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    x, y = data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[None], y[None]))
    task = Task()
    trainer = lightning.Trainer(
        max_epochs=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        devices=1,
        **how,
    )
    trainer.fit(task, loader, ckpt_path=checkpoint, weights_only=False)
    return task.losses, trainer, task


@pytest.mark.parametrize("how", ["plugin", "transformer-engine", "transformer-engine-float16"])
def test_a_trainer_trains_on_this_engine_s_layers(how, tmp_path):
    losses, _, task = fit_model(tmp_path, **precision_options(how, TRAINER))
    kinds = [type(module) for module in task.network]
    assert kinds == [te.Linear, te.LayerNorm, nn.GELU, te.Linear]
    installed.assert_falls(losses)
    assert task.network[0].fp8_meta["recipe"].delayed()


def test_a_trainer_resumes_from_its_checkpoint(tmp_path):
    full, *_ = fit_model(tmp_path, steps=6, **plugin(TRAINER))
    _, trainer, _ = fit_model(tmp_path, steps=3, **plugin(TRAINER))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest, *_ = fit_model(tmp_path, tmp_path / "half.ckpt", steps=6, **plugin(TRAINER))
    assert rest == full[3:]


@pytest.mark.parametrize("how", ["plugin", "transformer-engine", "transformer-engine-float16"])
def test_fabric_trains_on_this_engine_s_layers(how):
    fabric = importlib.import_module(FABRIC).Fabric(devices=1, **precision_options(how, FABRIC))
    torch.manual_seed(0)
    model = network()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5))
    x, y = fabric.to_device(data())

    def step() -> Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    installed.assert_falls(installed.losses(step, STEPS))
    assert any(isinstance(module, te.Linear) for module in model.modules())


def test_init_module_makes_this_engine_s_layers():
    fabric = importlib.import_module(FABRIC).Fabric(devices=1, **plugin(FABRIC))
    with fabric.init_module():
        model = network()
    assert [type(module) for module in model] == [te.Linear, te.LayerNorm, nn.GELU, te.Linear]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert nn.Linear.__module__.startswith("torch.")
    y = fabric.setup_module(model)(fabric.to_device(data()[0]))
    assert torch.isfinite(y).all()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["plugin", "transformer-engine"])
def test_a_trainer_on_a_gpu_quantizes(how, tmp_path):
    losses, _, task = fit_model(tmp_path, accelerator="gpu", **precision_options(how, TRAINER))
    installed.assert_falls(losses)
    assert task.network[0].fp8_meta["scaling_fwd"].amax_history.any()
