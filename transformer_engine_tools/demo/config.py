"""Configuration for a demonstration run: framework, recipe, sizes and schedule, checked before the run is built.

A command with one framework works without the other, so neither is imported at module level.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from typing import Any

from transformer_engine.common import optional
from transformer_engine.common import recipe as recipes
from transformer_engine.common.numbers import with_article
from transformer_engine.common.planning import FORMATS

from ..options import DEVICES

# Libraries that a run in each framework needs, and the extra that installs them.
NEEDED = {
    "torch": (("torch", "matplotlib"), "cli"),
    "jax": (("jax", "flax", "optax", "orbax", "matplotlib"), "cli-jax"),
}
FRAMEWORKS = tuple(NEEDED)
CLIP = 1.0  # maximum gradient norm
BETAS = (0.9, 0.95)
DECAY = 0.1  # weight decay for matrices; vectors have none


def default_framework() -> str:
    """Choose jax if it is installed and torch is not, else torch."""
    return "jax" if optional.installed("jax") and not optional.installed("torch") else "torch"


def missing_libraries(framework: str) -> str | None:
    """Libraries that a run lacks and the command that installs them, or None."""
    names, extra = NEEDED[framework]
    missing = [name for name in names if not optional.installed(name)]
    if not missing:
        return None
    return f"--framework {framework} needs {', '.join(missing)}; install with {optional.install_command(extra)}"


def has_gpu(framework: str) -> bool:
    """Whether the framework finds a GPU."""
    if framework == "torch":
        return import_module("torch").cuda.is_available()
    return import_module("transformer_engine.jax.runtime.platform").has_gpu()


def list_recipes() -> dict[str, type[recipes.Recipe]]:
    """Map {name on the command line: recipe} for the installed framework, for torch if both are installed."""
    if optional.installed("torch"):
        families: Any = import_module("transformer_engine.pytorch.quantization").all_families()
        return {family.name: family.recipe for family in families if family.samples}
    rows: Any = import_module("transformer_engine.jax.quantize.recipes").FAMILIES
    return {family.name: family.recipe for family in rows.values()}


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Compute the rate: a linear warm-up (a tenth of the steps, at most 100), then a cosine to a tenth of the peak."""
    warmup = max(1, min(100, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


HIGH_PRECISION = "high_precision"
RECIPES = (*(name for name in FORMATS if name != "none"), "none")
OPTIMIZERS = ("adamw", "fused_adam")
# RunConfig field types, by annotation.
KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "str | None": (str, type(None)),
}
SEEDS = 2**40  # limit for seeds, because batches use a multiple of theirs
VOCABULARY = 256  # the tokens are bytes

# Two cores train the CPU size, with both runs, in about two minutes.
CPU_SIZES: dict[str, Any] = {
    "steps": 800,
    "batch": 8,
    "sequence": 128,
    "layers": 3,
    "hidden": 128,
    "heads": 4,
    "learning_rate": 3e-3,
}
CUDA_SIZES: dict[str, Any] = {
    "steps": 1000,
    "batch": 32,
    "sequence": 512,
    "layers": 8,
    "hidden": 768,
    "heads": 12,
    "learning_rate": 1e-3,
}


def option_name(field: str) -> str:
    """The `te train` option that sets a RunConfig field."""
    return {"sequence": "--seq", "learning_rate": "--lr"}.get(field, f"--{field}")


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed whose batches would overlap another seed's."""
    if not -SEEDS < seed < SEEDS:
        raise ValueError(f"--seed {seed} is too large; give a number between -{SEEDS} and {SEEDS}")


@dataclass(frozen=True)
class RunConfig:
    """All settings that determine the losses of a run; checkpoints store it."""

    recipe: str
    device: str
    steps: int
    batch: int
    sequence: int
    layers: int
    hidden: int
    heads: int
    learning_rate: float
    seed: int = 0
    data: str | None = None
    experts: int = 0
    optimizer: str = "adamw"
    framework: str = "torch"

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(
                f"--recipe {self.recipe!r} does not exist; choose one of {', '.join(RECIPES)}"
            )
        for field in fields(self):
            value, kind = getattr(self, field.name), KINDS[str(field.type)]
            # for example from a checkpoint
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(
                    f"{field.name}={value!r} is {with_article(type(value))}; it must be {field.type}"
                )
        for name, choices in (("optimizer", OPTIMIZERS), ("framework", FRAMEWORKS)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"--{name} {value!r} does not exist; choose one of {', '.join(choices)}"
                )
        for name in ("steps", "batch", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name} {getattr(self, name)} is below 1; give a positive number"
                )
        check_seed(self.seed)
        for name in ("hidden", "sequence"):
            size = getattr(self, name)
            if size < 32 or size % 32:
                raise ValueError(
                    f"{option_name(name)} {size} is not a positive multiple of 32; try {max(32, round(size / 32) * 32)}"
                )
        if self.hidden % self.heads or (self.hidden // self.heads) % 16:
            raise ValueError(
                f"--hidden {self.hidden} and --heads {self.heads} give a head width of "
                f"{self.hidden / self.heads:g}, not a multiple of 16; try --heads {max(1, self.hidden // 32)}"
            )
        if self.experts < 0 or self.experts == 1:
            raise ValueError(
                f"--experts {self.experts} must be 2 or more, two compute each byte; or 0 for none"
            )
        if not 0 < self.learning_rate < 1:
            raise ValueError(
                f"--lr {self.learning_rate} is not between 0 and 1; 0.001 is a usual value"
            )
        only_torch = {
            "--experts": self.experts,
            "--optimizer fused_adam": self.optimizer == "fused_adam",
        }
        for option, is_set in only_torch.items():
            if self.framework == "jax" and is_set:
                raise ValueError(
                    f"{option} needs the PyTorch model; remove it, or use --framework torch"
                )
        if self.device == "cuda" and not has_gpu(self.framework):
            raise ValueError(
                f"--device cuda: {self.framework} finds no CUDA device; use --device cpu"
            )

    @property
    def feed_forward(self) -> int:
        """Width of the gated feed-forward layer: 8/3 of hidden, rounded up to block scaling's 128."""
        return -(-self.hidden * 8 // (3 * 128)) * 128

    @property
    def precision(self) -> str:
        """float32 on a CPU, bfloat16 on CUDA."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the models trained side by side; high precision comes last."""
        return (HIGH_PRECISION,) if self.recipe == "none" else (self.recipe, HIGH_PRECISION)

    def label(self, run: str) -> str:
        """Displayed name for a run: the recipe's name, or the parameters' dtype for high precision."""
        return self.precision if run == HIGH_PRECISION else run

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Execution:
    """Execution options, which do not change the losses; a continued run may use others.

    Attributes:
        graphs: Capture the training steps in CUDA graphs; None: on CUDA, where no other option prevents it.
        offload_layers: Number of layers whose activations are offloaded to host memory.
        observe: Observe the tensors in every tenth step.
    """

    graphs: bool | None = None
    offload_layers: int = 0
    observe: bool = False

    @property
    def differs(self) -> bool:
        """Whether an option is set that only the single-device PyTorch model supports."""
        return bool(self.graphs or self.offload_layers or self.observe)

    def captures(self, config: RunConfig) -> bool:
        """Whether training steps are captured in CUDA graphs."""
        if self.graphs is not None:
            return self.graphs
        # The expert router reads its counts on the host.
        return config.device == "cuda" and not (
            config.experts or self.offload_layers or self.observe
        )

    def check(self, config: RunConfig) -> None:
        """Raise ValueError for options that exclude each other, or that this model or framework does not support."""
        if config.framework == "jax" and self.differs:
            raise ValueError(
                "--graphs, --offload-layers and --observe need the PyTorch model; remove them, or use "
                "--framework torch"
            )
        if not 0 <= self.offload_layers < config.layers:
            raise ValueError(
                f"--offload-layers {self.offload_layers} is outside 0 to {config.layers - 1}: the last of "
                f"{config.layers} layers stays on the GPU; offload fewer, or train more with --layers"
            )
        if self.graphs and (self.observe or self.offload_layers):
            option = "--observe" if self.observe else "--offload-layers"
            raise ValueError(
                f"--graphs and {option} exclude each other: {option} reads tensors that a CUDA graph does not expose; "
                "remove one of them"
            )


def resolve(device: str, options: dict[str, Any]) -> RunConfig:
    """Build a RunConfig for "auto", "cpu" or "cuda": given values that are not None, otherwise the device's sizes."""
    if device not in DEVICES:
        raise ValueError(f"--device {device!r} does not exist; choose one of {', '.join(DEVICES)}")
    given_options = {name: value for name, value in options.items() if value is not None}
    framework = given_options.setdefault("framework", default_framework())
    if device == "auto":
        device = "cuda" if has_gpu(framework) else "cpu"
    sizes = CUDA_SIZES if device == "cuda" else CPU_SIZES
    return RunConfig(**{"recipe": "delayed", "device": device, **sizes, **given_options})


def restore(
    saved: dict[str, Any],
    device: str,
    options: dict[str, Any],
    source: str = "the checkpoint",
    step: int = 0,
) -> RunConfig:
    """Restore the RunConfig from a checkpoint that was saved after `step` steps.

    A larger number of steps extends a run that has finished: from then on it has the larger number's schedule.

    Raises:
        ValueError: Another option contradicts the checkpoint, so the continuation would not be exact.
    """
    config = read_saved_config(saved, source)
    requested = {**options, "device": None if device == "auto" else device}
    steps = requested.get("steps")
    if steps is not None and step >= config.steps and steps > config.steps:
        config = replace(config, steps=steps)
    for name, value in requested.items():
        if value is not None and value != getattr(config, name):
            extended = (
                "; a larger number extends a run that has finished" if name == "steps" else ""
            )
            raise ValueError(
                f"{option_name(name)} {value} contradicts the checkpoint, which has {getattr(config, name)}; leave "
                f"the option out to continue, or start another run with --name{extended}"
            )
    return config


def read_saved_config(saved: dict[str, Any], source: str) -> RunConfig:
    """Read the RunConfig in source without fields of other versions; the ValueError for others names the source."""
    names = {field.name for field in fields(RunConfig)}
    missing = sorted(names - set(saved) - {"seed", "data", "experts", "optimizer", "framework"})
    if missing:
        raise ValueError(
            f"the config in {source} has no {missing[0]!r}; train again without --resume"
        )
    try:
        return RunConfig(**{name: value for name, value in saved.items() if name in names})
    except ValueError as error:
        raise ValueError(f"the config in {source} does not work: {error}") from None


def make_recipe(name: str) -> recipes.Recipe | None:
    """Build the recipe for a run name, or None for high precision."""
    if name in ("none", HIGH_PRECISION):
        return None
    # A short window: the activations of a new model grow quickly in its first steps.
    options = {"amax_history_len": 16} if name == "delayed" else {}
    return list_recipes()[name](**options)
