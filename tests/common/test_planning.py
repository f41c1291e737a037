"""The simulator of `te plan`: claimed measurements within 15 %, and arithmetic with a known result."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import plan_accuracy
import pytest

from tests.support.programs import ROOT
from transformer_engine.common.planning import GPUS, MODELS, LinkRates, ModelShape, plan, search
from transformer_engine.common.planning.hardware import (
    DEFAULT_LINKS,
    FORMATS,
    format_named,
    host_links,
)
from transformer_engine.common.planning.layer import MicroBatch, layer
from transformer_engine.common.planning.models import model_shape
from transformer_engine.common.planning.simulate import RankMachine

LLAMA = MODELS["llama-8b"]
TINY = ModelShape("tiny", 1024, 8, 16, 8, 64, 2816, 32000)


@pytest.fixture(scope="module")
def checks():
    return plan_accuracy.checks()


def test_every_claimed_measurement_is_predicted_within_15_percent(checks):
    claimed = [check for check in checks if check.reason is None]
    wrong = {
        f"{check.group}: {check.case}": check.error for check in claimed if abs(check.error) > 0.15
    }
    assert len(claimed) > 350 and not wrong
    assert sum(not check.fitted for check in claimed) > 200


def test_exceptions_are_few_and_each_pattern_has_one(checks):
    reasons = {
        check.reason for check in checks if check.reason is not None and abs(check.error) > 0.15
    }
    assert reasons == set(plan_accuracy.NOT_CLAIMED.values())
    assert sum(check.reason is not None for check in checks) < len(checks) / 6


def test_the_prediction_of_a_layer_follows_its_measurement_over_all_recipes(checks):
    """A single product rate would be wrong by a factor of 2, the ratio between FP8 and bfloat16."""
    rows = [
        check for check in checks if check.case.startswith("layer_fb/") and "H200" in check.group
    ]
    ratios = [check.predicted / check.measured for check in rows]
    assert len(rows) == 16 and max(ratios) / min(ratios) < 1.12


@pytest.mark.parametrize("name, parameters", [
    ("llama-8b", 8.03e9), ("llama-70b", 70.6e9), ("llama-405b", 405.8e9), ("mixtral-8x7b", 46.7e9),
    ("qwen3-30b-a3b", 30.5e9), ("llama-1b", 1.236e9), ("gpt3-175b", 174.6e9),
])  # fmt: skip
def test_models_have_their_published_number_of_parameters(name, parameters):
    assert MODELS[name].parameters() == pytest.approx(parameters, rel=5e-3)


def test_a_step_has_at_least_the_flops_of_its_products():
    result = plan("llama-8b", 8, fsdp=8)
    tokens = 8192 * 8
    matrices = 8.03e9 - 128256 * 4096
    attention = 3 * 4 * 32 * 32 * 128 * 8192 / 2  # forward and backward, half of the pairs
    flops = tokens * (6 * matrices + attention)
    assert result.model.flops_per_token(8192) * tokens == pytest.approx(flops, rel=1e-2)
    assert result.utilization == pytest.approx(flops / (result.step_ms * 8 * 989e9), rel=1e-2)
    assert result.tokens_per_s == pytest.approx(1e3 * tokens / result.step_ms)


def test_parts_and_exposed_communication_add_up_to_the_step():
    for result in (
        plan("llama-8b", 64, fsdp=8, tp=2, cp=2, pp=2, recipe="current", recompute="full"),
        plan("mixtral-8x7b", 64, fsdp=16, tp=2, ep=8, recipe="block"),
        plan(TINY, 1),
    ):
        total = sum(result.parts.values()) + sum(result.exposed.values())
        assert total == pytest.approx(result.step_ms)
        assert all(
            took <= result.communication[axis] * 1.000001 for axis, took in result.exposed.items()
        )
        assert result.memory.peak == pytest.approx(sum(result.as_dict()["memory"].values()) / 2)


def test_more_ranks_take_less_time_and_memory_of_the_same_batch():
    for axis in ("tp", "cp", "pp", "fsdp"):
        axes: list[dict[str, Any]] = [{axis: size} for size in (1, 2)]
        one, two = (
            plan("llama-8b", size[axis], global_batch=8, recipe="current", graphs=True, **size)
            for size in axes
        )
        assert one.step_ms / 2 < two.step_ms < one.step_ms, axis
        assert two.memory.peak < one.memory.peak, axis


def test_sharded_memory_is_that_of_the_parameters():
    one, eight = plan("llama-8b", 8), plan("llama-8b", 8, fsdp=8)
    parameters = LLAMA.parameters()
    assert one.memory.parameters == pytest.approx(2 * parameters, rel=1e-3)
    assert one.memory.optimizer == pytest.approx(12 * parameters, rel=1e-3)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(eight.memory, name) == pytest.approx(getattr(one.memory, name) / 8)
    assert not one.fits and one.warnings and eight.fits


def test_sequence_parallel_ranks_halve_the_saved_activations():
    one, two = (
        layer(RankMachine(GPUS["h100"], FORMATS["current"], tp=size), LLAMA, MicroBatch(8192))
        for size in (1, 2)
    )
    assert two.forward.saved == pytest.approx(one.forward.saved / 2, rel=0.01)
    assert two.forward.flops == pytest.approx(one.forward.flops / 2)
    assert not one.forward.communication and two.forward.communication["tp"] > 0


def test_a_pipeline_idles_for_its_other_stages():
    result = plan(
        replace(TINY, layers=4, vocabulary=1), 4, pp=4, micro_batch=1, global_batch=8, graphs=True
    )
    assert result.micro_batches == 8
    busy = (
        result.step_ms
        - result.parts["pipeline idle"]
        - result.parts["optimizer"]
        - result.exposed.get("dp", 0)
    )
    assert result.parts["pipeline idle"] == pytest.approx(busy * 3 / 8, rel=0.1)
    more = plan(
        replace(TINY, layers=4, vocabulary=1), 4, pp=4, micro_batch=1, global_batch=64, graphs=True
    )
    assert more.parts["pipeline idle"] == pytest.approx(result.parts["pipeline idle"])


def test_collectives_follow_bytes_ranks_and_hosts():
    links, size = LinkRates(), 1 << 28
    assert links.collective_ms("all_gather", size, 1, 1) == 0
    two, eight = (
        links.collective_ms("all_gather", size, ranks, 1) - links.start for ranks in (2, 8)
    )
    assert eight / two == pytest.approx((7 / 8) / (1 / 2))
    gather, reduce = (
        links.collective_ms(kind, size, 8, 1) for kind in ("all_gather", "all_reduce")
    )
    assert gather < reduce < 2 * gather
    # One rank per host has one network adapter; 8 ranks on a host have 8 adapters.
    separate, joint = (links.collective_ms("all_gather", size, 16, stride) for stride in (8, 1))
    assert separate == pytest.approx(links.start + 15 * links.hop + size * 15 / 16 / links.network)
    assert joint == pytest.approx(links.start + links.hop + size * 15 / 16 / links.ring)
    slow = replace(links, network=links.network / 10)
    assert (
        plan("llama-8b", 64, fsdp=64, links=slow).exposed["fsdp"]
        > plan("llama-8b", 64, fsdp=64).exposed["fsdp"]
    )
    assert host_links(GPUS["b200"]).ring == 2 * DEFAULT_LINKS.ring


def test_a_search_equals_trying_every_mesh():
    result = search(
        TINY, 8, gpu="h200", recipe="delayed", count=1, cp=1, pp=1, micro_batch=1, sequence=4096
    )[0]
    every = [
        plan(
            TINY,
            8,
            tp=tp,
            fsdp=fsdp,
            global_batch=8,
            gpu="h200",
            recipe="delayed",
            recompute=repeated,
            sequence=4096,
        )
        for tp in (1, 2, 4, 8)
        for fsdp in (1, 2, 4, 8)
        for repeated in ("none", "full")
        if tp * fsdp <= 8
    ]
    assert result.step_ms == min(each.step_ms for each in every if each.fits)
    assert plan(TINY, 8, recipe="none") == plan(TINY, 8, recipe="bf16")
    assert result.global_batch == 8


@pytest.mark.parametrize(
    "options, words",
    [
        ({"tp": 3}, "dp=2 * fsdp=1 * tp=3 * cp=1 * pp=1 is 6, but devices=8"),
        (
            {"tp": 16, "devices": 16},
            "kv_heads=8 is not divisible by tp=16; choose tp from the divisors of 8",
        ),
        ({"pp": 3, "devices": 3}, "layers=32 is not divisible by pp=3"),
        ({"cp": 8, "sequence": 1000}, "sequence=1000 is not divisible by 2 * cp=16"),
        ({"ep": 2}, "ep=2 needs a model with experts, and llama-8b has none; use ep=1"),
        ({"model": "mixtral-8x7b", "ep": 3, "devices": 3}, "experts=8 is not divisible by ep=3"),
        (
            {"gpu": "h10"},
            "gpu 'h10' is unknown (did you mean 'h100'?); choose from h100, h200, b200",
        ),
        ({"recipe": "curent"}, "recipe 'curent' is unknown (did you mean 'current'?)"),
        (
            {"recipe": "mxfp8"},
            "recipe='mxfp8' has no products on gpu='h100' (compute capability 9.0 has no mxfp8 products",
        ),
        ({"recipe": "block", "gpu": "b200"}, "recipe='block' has no products on gpu='b200'"),
        ({"model": "lama-8b"}, "did you mean 'llama-8b'?"),
        ({"recompute": "some"}, "recompute='some' is unknown; choose from none, full"),
        (
            {"global_batch": 12, "fsdp": 8},
            "global_batch=12 is not divisible by dp * fsdp * micro_batch = 8; use 16",
        ),
        ({"devices": 0}, "devices=0 must be an integer of at least 1"),
        ({"micro_batch": True}, "micro_batch=True must be an integer"),
        (
            {"sequence": 8200, "recipe": "current"},
            "tokens of a rank (current) = 8200 is not divisible by 16",
        ),
        ({"hidden": -4096}, "hidden=-4096 of model 'llama-8b' must be an integer of at least 1"),
        (
            {"scheme": "a2a", "cp": 8, "tp": 2, "devices": 16},
            "kv_heads / tp=4 is not divisible by cp with scheme='a2a'=8",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_limit_and_remedy(options, words):
    kwargs = {"model": "llama-8b", "devices": 8, **options}
    with pytest.raises(ValueError) as raised:
        plan(kwargs.pop("model"), kwargs.pop("devices"), **kwargs)
    assert words in str(raised.value)


def test_a_search_that_finds_nothing_names_the_smallest_mesh():
    with pytest.raises(
        ValueError,
        match=r"no mesh of 2 devices fits: llama-405b needs at least \d+.\d GiB of the 75",
    ):
        search("llama-405b", 2)
    with pytest.raises(
        ValueError,
        match=r"no mesh of 8 devices is valid for llama-8b; the first reason: recipe 'x'",
    ):
        search("llama-8b", 8, recipe="x")


def test_a_configuration_of_hugging_face_is_a_model(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert model_shape(path) == model_shape(tmp_path) == replace(LLAMA, name="llama")
    path.write_text(json.dumps({**config, "num_local_experts": 8, "num_experts_per_tok": 2}))
    assert model_shape(path).parameters() == pytest.approx(
        MODELS["mixtral-8x7b"].parameters(), rel=0.02
    )
    path.write_text(json.dumps({**config, "kv_lora_rank": 512}))
    with pytest.raises(ValueError, match=r"kv_lora_rank=512: latent attention .* not simulated"):
        model_shape(path)
    path.write_text(json.dumps({"hidden_size": 4096}))
    with pytest.raises(ValueError, match="has no field num_hidden_layers or n_layer"):
        model_shape(path)
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not valid JSON"):
            model_shape(path)
    for wrong, words in (
        ({"text_config": 3}, "text_config"),
        ({"hidden_size": "4096"}, "hidden='4096', which is not a whole number"),
        ({"num_attention_heads": 0}, "heads=0"),
        ({"layer_types": [{}, []]}, "layers of different kinds"),
    ):
        path.write_text(json.dumps(config | wrong))
        with pytest.raises(ValueError, match=words):
            model_shape(path)
    sizes = {"hidden": 512, "layers": 2, "heads": 8}
    assert (
        model_shape("mine", **sizes).ffn == 2048 and model_shape("llama-8b", layers=2).layers == 2
    )


def test_every_model_has_a_plan_under_every_recipe_of_each_gpu():
    for gpu in GPUS.values():
        for recipe, row in FORMATS.items():
            if gpu.rates.keys() >= set(row.products):
                for shape in MODELS.values():
                    result = plan(replace(shape, layers=2), 8, fsdp=4, tp=2, gpu=gpu, recipe=recipe)
                    assert math.isfinite(result.step_ms) and 0 < result.utilization < 2, (
                        gpu.name,
                        recipe,
                        shape.name,
                    )
                    assert all(
                        took >= 0 for took in (*result.parts.values(), *result.exposed.values())
                    )


@pytest.mark.parametrize("gpu", GPUS)
def test_every_rate_of_a_plan_states_its_source(gpu):
    result = plan("llama-8b", 8, fsdp=8, gpu=gpu, recipe="current")
    source = "data sheet" if gpu == "b200" else "measured"
    assert {
        "bf16 products",
        "fp8 products",
        "fp8_split products",
        "cudnn attention",
        "copies",
    } <= result.rates.keys()
    sources = {name: rate.rpartition("(")[2].rstrip(")") for name, rate in result.rates.items()}
    assert sources.pop("network") == "assumed" and set(sources.values()) == {source}
    assert f"rates: bf16 products {result.rates['bf16 products']}" in str(result)
    links = replace(host_links(GPUS[gpu]), network=1e7)
    assert plan("llama-8b", 8, fsdp=8, gpu=gpu, links=links).rates["network"] == "10 GB/s (given)"


# Product names on simulated GPUs, by plan recipe.
PRODUCTS = {
    "none": "none",
    "delayed": "float8",
    "current": "float8",
    "block": "block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


@pytest.mark.parametrize("gpu", GPUS)
def test_no_rate_belongs_to_a_product_without_a_native_backend(gpu):
    choices = json.loads((ROOT / "docs" / "hardware.json").read_text())
    backends = choices[GPUS[gpu].hardware.architecture]["with nvmath-python"]
    for recipe, row in FORMATS.items():
        try:
            format_named(recipe, GPUS[gpu])
        except ValueError:
            continue
        of_recipe = backends[PRODUCTS[recipe]]
        assert not {"reference", "widen", "decode"} & set(of_recipe.values()), recipe
        assert GPUS[gpu].hardware.has(row.needs)


def test_planning_imports_no_tensor_library():
    code = (
        "import sys; from transformer_engine.common.planning import plan; plan('llama-8b', 8, fsdp=8); "
        "sys.exit(bool({'torch', 'jax', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
