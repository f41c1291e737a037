"""GroupedLinear with random settings: bitwise equal to a loop over Linear layers, and no more saved bytes."""

from __future__ import annotations

import dataclasses
import random
from types import NoneType
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, same

IN, OUT = 128, 64
CASES = 24


class Case:
    """A random layer, its recipe and calls; a loop over Linear layers with the same parameters.

    Args:
        seed: Chooses everything.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        choose = random.Random(seed)
        self.recipe = RECIPES[choose.choice(sorted(RECIPES))]
        if (
            not isinstance(self.recipe, NoneType | te.recipe.DelayedScaling)
            and choose.random() < 0.4
        ):
            override = choose.choice(["high_precision", "dequantized"])
            self.recipe = dataclasses.replace(self.recipe, backward_override=override)  # pyright: ignore
        self.groups = choose.choice([1, 2, 5])
        self.frozen = {i for i in range(self.groups) if choose.random() < 0.2}
        self.needs_grad_input = choose.random() < 0.8
        self.first = choose.choice([None, None, True])
        options = {"bias": choose.random() < 0.5, "fuse_wgrad_accumulation": choose.random() < 0.3}
        options["save_original_input"] = choose.random() < 0.3 and not isinstance(
            self.recipe, te.recipe.DelayedScaling
        )
        options["delay_wgrad_compute"] = choose.random() < 0.3 and not self.frozen
        dtype = choose.choice([torch.float32, torch.bfloat16])
        self.options = {**options, "params_dtype": dtype, "device": device}
        self.layer = te.GroupedLinear(self.groups, IN, OUT, **self.options)
        self.linears = [te.Linear(IN, OUT, **self.options) for _ in range(self.groups)]
        for i, linear in enumerate(self.linears):
            for kind in ("weight", "bias") if options["bias"] else ("weight",):
                local = getattr(self.layer, f"{kind}{i}")
                for parameter in (local, getattr(linear, kind)):
                    parameter.data = local.data.clone()
                    parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
                    parameter.requires_grad_(i not in self.frozen)
        self.splits = [
            [choose.choice([0, 32, 64, 96]) for _ in range(self.groups - 1)] + [32]
            for _ in range(2)
        ]
        generator = torch.Generator().manual_seed(seed)
        self.inputs = [
            torch.randn(sum(rows), IN, generator=generator).to(device, dtype)
            for rows in self.splits
        ]
        self.grads = [
            torch.randn(sum(rows), OUT, generator=generator).to(device, dtype)
            for rows in self.splits
        ]

    def trained(self, layers: list[Any], grouped: bool) -> tuple[list[torch.Tensor | None], int]:
        """Results, gradients and scaling states from two steps, and the bytes that their passes saved."""
        records: list[torch.Tensor | None] = []
        saved: dict[int, torch.UntypedStorage] = {}
        contents = {p.untyped_storage().data_ptr() for layer in layers for p in layer.parameters()}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in contents:
                saved[storage.data_ptr()] = storage  # kept alive, so that its address is not reused
            return tensor

        for rows, values, grad in zip(self.splits, self.inputs, self.grads, strict=True):
            x = values.clone().requires_grad_(self.needs_grad_input)
            contents.add(x.untyped_storage().data_ptr())
            hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
            with hooks, te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
                if grouped:
                    y = layers[0](x, rows, is_first_microbatch=self.first)
                else:
                    parts = zip(layers, x.split(rows), strict=True)
                    y = torch.cat(
                        [layer(part, is_first_microbatch=self.first) for layer, part in parts]
                    )
            if y.requires_grad:
                y.backward(grad)
                for layer in layers if self.options["delay_wgrad_compute"] else ():
                    layer.backward_dw()
            records += [y.detach(), x.grad]
        for i in range(self.groups):
            for kind in ("weight", "bias") if self.options["bias"] else ("weight",):
                parameter = (
                    getattr(layers[0], f"{kind}{i}") if grouped else getattr(layers[i], kind)
                )
                records += [parameter.grad, parameter.main_grad]
        return records + self._states(layers, grouped), sum(
            [storage.nbytes() for storage in saved.values()]
        )

    def _states(self, layers: list[Any], grouped: bool) -> list[torch.Tensor]:
        if not isinstance(self.recipe, te.recipe.DelayedScaling):
            return []
        results: list[torch.Tensor] = []
        for key, slots in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            for layer in layers:
                state = layer.fp8_meta[key]
                for i in range(self.groups if grouped else 1):
                    columns = slice(slots * i, slots * (i + 1))
                    results += [state.scale[columns], state.amax_history[:, columns]]
        return results


@pytest.mark.parametrize("seed", range(CASES))
def test_random_settings_are_bitwise_equal_to_a_loop_over_linears(seed, device):
    case = Case(seed, device)
    ours, saved = case.trained([case.layer], True)
    reference, saved_by_linears = case.trained(list(case.linears), False)
    assert len(ours) == len(reference)
    assert saved <= saved_by_linears
    for actual, other in zip(ours, reference, strict=True):
        assert (actual is None) == (other is None)
        if actual is not None and other is not None:
            assert same([actual], [other])


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_dequantized_backward_saves_no_input_for_frozen_weights(name, device):
    recipe = dataclasses.replace(RECIPES[name], backward_override="dequantized")  # pyright: ignore[reportArgumentType]
    layer = te.GroupedLinear(3, IN, OUT, bias=False, params_dtype=torch.bfloat16, device=device)
    x = torch.randn(192, IN, device=device, dtype=torch.bfloat16)
    saved: list[int] = []
    for frozen in ([], [1], [0, 2]):
        for i in range(3):
            getattr(layer, f"weight{i}").requires_grad_(i not in frozen)
        sizes: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=sizes: s.append(t.nbytes) or t, lambda t: t
        )
        with hooks, te.autocast(recipe=recipe):
            y = layer(x, [64, 64, 64])
        y.sum().backward()
        saved.append(sum(sizes))
        for i in range(3):
            assert (getattr(layer, f"weight{i}").grad is None) == (i in frozen)
            getattr(layer, f"weight{i}").grad = None
    assert saved[0] * 2 == saved[1] * 3 == saved[2] * 6
