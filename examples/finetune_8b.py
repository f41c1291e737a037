"""Train all parameters of an 8-billion-parameter Llama on one H200: `python examples/finetune_8b.py --steps 50`.

Sequences of 8192 tokens, FP8 products and bfloat16 parameters. Three things keep the step small: Adam's moments are
block-scaled FP8, 2 bytes per parameter together; each parameter is stepped in the backward pass, so that gradients
never exist together; and the loss stores no logits. Parameters are rounded stochastically and need no masters.

The program plans the peak memory, trains, and prints tokens per second, the measured and the planned peak. The
weights are random, or those of a Hugging Face checkpoint: `--checkpoint FOLDER --data TEXT --save FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.conversion import (
    Decoder,
    DecoderConfig,
    RotaryConfig,
    load_model,
    save_model,
)
from transformer_engine.pytorch.inspect.memory_plan import MemoryPlan

GIB = 2**30
BLOCK_SCALED: dict[str, Any] = {
    "exp_avg_dtype": torch.uint8,
    "exp_avg_sq_dtype": torch.uint8,
    "block_scaled_states": True,
    "stochastic_rounding": True,
}
# Bytes per parameter with its states and without its gradient.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "stochastic": BLOCK_SCALED,  # 2 + 2
    "remainders": {**BLOCK_SCALED, "master_weights": True, "store_param_remainders": True},  # 4 + 2
    "float32": {"master_weights": True, "store_param_remainders": True},  # 4 + 8
}
RECIPES = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
}


class LanguageModel(nn.Module):
    """Mean next-token cross entropy of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of tokens and targets [batch, length]."""
        hidden = self.decoder.features(tokens)
        return te.fused_linear_cross_entropy(hidden, self.decoder.head_weight, targets)


def llama_config(options: argparse.Namespace) -> DecoderConfig:
    """Llama 3 8B, with the sizes of the options."""
    return DecoderConfig(
        vocabulary=options.vocabulary,
        hidden=options.hidden,
        feed_forward=options.feed_forward,
        layers=options.layers,
        heads=options.hidden // options.head_size,
        groups=options.groups,
        head_size=options.head_size,
        positions=options.length,
        epsilon=1e-5,
        rotary=RotaryConfig(base=500000.0),
        windows=(None,) * options.layers,
    )


def make_decoder(options: argparse.Namespace, device: torch.device) -> Decoder:
    """Load the checkpoint, or draw random weights on the device."""
    dtype = torch.bfloat16
    if options.checkpoint is not None:
        return load_model(options.checkpoint, device, dtype)
    torch.manual_seed(0)
    return Decoder(llama_config(options), device, dtype)


def read_tokens(options: argparse.Namespace) -> Tensor:
    """Token ids of the text: of the checkpoint's tokenizer, or bytes without a checkpoint."""
    text = "\n".join(path.read_text() for path in options.data)
    if options.checkpoint is None:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    from transformers import AutoTokenizer

    return torch.tensor(AutoTokenizer.from_pretrained(options.checkpoint)(text).input_ids)


