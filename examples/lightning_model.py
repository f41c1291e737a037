"""Train a Lightning module in FP8: `python examples/lightning_model.py`.

`TransformerEnginePrecision` replaces `Linear` and `LayerNorm` layers of the module by layers of this package, and runs
every training step under the recipe.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from lightning.pytorch.plugins import TransformerEnginePrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(lightning.LightningModule):
    """Reconstructs vectors [batch, 64] that lie on a surface of 8 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 16), nn.Linear(16, 64)
        )
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        loss = nn.functional.mse_loss(self.network(x).float(), x)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the losses of the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--epochs", type=int, default=10, help="passes over the data (default: %(default)s)"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="no progress bar and no summary of the model"
    )
    options = parser.parse_args(argv)

    lightning.seed_everything(0, verbose=False)
    data = torch.randn(512, 8) @ torch.randn(8, 64) / 8**0.5
    precision = TransformerEnginePrecision(
        weights_dtype=torch.bfloat16,
        recipe={"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"},
        replace_layers=True,
    )
    listing = not options.quiet
    trainer = lightning.Trainer(
        plugins=[precision],
        max_epochs=options.epochs,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=listing,
        enable_model_summary=listing,
    )
    model = Autoencoder()
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=64, shuffle=True))
    print(f"loss {model.losses[0]:.4f} -> {model.losses[-1]:.4f}")
    return model.losses


if __name__ == "__main__":
    main()
