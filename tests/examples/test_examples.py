"""Every program of `examples/` runs at a tiny size and does what its documentation states."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.clients import processes
from transformer_engine.common import optional

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Run in separate processes: these libraries change torch or the process.
CLIENTS = {
    "accelerate_llama": (("accelerate", "transformers"), ["--steps", "8", "--state", "state"]),
    "lightning_model": (("lightning",), ["--epochs", "1", "--quiet"]),
    "lora_fp8": (("peft",), ["--steps", "25", "--save", "adapter"]),
}


def load(name: str) -> ModuleType:
    """Import an example as a module."""
    spec = importlib.util.spec_from_file_location(
        f"examples_{name}", ROOT / "examples" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve their annotations in sys.modules
    spec.loader.exec_module(module)
    return module


def test_training_of_the_llama_resumes_bit_for_bit(tmp_path: Path):
    main = load("llama").main
    sizes = [
        "--layers",
        "1",
        "--hidden",
        "64",
        "--batch",
        "2",
        "--length",
        "32",
        "--recipe",
        "delayed",
    ]
    full = main([*sizes, "--steps", "8"])
    saved = ["--checkpoint", str(tmp_path / "llama.pt")]
    first = main([*sizes, "--steps", "4", *saved])
    rest = main([*sizes, "--steps", "8", *saved, "--resume"])
    assert first + rest == full
    assert full[-1] < full[0] - 0.1


FINETUNE = [
    *("--layers", "2", "--hidden", "64", "--feed-forward", "128", "--head-size", "32"),
    *("--groups", "1", "--vocabulary", "256", "--length", "64"),
]


@pytest.mark.parametrize(
    ("options", "bytes_per_parameter"),
    [
        (["--optimizer", "stochastic"], 2 + 2 / 128),
        (["--optimizer", "remainders", "--recipe", "delayed"], 4 + 2 / 128),
        (["--optimizer", "float32"], 10),
    ],
)
def test_all_parameters_of_a_llama_are_trained_with_small_states(
    options: list[str], bytes_per_parameter: float, tmp_path: Path
):
    file = tmp_path / "figures.json"
    steps = ["--steps", "12", "--rate", "3e-3", "--json", str(file)]
    figures = load("finetune_8b").main([*FINETUNE, *steps, *options])
    assert json.loads(file.read_text()) == figures
    losses = figures["losses"]
    assert losses[-1] < losses[0] - 1.0
    (states,) = (line for line in figures["plan"] if "optimizer" in line)
    planned = float(states.split()[1]) * 2**20
    assert planned == pytest.approx(bytes_per_parameter * figures["parameters"], rel=0.1)


def test_quantized_parameters_of_a_llama_are_trained():
    main = load("finetune_8b").main
    losses = main([*FINETUNE, "--steps", "6", "--rate", "3e-3", "--quantized"])["losses"]
    assert losses[-1] < losses[0] - 0.3


def test_a_step_above_the_memory_budget_is_an_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match=r"the step needs 0\.0 of 0\.0 GiB; reduce --batch"):
        load("finetune_8b").main([*FINETUNE, "--budget", "1e-6"])
    assert "MLPs recomputed: True" in capsys.readouterr().out


def test_a_checkpoint_is_trained_and_saved(tmp_path: Path):
    if not optional.installed("transformers"):
        pytest.skip("transformers is not installed; pip install transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from transformer_engine.pytorch.conversion import load_model

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    example = load("finetune_8b")
    example.read_tokens = lambda options: torch.arange(1000) % 251  # no tokenizer
    figures = example.main(
        [
            *("--checkpoint", str(tmp_path / "model"), "--save", str(tmp_path / "trained")),
            *("--length", "64", "--steps", "4", "--rate", "1e-3"),
        ]
    )
    assert figures["losses"][-1] < figures["losses"][0]
    before, after = (load_model(tmp_path / name, "cpu") for name in ("model", "trained"))
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        assert old.shape == new.shape and not torch.equal(old, new)


def test_batching_does_not_change_the_tokens_of_a_request():
    main = load("continuous_batching").main
    joint = main(["--requests", "5", "--layers", "1"])
    alone = main(["--requests", "5", "--layers", "1", "--places", "1"])
    few_pages = main(["--requests", "5", "--layers", "1", "--pages", "4"])
    assert joint == alone == few_pages
    assert len({tuple(tokens) for tokens in joint.values()}) == 5


def test_request_that_exceeds_the_cache_is_an_error():
    with pytest.raises(ValueError, match=r"request \d needs \d of 1 pages; raise --pages"):
        load("continuous_batching").main(["--requests", "5", "--layers", "1", "--pages", "1"])


def test_block_formats_keep_rows_of_different_magnitude():
    errors, losses = load("formats_on_cpu").main(["--steps", "8"])
    rows = errors["rows from 1e-4 to 1e4"]
    assert rows["mxfp8"] > rows["current"] + 10
    assert errors["normal"]["nvfp4"] < errors["normal"]["mxfp8"]
    assert all(abs(loss / losses["none"] - 1) < 0.1 for loss in losses.values())


def test_mixture_of_experts_learns():
    losses = load("mixture_of_experts").main(["--steps", "15", "--experts", "4", "--hidden", "32"])
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["flax_model", "nnx_model"])
def test_model_in_jax_learns(name: str):
    missing = [library for library in ("jax", "flax", "optax") if not optional.installed(library)]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; pip install '.[cli-jax]'")
    losses = load(name).main(["--steps", "15"])
    assert losses[-1] < 0.7 * losses[0]


def test_training_on_one_rank_lowers_the_loss(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    losses = load("fsdp2").main(["--steps", "8", "--hidden", "32", "--layers", "1"])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("options", [[], pytest.param(["--compile"], marks=pytest.mark.slow)])
def test_converted_model_learns(options: list[str], capsys: pytest.CaptureFixture[str]):
    losses = load("torchtitan_convert").main(["--steps", "8", "--hidden", "64", *options])
    assert losses[-1] < 0.8 * losses[0]
    assert "layers.*.attention.wq (2)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="NCCL needs two GPUs"
)
def test_sharded_training_on_two_ranks_lowers_the_loss():
    program = [
        "-c",
        "import json, runpy; m = runpy.run_path('examples/fsdp2.py'); "
        "print(json.dumps(m['main'](['--steps', '8', '--hidden', '32', '--layers', '1'])))",
    ]
    losses = json.loads(processes.run_on_ranks(program, 2).splitlines()[-1])
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def losses_of_clients(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """{example: losses} of the installed libraries, from one process."""
    runs = {
        str(ROOT / "examples" / f"{name}.py"): argv
        for name, (needed, argv) in CLIENTS.items()
        if all(map(optional.installed, needed))
    }
    program = (
        "import json, runpy\n"
        f"losses = {{path: runpy.run_path(path)['main'](argv) for path, argv in {runs!r}.items()}}\n"
        "print(json.dumps(losses))"
    )
    folder = tmp_path_factory.mktemp("clients")
    losses = json.loads(processes.output(["-c", program], folder).splitlines()[-1])
    return {Path(path).stem: values for path, values in losses.items()} | {
        "files": [*map(str, folder.iterdir())]
    }


@pytest.mark.clients
@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.sampled(2)
def test_model_of_a_client_learns(name: str, request: pytest.FixtureRequest):
    missing = [library for library in CLIENTS[name][0] if not optional.installed(library)]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; `make test-clients` installs it")
    losses = request.getfixturevalue("losses_of_clients")[name]
    assert losses[-1] < 0.97 * losses[0]


def test_every_example_has_a_test_and_states_its_command():
    text = Path(__file__).read_text()
    for path in EXAMPLES:
        assert f'"{path.stem}"' in text or f"{path.stem}.py" in text, path.stem
        assert f"examples/{path.name}" in path.read_text().split('"""')[1], path.name