def batch_of(text: Tensor, step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Random windows of the text and their next tokens [batch, length]; they depend on the step only."""
    if len(text) < length + 2:
        raise ValueError(
            f"the text has {len(text)} tokens; {length + 2} are needed, give more --data"
        )
    starts = torch.randint(
        len(text) - length - 1, (batch,), generator=torch.Generator().manual_seed(step)
    )
    windows = torch.stack([text[start : start + length + 1] for start in starts])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def plan_memory(
    model: LanguageModel,
    optimizer: te.optimizers.FusedAdam,
    scaling: recipe.Recipe,
    options: argparse.Namespace,
) -> MemoryPlan:
    """Plan the step; the norm and MLP of all layers are recomputed if the plan exceeds the budget."""
    tokens = torch.empty(options.batch, options.length, dtype=torch.int64, device="meta")
    for recomputed in (False, True):
        for module in model.modules():
            if isinstance(module, te.LayerNormMLP):
                module.checkpoint = recomputed
        plan = te.memory_plan(
            model,
            scaling,
            tokens.numel(),
            inputs=(tokens, tokens),
            input_gradient=False,
            optimizer=optimizer,
            step_in_backward=True,
        )
        print(f"planned peak {plan.peak / GIB:.2f} GiB, MLPs recomputed: {recomputed}")
        if plan.peak <= options.budget * GIB:
            return plan
    raise ValueError(
        f"the step needs {plan.peak / GIB:.1f} of {options.budget:.1f} GiB; reduce --batch or --length"
    )


class StepClock:
    """Seconds of consecutive steps, on a GPU without waiting for it after each step."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Mark the end of a step, and the start of the next one."""
        if not self.on_gpu:
            self.marks.append(time.perf_counter())
            return
        make_event: Any = torch.cuda.Event  # its constructor has no annotations
        event = make_event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def seconds(self) -> list[float]:
        """Seconds between consecutive marks."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if not self.on_gpu:
            return [end - start for start, end in pairs]
        torch.cuda.synchronize()
        return [1e-3 * start.elapsed_time(end) for start, end in pairs]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, and return the losses and figures of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default=32, type=int, help="decoder layers")
    parser.add_argument("--hidden", default=4096, type=int, help="features per token")
    parser.add_argument("--feed-forward", default=14336, type=int, help="features in an MLP")
    parser.add_argument("--head-size", default=128, type=int, help="features per attention head")
    parser.add_argument("--groups", default=8, type=int, help="key and value heads")
    parser.add_argument("--vocabulary", default=128256, type=int, help="tokens in the vocabulary")
    parser.add_argument("--length", default=8192, type=int, help="tokens per sequence")
    parser.add_argument("--batch", default=1, type=int, help="sequences per step")
    parser.add_argument("--steps", default=50, type=int, help="training steps")
    parser.add_argument("--warm-up", default=4, type=int, help="steps before times are measured")
    parser.add_argument("--rate", default=1e-5, type=float, help="learning rate")
    parser.add_argument("--recipe", choices=RECIPES, default="current", help="recipe")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="stochastic", help="states of the optimizer"
    )
    parser.add_argument(
        "--quantized", action="store_true", help="FP8 parameters with float32 masters"
    )
    parser.add_argument("--budget", type=float, help="GiB (default: 95 %% of the GPU's memory)")
    parser.add_argument("--checkpoint", type=Path, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    here = sorted(Path(__file__).parent.glob("*.py"))
    parser.add_argument("--data", nargs="+", type=Path, default=here, help="text files")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    if options.save is not None and options.checkpoint is None:
        parser.error("--save writes a model in the format of its --checkpoint; give one")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if options.budget is None:
        total = torch.cuda.get_device_properties(device).total_memory if on_gpu else 2**63
        options.budget = 0.95 * total / GIB
    scaling = RECIPES[options.recipe]()
    with te.quantized_model_init(enabled=options.quantized, recipe=scaling):
        model = LanguageModel(make_decoder(options, device))
    settings = dict(OPTIMIZERS[options.optimizer])
    if options.quantized:  # masters are needed, and parameters have no lower halves
        settings |= {"master_weights": True, "store_param_remainders": False}
    optimizer = te.optimizers.FusedAdam(
        model.parameters(), lr=options.rate, betas=(0.9, 0.95), **settings
    )
    plan = plan_memory(model, optimizer, scaling, options)

    text = read_tokens(options)
    losses: list[Tensor] = []
    clock = StepClock(on_gpu)
    for step in range(options.steps):
        tokens, targets = (
            x.to(device) for x in batch_of(text, step, options.batch, options.length)
        )
        if on_gpu and step == options.warm_up:
            torch.cuda.reset_peak_memory_stats()
        with te.autocast(recipe=scaling):
            loss = model(tokens, targets)
        with optimizer.step_in_backward():
            loss.backward()
        losses.append(loss.detach())
        clock.mark()
    times = clock.seconds()
    found = [loss.item() for loss in losses]
    seconds = statistics.median(times[options.warm_up :] or times)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    figures: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_step": options.batch * options.length,
        "tokens_per_second": options.batch * options.length / seconds,
        "step_ms": 1e3 * seconds,
        "first_ms": 1e3 * times[0],
        "planned_gib": plan.peak / GIB,
        "peak_gib": None if peak is None else peak / GIB,
        "plan": str(plan).splitlines()[-10:],
        "recipe": options.recipe,
        "optimizer": options.optimizer,
        "quantized": options.quantized,
        "losses": found,
    }
    print(
        f"{figures['parameters'] / 1e9:.2f} billion parameters, {figures['tokens_per_second']:.0f} tokens/s, "
        f"loss {found[0]:.3f} to {found[-1]:.3f}"
    )
    if peak is not None:
        print(f"peak {peak / GIB:.2f} GiB, planned {100 * (plan.peak / peak - 1):+.1f} %")
    if options.save is not None:
        save_model(model.decoder, options.save)
    if options.json is not None:
        options.json.write_text(json.dumps(figures) + "\n")
    return figures


if __name__ == "__main__":
    main()
