"""verify(model_fn, batch, mesh=..., recipe=...): a parallel, quantized run against one device in float32.

A tensor x with n elements gets a measured allowance. Two runs of the same model on one device, under the same recipe
and dtype and with rounding noise at every module boundary, have errors e and gains g against the float32 run:

    |x - reference| / |reference| <= (2 + 12 / sqrt(n)) rms(e) + 16 eps
    |gain - 1|                    <= 2 max|g - 1| + max(1, 4 / sqrt(n)) rms(e) + 16 eps

Shards have their own scales and summation orders. Their errors differ from the errors of one device, but have the same
size. The factor 2 covers partial results that every rank rounds before they are summed. 12 / sqrt(n) is the spread of a
norm estimated from n numbers. The gain is not compared if rms(e) > 1/2. It finds a missing factor in a format with
large errors: a factor of two moves it by at least 1/2. Its own error does not vanish with n, because all rows share the
codes and scale of a weight; it is at most the relative error. eps is the unit roundoff of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...common.checks import check_option, function, suggests_keywords, switch
from ...common.recipe import Recipe
from ..distributed.collectives import world_size
from ..quantization import autocast
from ..quantization.family import find_family
from ..tensor.quantized_tensor import QuantizedTensor
from .verification_report import TensorCheck, Verification
from .verified_parameters import (
    Difference,
    average_gradients,
    copy_parameters,
    model_parameters,
    plain,
    scaling_states,
)
from .verified_runs import (
    Batch,
    LossFunction,
    RecordKey,
    RunRecord,
    call_model,
    convert_to_float32,
    first_tensor,
    record_run,
    unwrap_model,
)
from .verified_shards import RankPlace, find_rank_place, shard_parts, sharded_dim

NOISE_RUNS = 2
LOSS = "loss"
_EPS = 2.0**-24
_SIGNAL = 0.5  # relative error from which on noise alone changes the gain


def mean_square(output: Any, batch: Any) -> Tensor:
    """Mean square of a model's first output, the default loss of `verify`."""
    return first_tensor(output).float().square().mean()


