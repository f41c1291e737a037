"""te.verify finds planted errors of a parallel model, names module, tensor and rank, and reports none without them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from tests.distributed.threaded_ranks import run_on_threads
from transformer_engine.common import recipe
from transformer_engine.pytorch.inspect.verification import difference
from transformer_engine.pytorch.inspect.verified_shards import RankPlace, gather_parts, shard_parts
from transformer_engine.pytorch.quantization import delayed_scaling

HIDDEN, INNER, TOKENS, BATCH = 32, 64, 32, 2


@dataclass(frozen=True)
class Plan:
    """A mesh and the model's settings on it."""

    names: tuple[str, ...] = ("tp",)
    sequence: bool = False
    error: str = ""
    weights: str = "gathered"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def mesh(self) -> Any:
        return init_device_mesh(
            torch.device(self.device).type, (2,) * len(self.names), mesh_dim_names=self.names
        )


def create_model(plan: Plan, mesh: Any) -> nn.Sequential:
    """A column-parallel layer with a norm, a row-parallel one, and a block with attention."""
    tp = mesh is not None and "tp" in plan.names
    group = mesh.get_group("tp") if mesh is not None and tp else None
    size, error = (2 if tp else 1), plan.error if mesh is not None else ""
    options: dict[str, Any] = {"device": plan.device, "params_dtype": plan.dtype}
    parallel = {"tp_group": group, "tp_size": size, "sequence_parallel": plan.sequence and tp}
    first = te.LayerNormLinear(
        HIDDEN, INNER, parallel_mode="column" if tp else None, **options, **parallel
    )
    if error == "no all-reduce":
        second = te.Linear(INNER // 2, HIDDEN, **options)
    else:
        second = te.Linear(
            INNER, HIDDEN, parallel_mode="row" if tp else None, **options, **parallel
        )
    if error == "no all-reduce in the backward pass":
        first = te.LayerNormLinear(HIDDEN, INNER // 2, **options)
    block = te.TransformerLayer(
        HIDDEN,
        INNER,
        2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        set_parallel_mode=tp,
        activation="swiglu",
        self_attn_mask_type="causal",
        **options,
        **parallel,
    )
    norm = te.LayerNorm(
        HIDDEN, sequence_parallel=plan.sequence and tp, dtype=plan.dtype, device=plan.device
    )
    model = nn.Sequential(norm, first, second, block)
    local = mesh.get_local_rank("tp") if mesh is not None and tp else 0
    fill(model, local)
    if mesh is not None and "cp" in plan.names:
        ring = mesh.get_group("cp")
        block.set_context_parallel_group(
            ring, dist.get_process_group_ranks(ring), None, cp_comm_type="p2p"
        )
    if error == "weight of another rank":
        fill(second, 0, start=6)
    if error == "exchanged weights":
        fill(second, 1 - local, start=6)
    if error == "replicated weight differs" and dist.get_rank() == 1:
        block.layernorm_mlp.layer_norm_weight.data[3] += 0.5
    if error == "factor":
        second.weight.register_hook(lambda gradient: gradient * 2)
    if mesh is not None and "fsdp" in plan.names:
        for layer in model:
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
    return model


def fill(model: nn.Module, shard: int, start: int = 0) -> None:
    """Fill parameters with random values; shards differ, replicated parameters are equal."""
    with torch.no_grad():
        for number, (name, p) in enumerate(model.named_parameters(), start):
            sharded = (p.dim() == 2 and not name.startswith("0.")) or getattr(
                p, "tensor_model_parallel", False
            )
            generator = torch.Generator().manual_seed(100 * number + (shard if sharded else 0))
            p.copy_(
                0.2 * torch.randn(p.shape, generator=generator)
                + (p.dim() == 1 and "norm_weight" in name)
            )


def verify_model(plan: Plan, recipe: Any = None, **options: Any) -> te.Verification:
    x = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(5))
    return te.verify(
        functools.partial(create_model, plan),
        x.to(plan.device, plan.dtype),
        mesh=plan.mesh(),
        recipe=recipe,
        sequence_parallel=plan.sequence,
        weights=plan.weights,
        **options,
    )


def verify_on_threads(plan: Plan, recipe: Any = None, **options: Any) -> te.Verification:
    ranks = run_on_threads(lambda rank: verify_model(plan, recipe, **options), 2 ** len(plan.names))
    assert all(result == ranks[0] for result in ranks)  # every rank has the same report
    return ranks[0]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(sequence=True, dtype=torch.bfloat16),
        Plan(("dp", "tp")),
        Plan(("dp", "cp"), dtype=torch.bfloat16),
        Plan(("cp", "tp"), sequence=True),
        Plan(("fsdp", "tp"), sequence=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["none", "current", "mxfp8"])
@pytest.mark.sampled(9)
def test_a_correct_model_is_within_its_noise(plan: Plan, name: str, emulated):
    recipes = {
        "none": None,
        "current": recipe.Float8CurrentScaling(),
        "mxfp8": recipe.MXFP8BlockScaling(),
    }
    report = verify_on_threads(plan, recipes[name])
    assert report.equal, str(report)
    assert not report.not_compared
    assert {"output", "loss", "grad_input", "weight", "weight.grad", "fc1_weight.grad"} <= {
        check.tensor for check in report.checks
    }


PLANTED = {
    # error: (module, tensor, rank or None where every rank has it)
    "no all-reduce": ("2", "output", None),
    "no all-reduce in the backward pass": ("1", "layer_norm_bias.grad", None),
    "factor": ("2", "weight.grad", None),
    "weight of another rank": ("2", "weight", 1),
    "replicated weight differs": ("3.layernorm_mlp", "layer_norm_weight", 1),
}


@pytest.mark.parametrize("error", PLANTED)
@pytest.mark.parametrize("name", ["none", "current", "nvfp4"])
def test_a_planted_error_is_named(error: str, name: str, emulated):
    recipes = {
        "none": None,
        "current": recipe.Float8CurrentScaling(),
        "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    }
    report = verify_on_threads(Plan(error=error), recipes[name])
    module, tensor, rank = PLANTED[error]
    first = report.first
    assert first is not None, str(report)
    assert (first.module, first.tensor) == (module, tensor), str(report)
    assert rank is None or first.rank == rank
    assert f"{module} is the first module that differs" in str(report)
    with pytest.raises(AssertionError, match=f"{module} is the first module"):
        report.raise_if_different()


def test_exchanged_shards_are_found_with_the_weights_of_the_model_of_one_device():
    """Both models are loaded from one checkpoint: the whole weights are the joined shards."""

    def model_fn(plan: Plan, mesh: Any) -> nn.Sequential:
        model = create_model(plan, mesh)
        if mesh is None:
            shards = [te.Linear(INNER // 2, HIDDEN, device="cpu") for _ in range(2)]
            for rank, shard in enumerate(shards):
                fill(shard, rank, start=6)
            with torch.no_grad():
                full = {
                    "weight": torch.cat([shard.weight for shard in shards], 1),
                    "bias": shards[0].bias,
                }
                model[2].load_state_dict(full, strict=False)
        return nn.Sequential(model[2])

    def rank_report(error: str) -> te.Verification:
        plan, x = (
            Plan(error=error),
            torch.randn(TOKENS, BATCH, INNER, generator=torch.Generator().manual_seed(1)),
        )

        def shard(batch: torch.Tensor, mesh: Any) -> torch.Tensor:
            return batch.chunk(2, -1)[mesh.get_local_rank("tp")]

        def run(rank: int) -> te.Verification:
            return te.verify(
                functools.partial(model_fn, plan),
                x,
                mesh=plan.mesh(),
                weights="own",
                shard_fn=shard,
            )

        return run_on_threads(run, 2)[0]

    assert rank_report("").equal, str(rank_report(""))
    first = rank_report("exchanged weights").first
    assert first is not None and (first.module, first.tensor) == ("0", "weight")


def test_a_sum_in_place_of_an_average_is_found_in_every_gradient():
    def sum_values(model: nn.Module, mesh: Any) -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))

    report = verify_on_threads(Plan(("dp",)), reduce_fn=sum_values)
    assert report.first is not None and report.first.tensor.endswith(".grad")
    gradients = [
        check
        for check in report.checks
        if check.tensor.endswith(".grad") and check.gain is not None
    ]
    assert all(check.differs for check in gradients)
    assert all(abs(check.gain - 2) < 0.01 for check in gradients if check.gain is not None)
    assert all(not check.differs for check in report.checks if not check.tensor.endswith(".grad"))


def test_unsummed_norm_gradients_of_sequence_parallelism_are_found():
    report = verify_on_threads(Plan(sequence=True), reduce_fn=lambda model, mesh: None)
    results = {check.name for check in report.differing}
    assert (
        "1.layer_norm_weight.grad" in results
        and "3.layernorm_mlp.layer_norm_weight.grad" in results
    )
    assert not any(name.endswith((".output", "grad_input", "fc1_weight.grad")) for name in results)


def verify_in_processes(device: torch.device) -> dict[str, Any]:
    """Reports of delayed scaling, whose states belong to a process, with and without their reduction."""
    delayed, plan = (
        recipe.DelayedScaling(amax_history_len=2),
        Plan(sequence=True, device=str(device)),
    )
    results: dict[str, Any] = {"delayed": verify_model(plan, delayed)}
    reduce = delayed_scaling._reduce
    delayed_scaling._reduce = lambda *arguments: None
    results["unreduced"] = verify_model(plan, delayed)
    delayed_scaling._reduce = reduce
    return {
        name: (report.equal, str(report), "" if report.first is None else report.first.tensor)
        for name, report in results.items()
    }


def test_scales_of_delayed_scaling_that_are_not_reduced_are_found(tmp_path):
    result = run_on_ranks(verify_in_processes, 2, tmp_path)
    assert result[0] == result[1]
    assert result[0]["delayed"][0], result[0]["delayed"][1]
    equal, text, tensor = result[0]["unreduced"]
    assert not equal and tensor.startswith("scaling_"), text
    assert "differs from the scales of the group's first rank" in text


def test_one_process_without_a_group():
    x = torch.randn(TOKENS, BATCH, HIDDEN)
    report = te.verify(
        lambda mesh: create_model(Plan(), mesh), x, recipe=recipe.Float8CurrentScaling()
    )
    assert report.equal and report.ranks == 1
    assert "1 rank under Float8CurrentScaling" in report.summary()
    assert "float32" in str(report) and report.table().row_count == len(report.checks)


def test_arguments_that_cannot_be_verified_are_named():
    x = torch.randn(TOKENS, BATCH, HIDDEN)
    with pytest.raises(ValueError, match="dropout"):
        te.verify(lambda mesh: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.5)), x)
    with pytest.raises(TypeError, match="model_fn"):
        te.verify(nn.Linear(2, 2).weight, x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="weights"):
        te.verify(lambda mesh: nn.Linear(HIDDEN, HIDDEN), x, weights="none")

    def unknown(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("rows",))
        te.verify(lambda mesh: nn.Linear(HIDDEN, HIDDEN), x, mesh=mesh)

    with pytest.raises(ValueError, match=r"mesh dimensions .*rows"):
        run_on_threads(unknown, 2)

    def odd(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        te.verify(lambda mesh: nn.Linear(HIDDEN, HIDDEN), x[:, :1], mesh=mesh)

    with pytest.raises(ValueError, match="not divisible by 2"):
        run_on_threads(odd, 2)


def test_parts_of_a_gated_matrix_are_sharded_one_by_one():
    full = torch.arange(16.0).reshape(8, 2)
    shards = [shard_parts(full, 0, (rank, 2), (4, 4)) for rank in range(2)]
    assert shards[0][:, 0].tolist() == [0, 2, 8, 10] and shards[1][:, 0].tolist() == [4, 6, 12, 14]

    def gather(rank: int) -> torch.Tensor:
        return gather_parts(shards[rank], 0, dist.group.WORLD, (4, 4))[0]

    assert all(torch.equal(value, full) for value in run_on_threads(gather, 2))


def test_a_rank_holds_two_chunks_of_the_tokens_and_a_part_of_the_batch():
    position = RankPlace(data=(1, 2), context=(0, 2), tensor=(1, 2), tokens_over_tensor=True)
    x = torch.arange(8.0)[:, None].expand(8, 4)
    assert position.shard_batch(x).tolist() == [[6.0, 6.0], [7.0, 7.0]]
    assert position.shard_activation(x[..., None].expand(8, 4, 6), (4, 2, 3), (6,)) is not None
    assert position.shard_activation(x, (3, 2), (4,)) is None


@pytest.mark.parametrize("noise", [1e-6, 0.05, 0.4])
def test_the_gain_finds_a_missing_factor_within_the_norm_of_the_noise(noise: float):
    generator = torch.Generator().manual_seed(0)

    def noisy() -> torch.Tensor:
        return exact + noise * torch.randn(exact.shape, generator=generator)

    exact = torch.randn(500, generator=generator)
    runs = [noisy(), noisy()]
    check = difference(noisy(), exact, runs)
    assert check.error <= check.allowance and check.gain is not None
    assert abs(check.gain - 1) <= check.gain_allowance
    half = difference(noisy() / 2, exact, runs)
    assert half.gain is not None and abs(half.gain - 1) > half.gain_allowance
    assert difference(torch.full_like(exact, float("nan")), exact, runs).note == "NaN or infinity"
