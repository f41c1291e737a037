"""Training-step time and memory on one rank: pipeline, sharded parameters, gradients, optimizer, loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from .hardware import DEFAULT_LINKS, GB_PER_S, GIB, host_links
from .layer import LOSS, Both, MicroBatch, layer, no_costs
from .models import ModelShape
from .report import DOES_NOT_FIT, Mesh, StepMemory, TrainingPlan
from .simulate import VALUE, Cost, RankMachine

Recompute = Literal["none", "full"]
STATE = 12.0  # FusedAdam bytes per parameter: master weight and two moments in float32
LIBRARIES = 1.5 * GIB  # CUDA context, product workspaces, NCCL buffers
USABLE = 0.95  # part of the memory that the allocator fills before it fragments


@dataclass
class TrainingStep:
    """Simulates a training step.

    Attributes:
        shape: Model shape.
        machine: GPU, format, links and tensor parallelism.
        mesh: Rank counts.
        work: Tokens in a micro-batch.
        micro_batches: Micro-batches per step.
        recompute: The forward pass of each layer is repeated in the backward pass.
        graphs: The host does not delay the GPU.
        layers: Layers in a pipeline stage.
        costs: Costs for one layer and one micro-batch.
        outside: Costs outside the layers for one micro-batch.
    """

    shape: ModelShape
    machine: RankMachine
    mesh: Mesh
    work: MicroBatch
    micro_batches: int
    recompute: bool
    graphs: bool
    layers: int = field(init=False)
    costs: Both = field(init=False)
    outside: Both = field(init=False)

    def __post_init__(self) -> None:
        self.layers = self.shape.layers // self.mesh.pp
        self.costs = layer(self.machine, self.shape, self.work)
        self.outside = self._outside()

    def planned(self) -> TrainingPlan:
        """Compute the prediction."""
        gpu, mesh, shape = self.machine.gpu, self.mesh, self.shape
        cost, stage = Cost(), self._stage()
        cost.add(stage, self.micro_batches)
        self._synchronize(cost)
        moved_bytes = self._local_parameters()[0] * (self._gradient_bytes + 2 * STATE + VALUE)
        cost.spend("optimizer", gpu.copy_ms(moved_bytes, 0.97))
        # The other stages, which have no loss, run one micro-batch before and after all stages are busy.
        other = stage.total - self.outside.forward.total - self.outside.backward.total
        cost.spend("pipeline idle", (mesh.pp - 1) * other, 0)
        memory = self._memory()
        tokens = self.work.sequence * self.work.batch * self.micro_batches * mesh.dp * mesh.fsdp
        flops = tokens * shape.flops_per_token(self.work.sequence)
        limit = USABLE * gpu.memory
        return TrainingPlan(
            model=shape,
            parts=dict(cost.kernels),
            gpu=gpu.name,
            recipe=self.machine.format.name,
            communication=dict(cost.communication),
            mesh=mesh,
            sequence=self.work.sequence,
            exposed={axis: took for axis, took in cost.exposed.items() if took},
            micro_batch=self.work.batch,
            micro_batches=self.micro_batches,
            recompute="full" if self.recompute else "none",
            memory=memory,
            memory_limit=limit,
            step_ms=cost.total,
            tokens_per_s=1e3 * tokens / cost.total,
            utilization=flops / (cost.total * gpu.peak * mesh.devices),
            peak=gpu.peak,
            calibrated=gpu.calibrated,
            rates=self._rates(),
            warnings=self._warnings(cost, memory.peak, limit),
        )

    @property
    def _gradient_bytes(self) -> float:
        return 4.0 if self.micro_batches > 1 else VALUE

    def _expert_groups(self) -> tuple[int, int]:
        """Count the ranks that share an expert's parameters by sharding, and the ranks that replicate them."""
        ranks = self.mesh.data // self.mesh.ep
        shards = (
            math.gcd(ranks, max(1, self.mesh.shards // self.mesh.ep)) if self.mesh.shards > 1 else 1
        )
        return shards, ranks // shards

    def _layer_parameters(self) -> tuple[float, float]:
        """Count a layer's gathered parameters on a rank: outside experts, and in the rank's experts."""
        shape, mesh = self.shape, self.mesh
        matrices = shape.attention_parameters() / mesh.tp
        if not shape.experts:
            return matrices + shape.expert_parameters() / mesh.tp, 0.0
        count = shape.experts / mesh.ep
        return matrices + shape.experts * shape.hidden, count * shape.expert_parameters() / mesh.tp

    def _local_parameters(self, last: bool = True) -> tuple[float, float]:
        """Count a rank's parameters in the first or the last stage after sharding, and its experts' parameters."""
        dense, routed = self._layer_parameters()
        embeddings = self._embeddings(last) / self.mesh.shards
        routed = self.layers * routed / self._expert_groups()[0]
        return self.layers * dense / self.mesh.shards + embeddings + routed, routed

    def _embeddings(self, last: bool) -> float:
        """Count the embedding and output-projection parameters on a stage, before sharding."""
        elements = self.shape.vocabulary * self.shape.hidden / self.mesh.tp
        return elements * (2 if self.mesh.pp == 1 and not self.shape.tied else 1)

    def _outside(self) -> Both:
        """Compute the costs outside the layers, for one micro-batch: embedding, last norm, projection and loss."""
        costs, machine, shape = no_costs(), self.machine, self.shape
        gpu, tokens = machine.gpu, self.work.tokens
        columns = shape.vocabulary / machine.tp
        values, logits = tokens * shape.hidden * VALUE, tokens * columns * VALUE
        table = columns * shape.hidden * VALUE
        costs.stream(
            machine, "embedding", 2 * values / machine.tp, 2 * values / machine.tp + 2 * table
        )
        costs.stream(machine, "norms", 2 * values / machine.tp, 3 * values / machine.tp)
        product = machine.matrix_time * gpu.product_ms(
            "bf16", 2.0 * tokens * shape.hidden * columns, values + logits + table
        )
        costs.forward.spend("output projection", product)
        costs.backward.spend("output projection", 2 * product, 2)
        costs.stream(machine, "loss", logits / LOSS, 2 * logits / LOSS, 2)
        for cost in costs:
            for kind in (
                "all_gather",
                "reduce_scatter",
            ):  # hidden states, over the vocabulary shards
                cost.communicate("tp", machine.links.collective_ms(kind, values, machine.tp, 1))
        return costs

    def _stage(self) -> Cost:
        """Compute a micro-batch's cost on the slowest stage, the last, with its parameter gathers."""
        mesh, links = self.mesh, self.machine.links
        forward, backward = self.costs
        cost = Cost()
        cost.add(forward, self.layers * (2 if self.recompute else 1))
        cost.add(backward, self.layers)
        cost.add(self.outside.forward)
        cost.add(self.outside.backward)
        if mesh.shards > 1:
            self._shard_communication(cost)
        groups = {"tp": (mesh.tp, 1), "cp": (mesh.cp, mesh.tp), "fsdp": (mesh.shards, mesh.tp)}
        for axis, (size, stride) in groups.items():
            hidden = max(0.0, cost.communication[axis] - cost.exposed[axis])
            cost.spend("slowed by communication", links.contention_ms(hidden, size, stride), 0)
        if mesh.pp > 1:
            sent = self.work.tokens * self.shape.hidden * VALUE / mesh.tp
            stride = mesh.devices // mesh.pp
            for _ in range(2):
                cost.communicate("pp", links.collective_ms("send_receive", sent, 2, stride))
        if not self.graphs:
            waiting = cost.launches * self.machine.gpu.host - cost.total
            cost.spend("waiting for the host", max(0.0, waiting), 0)
        return cost

    def _shard_communication(self, cost: Cost) -> None:
        """Add the gathers and reductions for sharded parameters to a micro-batch's cost.

        The parameters of a layer are gathered while the layer before computes; the first gather and the last reduction
        are exposed.
        """
        mesh, links, layers = self.mesh, self.machine.links, self.layers
        (dense, routed), (shards, _) = self._layer_parameters(), self._expert_groups()
        gather, scatter = (
            links.collective_ms(kind, dense * VALUE, mesh.shards, mesh.tp)
            + (
                links.collective_ms(kind, routed * VALUE, shards, mesh.tp * mesh.ep)
                if routed
                else 0.0
            )
            for kind in ("all_gather", "reduce_scatter")
        )
        forward = self.costs.forward.total
        backward = self.costs.backward.total + (forward if self.recompute else 0.0)
        exposed = gather + scatter
        exposed += (layers - 1) * (
            max(0.0, gather - forward) + max(0.0, gather + scatter - backward)
        )
        table = self.shape.vocabulary * self.shape.hidden / mesh.tp * VALUE
        unsharded = [
            links.collective_ms(kind, table, mesh.shards, mesh.tp)
            for kind in ("all_gather", "reduce_scatter")
        ]
        total = layers * (2 * gather + scatter) + sum(unsharded)
        exposed += sum(unsharded) if mesh.pp == 1 else unsharded[1]
        cost.communicate("fsdp", total, min(total, exposed))

    def _synchronize(self, cost: Cost) -> None:
        """Add the gradient all-reduces over replicas, which overlap the last micro-batch's backward pass."""
        mesh, links = self.mesh, self.machine.links
        local, routed = self._local_parameters()
        replicas = mesh.data // mesh.shards
        shards, expert_replicas = self._expert_groups()
        stride = mesh.tp * mesh.shards
        took = links.collective_ms(
            "all_reduce", (local - routed) * self._gradient_bytes, replicas, stride
        )
        if routed:
            took += links.collective_ms(
                "all_reduce",
                routed * self._gradient_bytes,
                expert_replicas,
                mesh.tp * mesh.ep * shards,
            )
        overlap = (self.layers - 1) * self.costs.backward.total
        exposed = max(took - overlap, took / self.layers)
        cost.communicate("dp", took, exposed)
        cost.spend(
            "slowed by communication", links.contention_ms(took - exposed, replicas, stride), 0
        )

    def _memory(self) -> StepMemory:
        """Compute the memory on the stage that needs the most: the first has most activations, the last the logits."""
        mesh, work, shape = self.mesh, self.work, self.shape
        forward, backward = self.costs
        working = max(forward.peak - forward.saved, backward.peak, 0.0)
        residual = work.tokens * shape.hidden * VALUE / mesh.tp
        if self.recompute:
            saved, working = residual, working + forward.saved
        else:
            saved = forward.saved
        dense, routed = self._layer_parameters()
        gathered = LIBRARIES + working
        # two layers' parameters, one layer's gradients, and the embedding or the projection
        if mesh.shards > 1:
            gathered += (
                3 * (dense + routed) + 2 * shape.vocabulary * shape.hidden / mesh.tp
            ) * VALUE
        elif self.micro_batches > 1:
            gathered += (dense + routed) * VALUE
        memory_items = []
        for last in (False, True):
            local, _ = self._local_parameters(last)
            flying = 1 if last else min(mesh.pp, self.micro_batches)
            logits = (
                work.tokens * shape.vocabulary / mesh.tp * VALUE if last or mesh.pp == 1 else 0.0
            )
            memory_items.append(
                StepMemory(
                    local * VALUE,
                    local * self._gradient_bytes,
                    local * STATE,
                    self.layers * saved * flying + 2 * residual,
                    gathered + logits,
                )
            )
        return max(memory_items, key=lambda memory: memory.peak)

    def _rates(self) -> dict[str, str]:
        """Rates behind the plan as text, with their sources."""
        gpu, machine, source = self.machine.gpu, self.machine, self.machine.gpu.source
        kinds = dict.fromkeys(("bf16", *machine.format.products))
        rate_texts = {
            f"{kind} products": f"{gpu.rates[kind] / 1e9:.0f} TFLOP/s ({source})" for kind in kinds
        }
        heads = gpu.attention[machine.attention]
        forward, _ = heads[min(heads, key=lambda size: abs(size - self.shape.head_dim))]
        rate_texts[f"{machine.attention} attention"] = f"{forward / 1e9:.0f} TFLOP/s ({source})"
        rate_texts["copies"] = f"{gpu.bandwidth / 1e9:.1f} TB/s ({source})"
        links = machine.links
        of_ring = source if links.ring == host_links(gpu).ring else "given"
        of_network = "assumed" if links.network == DEFAULT_LINKS.network else "given"
        rate_texts["links within a host"] = f"{links.ring / GB_PER_S:.0f} GB/s ({of_ring})"
        rate_texts["network"] = f"{links.network / GB_PER_S:.0f} GB/s ({of_network})"
        return rate_texts

    def _warnings(self, cost: Cost, peak: float, limit: float) -> tuple[str, ...]:
        gpu, mesh = self.machine.gpu, self.mesh
        warnings = []
        if peak > limit:
            warnings.append(
                f"{DOES_NOT_FIT}: needs {peak / GIB:.1f} GiB, and {limit / GIB:.1f} GiB of each {gpu.name} can be "
                "filled; raise fsdp, tp or pp"
                + ("" if self.recompute else ", or use recompute='full'")
            )
        if not gpu.calibrated:
            warnings.append(
                f"the rates of {gpu.name} follow from its data sheet and are not measured"
            )
        if mesh.tp > self.machine.links.devices_per_host:
            warnings.append(
                f"tp={mesh.tp} spans hosts, whose network is slow; use at most "
                f"{self.machine.links.devices_per_host}"
            )
        if cost.kernels["waiting for the host"] > 0.05 * cost.total:
            warnings.append(
                "the host launches kernels more slowly than the GPU runs them; use graphs=True, or more tokens"
            )
        return tuple(warnings)