@suggests_keywords
def verify(
    model_fn: Callable[[Any], nn.Module],
    batch: Batch,
    *,
    mesh: Any = None,
    recipe: Recipe | None = None,
    loss_fn: LossFunction = mean_square,
    shard_fn: Callable[[Any, Any], Any] | None = None,
    reduce_fn: Callable[[nn.Module, Any], object] | None = None,
    weights: str = "gathered",
    amax_reduction_group: Any = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    batch_dim: int = 1,
) -> Verification:
    """Compare a model as it will be trained, parallel and quantized, with the same model on one device in float32.

    Every rank calls this function with the same arguments. Every rank also runs the one-device
    model, whose memory it needs: verify a model with fewer layers. No optimizer step is made.

    Args:
        model_fn: Function that takes the mesh and returns the model: the parallel model with this rank's parameters, or
            the one-device model for None. Both have the same modules under the same names, and no dropout.
        batch: Whole batch, the same on all ranks: a tensor, an argument tuple or a keyword argument dictionary.
        mesh: DeviceMesh over all ranks with named dimensions: "dp" or "fsdp" (the batch is
            sharded), "cp" (the tokens), "tp" (the parameters). None: one process.
        recipe: Recipe of the parallel model; None: no quantization.
        loss_fn: Function (output, batch) that returns a mean over the tokens of its batch, on one rank or all.
        shard_fn: Function (batch, mesh) that returns this rank's part of the batch. By default, tensors with at least
            two dimensions are sharded along `batch_dim`, and along `sequence_dim` as context parallelism shards tokens.
        reduce_fn: Function (model, mesh) that finishes the gradients after the backward pass, as your training loop
            does. By default, gradients are averaged over data- and context-parallel ranks unless the model's wrapper
            has averaged them, and gradients of `sequence_parallel` parameters are summed over tensor-parallel ranks.
        weights: "gathered": the one-device model gets the parallel model's parameters. "own": both
            keep the parameters from model_fn, for example from a checkpoint, and are compared.
        amax_reduction_group: Group for autocast in the parallel run; by default all ranks for delayed scaling.
        sequence_parallel: The model's inputs and outputs are sharded along the tokens over "tp" as well.
        sequence_dim: Token dimension in activations, 0 for [tokens, batch, features].
        batch_dim: Batch dimension in activations.

    Returns:
        Comparison of every tensor, the same on all ranks; `str()` is a table, `first` the first difference.

    Raises:
        ValueError: The mesh has unnamed dimensions, the models have different parameters, the batch
            cannot be sharded, or two runs of the one-device model differ (dropout).

    Example:
        ```python
        def model_fn(mesh):
            group = None if mesh is None else mesh.get_group("tp")
            return te.TransformerLayer(256, 1024, 8, hidden_dropout=0.0, attention_dropout=0.0, tp_group=group,
                                       tp_size=1 if mesh is None else 2, set_parallel_mode=True)

        print(te.verify(model_fn, torch.randn(64, 2, 256), mesh=mesh, recipe=te.recipe.Float8CurrentScaling()))
        ```
    """
    for name, value in (("model_fn", model_fn), ("loss_fn", loss_fn)):
        function(name, value)
    check_option("weights", weights, ("gathered", "own"))
    switch("sequence_parallel", sequence_parallel)
    rank_place = find_rank_place(mesh, sequence_parallel, sequence_dim, batch_dim)
    parallel, exact, single = model_fn(mesh), model_fn(None), model_fn(None)
    quantized = [
        name for name, p in unwrap_model(exact).named_parameters() if isinstance(p, QuantizedTensor)
    ]
    if quantized:
        raise ValueError(
            f"model_fn(None) returns the quantized parameter {quantized[0]}, which float32 cannot replace; use "
            "quantized_model_init for the parallel model only"
        )
    exact = exact.float()
    differences = copy_parameters(parallel, (exact, single), rank_place, weights == "gathered")
    full_batch = convert_to_float32(batch)
    with torch.no_grad():
        first, second = (first_tensor(call_model(exact, full_batch)) for _ in range(2))
    if not torch.equal(first, second):
        raise ValueError(
            "two runs of the model of one device differ, so nothing can be compared; set every dropout to 0, or call "
            "model.eval() in model_fn"
        )
    reference = _finish_record(exact, record_run(exact, full_batch, loss_fn))
    stateful = recipe is not None and find_family(recipe).stateful
    steps = 2 if stateful else 1
    eps = max(
        [torch.finfo(p.dtype).eps for p in single.parameters() if p.is_floating_point()],
        default=2 * _EPS,
    )
    noisy = [
        _finish_record(
            single,
            record_run(single, batch, loss_fn, _block(recipe, None), steps, noise=(eps, seed)),
        )
        for seed in range(NOISE_RUNS)
    ]
    group = amax_reduction_group
    if group is None and stateful and world_size() > 1:
        group = dist.group.WORLD
    local_batch = (
        tree_map_only(Tensor, rank_place.shard_batch, batch)
        if shard_fn is None
        else shard_fn(batch, mesh)
    )
    scale = 1 / rank_place.tensor[1] if sequence_parallel else 1.0
    record = record_run(parallel, local_batch, loss_fn, _block(recipe, group), steps, scale)
    if reduce_fn is None:
        average_gradients(parallel, rank_place)
    else:
        reduce_fn(parallel, mesh)
    comparison = _Comparison(exact, rank_place, reference, noisy, _finish_record(parallel, record))
    checks: dict[RecordKey, Difference | None] = {}
    if stateful and world_size() > 1:
        for module, tensor, equal in scaling_states(parallel, group):
            note = "" if equal else "differs from the scales of the group's first rank"
            checks[RecordKey(module, 0, tensor)] = Difference(0.0, _EPS, note=note)
    checks |= {_parameter_key(name): difference for name, difference in differences.items()}
    checks |= dict(comparison.tensors())
    return _gather_report(
        checks,
        "no recipe" if recipe is None else type(recipe).__name__,
        record.loss,
        reference.loss,
    )


class _Comparison:
    """Compares this rank's tensors with one device's."""

    def __init__(
        self,
        exact: nn.Module,
        rank_place: RankPlace,
        reference: RunRecord,
        noisy: Sequence[RunRecord],
        record: RunRecord,
    ) -> None:
        self._place, self._reference, self._noisy, self._record = (
            rank_place,
            reference,
            noisy,
            record,
        )
        self._modules = dict(exact.named_modules())
        self._parameters = model_parameters(exact)

    def tensors(self) -> Iterator[tuple[RecordKey, Difference | None]]:
        """Yield the differences in execution order; None where the tensors cannot be compared."""
        for key in self._reference.forward:
            yield key, self._activation(key, "forward", 1.0)
        yield RecordKey("", 0, LOSS), self._loss()
        left = {_parameter_key(name, ".grad"): name for name in reversed(self._reference.gradients)}
        for key in self._reference.backward:
            yield key, self._activation(key, "backward", self._place.copies)
            if key.kind == "grad_output":
                for own_key in [own_key for own_key in left if own_key.module == key.module]:
                    yield own_key, self._gradient(left.pop(own_key))
        for own_key, name in left.items():
            yield own_key, self._gradient(name)

    def _activation(self, key: RecordKey, part: str, factor: float) -> Difference | None:
        actual = getattr(self._record, part).get(key)
        runs = [getattr(run, part).get(key) for run in (self._reference, *self._noisy)]
        if actual is None or any(run is None for run in runs):
            return None
        features = runs[0].shape[-1] if runs[0].dim() else 1
        parts = (features,)
        if key.kind != "grad_input":
            module = self._modules[key.module]
            names = getattr(module, "weight_names", ())
            rows = (
                tuple([getattr(module, name).shape[0] for name in names]) if len(names) > 1 else ()
            )
            parts = rows if sum(rows) == features else (features,)
        shards = [self._place.shard_activation(run, actual.shape, parts) for run in runs]
        if any(shard is None for shard in shards):
            return None
        exact, *noisy = [shard for shard in shards if shard is not None]
        return difference(actual / factor, exact, noisy)

    def _gradient(self, name: str) -> Difference:
        parameter, exact = self._parameters[name], self._reference.gradients[name]
        noisy = [run.gradients[name] for run in self._noisy]
        actual = self._record.gradients.get(name)
        if actual is None:
            return Difference(1.0, _EPS, note="no gradient")
        dim = sharded_dim(exact.shape, actual.shape, self._place.tensor[1])
        if dim is None:
            return difference(actual, exact, noisy)
        parts = parameter.parts if dim == 0 else (exact.shape[dim],)
        sharded = [shard_parts(run, dim, self._place.tensor, parts) for run in (exact, *noisy)]
        return difference(actual, sharded[0], sharded[1:])

    def _loss(self) -> Difference:
        """Compare the ranks' mean loss."""
        loss = torch.tensor(self._record.loss, dtype=torch.float64, device="cpu")
        if world_size() > 1:
            losses: list[float] = [0.0] * world_size()
            dist.all_gather_object(losses, self._record.loss)
            loss = torch.tensor(losses, dtype=torch.float64, device="cpu").mean()
        exact, *noisy = [
            torch.tensor([run.loss], device="cpu") for run in (self._reference, *self._noisy)
        ]
        loss_difference = difference(loss.reshape(1), exact, noisy)
        # |dL/dy| |y' - y|, the largest first-order loss change by noise in the model's output.
        output, gradient = RecordKey("", 0, "output"), RecordKey("", 0, "grad_output")
        if output not in self._reference.forward or gradient not in self._reference.backward:
            change = 0.0
        else:
            outputs = self._reference.forward[output]
            changes = [float((run.forward[output] - outputs).norm()) for run in self._noisy]
            change = float(self._reference.backward[gradient].norm()) * max(changes)
        bound = change / max(abs(self._reference.loss), torch.finfo(torch.float32).tiny)
        return Difference(
            loss_difference.error,
            max(loss_difference.allowance, 2 * bound),
            note=loss_difference.note,
        )


