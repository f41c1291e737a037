"""A model whose parameters, sequences and batches several ranks share, as a trainer run.

The ranks form a mesh (data, fsdp, cp, tp). Each rank computes its sequences in the batch (data, fsdp), its tokens in a
sequence (cp) and its weight columns (tp). Parameters and optimizer states are sharded over fsdp x cp. All rank counts
start from the single-device weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from transformer_engine import pytorch as te
from transformer_engine.pytorch.inspect.verified_parameters import model_parameters
from transformer_engine.pytorch.inspect.verified_shards import RankPlace, shard_parts, sharded_dim
from transformer_engine.pytorch.optimizers import FusedAdam
from transformer_engine.pytorch.quantization import check_recipe_support

from . import checkpoint, sharded_checkpoint
from .config import BETAS, CLIP, DECAY, Execution, RunConfig, make_recipe
from .data import Batch
from .model import ByteGPT


@dataclass(frozen=True)
class Parallelism:
    """Rank counts: total, and sharing weights (tp), sequences (cp) and parameters (fsdp).

    Attributes:
        devices: Total number of ranks.
        tp: Ranks that share each layer's weights.
        cp: Ranks that share each sequence.
        fsdp: Ranks that share the parameters.
    """

    devices: int
    tp: int = 1
    cp: int = 1
    fsdp: int = 1

    @property
    def batches(self) -> int:
        """Number of rank groups with their own sequences in a batch."""
        return self.devices // (self.tp * self.cp)

    def check(self, config: RunConfig, execution: Execution) -> None:
        """Raise ValueError if the ranks cannot share the model or its batches."""
        for name in ("devices", "tp", "cp", "fsdp"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name} {getattr(self, name)} is below 1; give a positive number"
                )
        if self.devices % (self.tp * self.cp * self.fsdp):
            raise ValueError(
                f"--tp {self.tp} x --cp {self.cp} x --fsdp {self.fsdp} does not divide {self.devices} devices; "
                "change one of them"
            )
        divided = (
            ("--batch", config.batch, self.batches, "groups of ranks with their own sequences"),
            ("--heads", config.heads, self.tp, "tensor-parallel ranks"),
            ("--seq", config.sequence, 2 * self.cp, "chunks of the context-parallel ranks"),
            (
                "the width of the MLP",
                config.feed_forward,
                16 * self.tp,
                "(16 per tensor-parallel rank)",
            ),
        )
        for name, size, parts, subject in divided:
            if size % parts:
                raise ValueError(
                    f"{name} {size} is not divisible by {parts} {subject}; change one of them"
                )
        if config.framework != "torch" or config.experts or execution.differs:
            raise ValueError(
                "several devices train dense models in torch; leave out --framework jax, --experts, --graphs, "
                "--offload-layers and --observe"
            )


class Ranks:
    """This rank's groups, made once per process, and the storage for the runs' checkpoints."""

    def __init__(self, parallelism: Parallelism, device: torch.device) -> None:
        p = self.parallelism = parallelism
        self.leads = dist.get_rank() == 0
        replicas = p.batches // p.fsdp
        # Both meshes have the ranks in the order (data, fsdp, cp, tp).
        kind = device.type
        shards = init_device_mesh(
            kind, (replicas, p.fsdp * p.cp, p.tp), mesh_dim_names=("data", "shard", "tp")
        )
        inputs = init_device_mesh(
            kind, (p.batches, p.cp, p.tp), mesh_dim_names=("batch", "cp", "tensor")
        )
        self.mesh = shards["data", "shard"] if replicas > 1 else shards["shard"]
        self.shard_group, self.tensor_group = shards.get_group("shard"), shards.get_group("tp")
        self.context_group = inputs.get_group("cp")
        self.place = RankPlace(
            data=(inputs.get_local_rank("batch"), p.batches),
            context=(inputs.get_local_rank("cp"), p.cp),
            tensor=(inputs.get_local_rank("tensor"), p.tp),
            sequence_dim=1,
            batch_dim=0,
        )

    def Run(self, name: str, config: RunConfig, execution: Execution) -> ParallelRun:
        """Build a run on these ranks."""
        self.parallelism.check(config, execution)
        return ParallelRun(name, config, self)

    def save(self, path: Path, state: dict[str, Any]) -> None:
        """Write the runs' state below `path`'s folder; every rank calls this."""
        tensors = {
            key: value for run in state["runs"].values() for key, value in run["tensors"].items()
        }
        local_state = {
            "runs": {name: run["own"] for name, run in state["runs"].items()},
            "random": checkpoint.random_state(),
        }
        shared = {name: state[name] for name in ("config", "fingerprint", "step")}
        shared["parallelism"] = dataclasses.asdict(self.parallelism)
        sharded_checkpoint.save(path.parent, state["step"], tensors, local_state, shared)

    def load(self, path: Path) -> dict[str, Any]:
        """Read the state in a checkpoint's directory; `ParallelRun.load_state_dict` reads the tensors.

        Raises:
            ValueError: Another rank layout wrote the checkpoint.
        """
        state = sharded_checkpoint.read_run(path)
        present = dataclasses.asdict(self.parallelism)
        if state["parallelism"] != present:
            raise ValueError(
                f"{path} was written by {_layout(state['parallelism'])}, and this run has {_layout(present)}; use the "
                "same numbers, or start another run with --name"
            )
        local_state = sharded_checkpoint.read_own(path)
        runs = {
            name: {"directory": path, "own": part} for name, part in local_state["runs"].items()
        }
        return {**state, "runs": runs, "random": local_state["random"]}

    def continue_from(self, state: dict[str, Any]) -> None:
        """Restore the random generators of this rank."""
        checkpoint.set_random_state(state["random"])


def _layout(parallelism: dict[str, int]) -> str:
    return " ".join(f"--{name} {size}" for name, size in parallelism.items())


class ParallelRun:
    """One model on several ranks with its optimizer and computation recipe."""

    observation = None

    def __init__(self, name: str, config: RunConfig, ranks: Ranks) -> None:
        self.name, self.ranks, self.recipe = name, ranks, make_recipe(name)
        supported, reason = (True, "") if self.recipe is None else check_recipe_support(self.recipe)
        if not supported:
            raise ValueError(f"the recipe {name} does not run here: {reason}")
        self.device = torch.device(config.device)
        torch.manual_seed(config.seed)
        self.model = ByteGPT(config)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.sharded: frozenset[str] = frozenset()
        if ranks.parallelism.tp > 1:
            self._share_weights(config)
        if ranks.parallelism.cp > 1:
            self._share_sequences()
        for layer in (*self.model.layers, self.model):
            fully_shard(layer, mesh=ranks.mesh)
        weights = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": DECAY},
            {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
        ]
        self.masters = weights[0].dtype != torch.float32
        self.adam = FusedAdam(groups, betas=BETAS, master_weights=self.masters)

    def _share_weights(self, config: RunConfig) -> None:
        """Replace the model by this rank's columns and rows of its weights."""
        coordinates, group = self.ranks.place.tensor, self.ranks.tensor_group
        full_parameters = model_parameters(self.model)
        self.model = ByteGPT(config, set_parallel_mode=True, tp_group=group, tp_size=coordinates[1])
        sharded = []
        with torch.no_grad():
            for name, local in model_parameters(self.model).items():
                source = full_parameters[name]
                value: Tensor = source.value
                dim = sharded_dim(value.shape, local.value.shape, coordinates[1])
                if dim is not None:
                    sharded.append(name)
                    value = shard_parts(
                        value, dim, coordinates, source.parts if dim == 0 else (value.shape[dim],)
                    )
                local.value.copy_(value)
        self.sharded = frozenset(sharded)

    def _share_sequences(self) -> None:
        """Share each sequence among the context-parallel ranks."""
        group = self.ranks.context_group
        stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.model.context_ranks = dist.get_world_size(group)
        for layer in self.model.layers:
            assert isinstance(layer, te.TransformerLayer)
            layer.set_context_parallel_group(
                group, dist.get_process_group_ranks(group), stream, "p2p"
            )

    def precision(self) -> te.autocast:
        world = dist.group.WORLD
        return te.autocast(
            enabled=self.recipe is not None, recipe=self.recipe, amax_reduction_group=world
        )

    def train(self, batches: Sequence[Batch], rates: Sequence[float], first: int) -> list[float]:
        """Train from step `first` on, one batch per step; return each full-batch loss."""
        with te.distributed.named_failures():
            losses = [self._step(batch, rate) for batch, rate in zip(batches, rates, strict=True)]
            return self._averaged(torch.stack(losses)).tolist()

    def _step(self, batch: Batch, rate: float) -> Tensor:
        with self.precision():
            loss = self.model.loss(*self._placed(batch))
        loss.backward()  # fully_shard averages the gradients over all ranks with different tokens
        for group in self.adam.param_groups:
            group["lr"] = rate
        self._clip()
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def _clip(self) -> None:
        """Scale the gradients so that the norm over all parameters is at most CLIP."""
        # over tensor-parallel shards, and over other parameters
        squares = torch.zeros(2, device=self.device)
        gradients = []
        for name, parameter in self.model.named_parameters():
            gradient: Any = parameter.grad
            local = gradient.to_local()
            gradients.append(local)
            squares[0 if name in self.sharded else 1] += local.float().square().sum()
        dist.all_reduce(squares, group=self.ranks.shard_group)
        of_shards = squares[:1].clone()
        if self.ranks.parallelism.tp > 1:
            dist.all_reduce(of_shards, group=self.ranks.tensor_group)
        norm = (of_shards[0] + squares[1]).sqrt()
        scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Compute the mean loss over batches."""
        self.model.eval()
        with self.precision():
            losses = [self.model.loss(*self._placed(batch)) for batch in batches]
        self.model.train()
        return self._averaged(torch.stack(losses).mean()).item()

    def _averaged(self, values: Tensor) -> Tensor:
        """Average over all ranks; each has the same number of tokens."""
        dist.all_reduce(values)
        return values / dist.get_world_size()

    def _placed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Select this rank's sequences and tokens from a batch [sequences, tokens]."""
        inputs, targets = (
            self.ranks.place.shard_batch(torch.as_tensor(part, device="cpu"))
            .contiguous()
            .to(self.device)
            for part in batch
        )
        return inputs, targets

    def sample(self, prompt: bytes, count: int) -> bytes:
        """Raise NotImplementedError: the parameters of a rank do not suffice."""
        raise NotImplementedError(
            "text generation needs a model on one device; a rank has only a part of it"
        )

    def observe(self, log: Path) -> None:
        """Raise NotImplementedError: `Parallelism.check` rejects --observe."""
        raise NotImplementedError(
            "--observe needs a model on one device; remove it, or --devices and --distributed"
        )

    def _tensors(self) -> dict[str, Tensor]:
        """Collect the parameter and moment shards by names that are unique per tensor-parallel rank."""
        prefix = f"tp{self.ranks.place.tensor[0]}/{self.name}"
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if parameter not in self.adam.state:
                self.adam.initialize_state(parameter)
            tensors[f"{prefix}/{name}"] = parameter.detach()
            for kind in ("exp_avg", "exp_avg_sq", *(("master_param",) if self.masters else ())):
                tensors[f"{prefix}/{name}/{kind}"] = self.adam.state[parameter][kind]
        return tensors

    def state_dict(self) -> dict[str, Any]:
        parameters = dict(self.model.named_parameters())
        rest = {
            name: value for name, value in self.model.state_dict().items() if name not in parameters
        }
        steps = [group.get("step") for group in self.adam.param_groups]
        return {"tensors": self._tensors(), "own": {"others": rest, "steps": steps}}

    def mismatch(self, state: dict[str, Any] | None) -> str | None:
        """Reason why a state does not belong to this model, or None."""
        return "it has no such run" if state is None else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sharded_checkpoint.read_tensors(state["directory"], self._tensors())
        self.model.load_state_dict(state["own"]["others"], strict=False)
        for group, step in zip(self.adam.param_groups, state["own"]["steps"], strict=True):
            if step is not None:
                group["step"] = step
