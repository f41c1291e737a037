"""LlamaFactory fine-tunes a tiny Llama in FP8; see test_llamafactory.py.

python llamafactory_cases.py FOLDER: prints the losses and the linear layer classes' modules as JSON.
LlamaFactory imports torchaudio, which only reads audio, so an empty module takes its place.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

from tests.clients.installed import tiny_llama

VOCABULARY = 288
STEPS = 10


def write_model(folder: Path) -> None:
    """A two-layer Llama and a byte tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<s>", "</s>", "<unk>")
    vocabulary = {
        token: i for i, token in enumerate((*special, *(f"<0x{i:02X}>" for i in range(256))))
    }
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    tiny_llama(vocab_size=VOCABULARY).save_pretrained(folder)


def write_data(folder: Path) -> None:
    """64 equal conversations."""
    folder.mkdir()
    row = {"instruction": "count", "input": "", "output": "one two three four five"}
    (folder / "tiny.json").write_text(json.dumps([row] * 64), encoding="utf-8")
    (folder / "dataset_info.json").write_text(
        json.dumps({"tiny": {"file_name": "tiny.json"}}), encoding="utf-8"
    )


def settings(folder: Path) -> dict[str, Any]:
    return {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(folder / "model"),
        "dataset": "tiny",
        "dataset_dir": str(folder / "data"),
        "template": "empty",
        "finetuning_type": "full",
        "cutoff_len": 64,
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "preprocessing_num_workers": 1,
        "fp8": True,
        "fp8_backend": "te",
    }


def main(folder: Path) -> None:
    write_model(folder / "model")
    write_data(folder / "data")
    torchaudio = types.ModuleType("torchaudio")
    torchaudio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    sys.modules["torchaudio"] = torchaudio
    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    losses: list[float] = []
    classes: set[str] = set()

    class Record(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            classes.update(
                type(module).__module__
                for module in model.modules()
                if hasattr(module, "out_features")
            )

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    run_exp(settings(folder), callbacks=[Record()])
    print(json.dumps({"losses": losses, "classes": sorted(classes)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