def difference(actual: Tensor, exact: Tensor, noisy: Sequence[Tensor]) -> Difference:
    """Compare a tensor with the exact one, and with the errors in runs that have noise alone.

    Args:
        actual: Tensor in the parallel run.
        exact: One device's tensor in float32, with the same shape.
        noisy: The same tensor from runs on one device with the parallel run's noise.
    """
    actual, exact = actual.double(), exact.double()
    if not actual.isfinite().all():
        return Difference(math.inf, _EPS, note="NaN or infinity")
    norm = float(exact.norm().clamp_min(torch.finfo(torch.float32).tiny))
    errors = [float((run.double() - exact).norm()) / norm for run in noisy]
    rms = math.sqrt(sum(error**2 for error in errors) / len(errors))
    count = max(1, exact.numel())
    allowance = (2 + 12 / math.sqrt(count)) * rms + 16 * _EPS
    error = float((actual - exact).norm()) / norm
    if rms > _SIGNAL or not exact.any():
        return Difference(error, allowance)
    gains = [float((run.double() * exact).sum() / exact.square().sum()) for run in noisy]
    gain_allowance = (
        2 * max(abs(gain - 1) for gain in gains) + max(1, 4 / math.sqrt(count)) * rms + 16 * _EPS
    )
    return Difference(
        error, allowance, float((actual * exact).sum() / exact.square().sum()), gain_allowance
    )


def _gather_report(
    checks: dict[RecordKey, Difference | None], recipe: str, loss: float, exact_loss: float
) -> Verification:
    """Return the report over all ranks: each tensor on the rank that differs most."""
    ranks = [checks]
    losses = [loss]
    if world_size() > 1:
        gathered: list[Any] = [None] * world_size()
        dist.all_gather_object(gathered, (checks, loss))
        ranks, losses = [reports for reports, _ in gathered], [value for _, value in gathered]
    rows: list[TensorCheck] = []
    missing: list[str] = []
    for key in checks:
        reports = [
            TensorCheck(
                key.module,
                key.tensor,
                number,
                d.error,
                d.allowance,
                d.gain,
                d.gain_allowance,
                d.note,
            )
            for number, differences in enumerate(ranks)
            if (d := differences.get(key)) is not None
        ]
        if reports:
            rows.append(max(reports, key=lambda row: row.excess))
        else:
            missing.append(f"{key.module}.{key.tensor}" if key.module else key.tensor)
    return Verification(
        tuple(rows), len(ranks), recipe, sum(losses) / len(losses), exact_loss, tuple(missing)
    )


def _parameter_key(name: str, suffix: str = "") -> RecordKey:
    module, _, attribute = name.rpartition(".")
    return RecordKey(module, 0, attribute + suffix)


def _finish_record(model: nn.Module, record: RunRecord) -> RunRecord:
    """Return the record with the model's gradients."""
    for name, parameter in model_parameters(model).items():
        if parameter.value.grad is not None:
            record.gradients[name] = plain(parameter.value.grad)
    return record


def _block(recipe: Recipe | None, group: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group)
