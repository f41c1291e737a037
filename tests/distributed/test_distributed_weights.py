"""Layers whose weights are shards of a `DistributedWeight` group, over two ranks, against layers with whole weights."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from tests.support.layers import RECIPES
from transformer_engine.pytorch.distributed_weight import whole_weights
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, emulate

SIZE, ROWS = 2, 64
LAYERS: dict[str, tuple[Any, list[list[str]]]] = {
    "linear": (lambda **options: te.Linear(64, 128, **options), [["weight"]]),
    "norm_linear": (lambda **options: te.LayerNormLinear(64, 128, **options), [["weight"]]),
    "mlp": (
        lambda **options: te.LayerNormMLP(64, 128, **options),
        [["fc1_weight"], ["fc2_weight"]],
    ),
    "grouped": (
        lambda **options: te.GroupedLinear(2, 64, 128, **options),
        [["weight0", "weight1"]],
    ),
    "pieces": (
        lambda **options: te.Linear(64, 128, parameters_split=("a", "b"), **options),
        [["a_weight", "b_weight"]],
    ),
}
CASES = [(kind, name) for kind in LAYERS for name in ("none", "current", "mxfp8")]


class Shard(torch.nn.Parameter):
    """This rank's weight rows; gradients are summed over the ranks."""

    is_distributed_weight = True
    group: list[Shard]
    calls: list[str]
    buffer: torch.Tensor

    def materialize_group_for_forward(self) -> Any:
        self.calls.append("forward")
        return self._materialized()

    def materialize_group_for_backward(self) -> Any:
        self.calls.append("backward")
        return self._materialized()

    def _materialized(self) -> Any:
        outputs = []
        for shard in self.group:
            full = torch.empty(
                SIZE * shard.shape[0], *shard.shape[1:], dtype=shard.dtype, device=shard.device
            )
            dist.all_gather_into_tensor(full, shard.detach())
            outputs.append(full)
        return outputs[0] if len(outputs) == 1 else outputs

    def finalize_group_grads(self, wgrads: Any) -> Any:
        self.calls.append("gradients")
        single = isinstance(wgrads, torch.Tensor)
        outputs = []
        for grad in [wgrads] if single else wgrads:
            total = grad.clone()
            dist.all_reduce(total)
            outputs.append(total.to(self.dtype).chunk(SIZE)[dist.get_rank()])
        return outputs[0] if single else outputs

    def grad_buffer(self) -> torch.Tensor:
        return self.buffer


def sharded(layer: Any, groups: list[list[str]], size: int = SIZE, rank: int = 0) -> list[str]:
    """Replace a layer's weights by this rank's shards; return the list that records protocol calls."""
    calls: list[str] = []
    for names in groups:
        shards = []
        for name in names:
            full = getattr(layer, name).detach()
            shard = Shard(full.chunk(size)[rank].clone())
            shard.calls, shard.buffer = calls, torch.zeros(full.shape, device=full.device)
            layer._parameters[name] = shard
            shards.append(shard)
        for shard in shards:
            shard.group = shards
    return calls


def step(layer: Any, kind: str, name: str, batch: int, device: torch.device) -> list[Any]:
    """Output and input gradient from a step on one rank's batch."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(ROWS, 64, generator=generator).to(device, torch.bfloat16).requires_grad_()
    with te.autocast(enabled=name != "none", recipe=RECIPES[name]):
        y = layer(x, [32, 32]) if kind in ("grouped", "chain of groups") else layer(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad]


def case(
    device: torch.device, kind: str, name: str, fused: bool, delayed: bool = False
) -> dict[str, Any]:
    """Compare one step between sharded weights and full weights; the latter train on all ranks' batches."""
    make, groups = LAYERS[kind]
    names = [member for group in groups for member in group]
    options = {"device": device, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused}
    options["delay_wgrad_compute"] = delayed
    layers = []
    for _ in range(2):
        torch.manual_seed(5)
        layers.append(make(**options))
    one, layer = layers
    for member in names:
        getattr(one, member).main_grad = torch.zeros(getattr(one, member).shape, device=device)
    rank = dist.get_rank()
    calls = sharded(layer, groups, SIZE, rank)
    expected = [step(one, kind, name, batch, device) for batch in range(SIZE)][rank]
    actual = step(layer, kind, name, rank, device)
    if delayed:
        assert "gradients" not in calls and all(
            getattr(layer, member).grad is None for member in names
        )
        for _ in range(SIZE):
            one.backward_dw()
        layer.backward_dw()
    for member in names:
        weight = getattr(one, member)
        full = weight.main_grad.to(weight.dtype) if fused else weight.grad
        expected.append(full.chunk(SIZE)[rank])
        actual.append(getattr(layer, member).grad)
    equal = [torch.equal(ours, reference) for ours, reference in zip(actual, expected, strict=True)]
    error = max(
        float((ours.float() - reference.float()).norm() / reference.float().norm())
        for ours, reference in zip(actual, expected, strict=True)
    )
    return {"equal": equal, "error": error, "calls": calls}


def chain(device: torch.device, fused: bool, grouped: bool = False) -> te.ops.Sequential:
    """Chain two products, with a two-group product first if requested."""
    torch.manual_seed(5)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    to_main_grad: dict[str, Any] = {**options, "accumulate_into_main_grad": fused}
    first = (
        te.ops.GroupedLinear(2, 64, 128, **to_main_grad)
        if grouped
        else te.ops.BasicLinear(64, 128, **to_main_grad)
    )
    return te.ops.Sequential(
        first,
        te.ops.GELU(),
        te.ops.BasicLinear(128, 64, **to_main_grad),
        te.ops.Bias(64, **options),
    )


def chains(device: torch.device, name: str, fused: bool, grouped: bool = False) -> dict[str, Any]:
    """Compare operation chains with sharded and with full weights."""
    kind, rank = "chain of groups" if grouped else "chain", dist.get_rank()
    groups = {0: ["weight0", "weight1"] if grouped else ["weight"], 2: ["weight"]}
    weights = [(i, weight) for i, names in groups.items() for weight in names]
    one, ours = chain(device, fused, grouped), chain(device, fused, grouped)
    calls: list[str] = []
    for i, weight in weights:
        full = getattr(one[i], weight)
        full.main_grad = torch.zeros(full.shape, device=device)
    for i, names in groups.items():
        calls = sharded(ours[i], [names], SIZE, rank)
    equal = []
    for _ in range(1 if fused else 2):  # fused gradients stay in the buffer
        expected = [step(one, kind, name, batch, device) for batch in range(SIZE)][rank]
        actual = step(ours, kind, name, rank, device)
        equal += [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)]
    error = 0.0
    for i, weight in weights:
        full = getattr(one[i], weight)
        gradient = full.main_grad if fused else full.grad
        reference = gradient.chunk(SIZE)[rank].float()
        error = max(
            error,
            float((getattr(ours[i], weight).grad.float() - reference).norm() / reference.norm()),
        )
    return {"equal": equal, "error": error, "calls": calls}


def compare_layers(device: torch.device) -> dict[str, Any]:
    results = {}
    with emulate():
        for name in ("none", "current", "mxfp8"):
            for fused in (False, True):
                FP8GlobalStateManager.reset()
                results[f"chain/{name}/{fused}"] = chains(device, name, fused)
                FP8GlobalStateManager.reset()
                results[f"chain of groups/{name}/{fused}"] = chains(
                    device, name, fused, grouped=True
                )
        for kind, name in CASES:
            for fused in (False, True):
                if fused and kind == "pieces":
                    continue  # main_grad requires a weight that is a single parameter
                FP8GlobalStateManager.reset()
                results[f"{kind}/{name}/{fused}"] = case(device, kind, name, fused)
                if name != "mxfp8":
                    FP8GlobalStateManager.reset()
                    results[f"{kind}/{name}/{fused}/delayed"] = case(
                        device, kind, name, fused, True
                    )
    return results


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[dict[str, Any]]:
    return run_on_ranks(compare_layers, SIZE, tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_layers_with_sharded_weights_equal_layers_with_full_weights(measured, kind, name):
    for rank in measured:
        result = rank[f"{kind}/{name}/False"]
        assert all(result["equal"]), result
        if kind != "pieces":
            # The float32 sum in main_grad and the sum over ranks round once more.
            assert rank[f"{kind}/{name}/True"]["error"] < 2**-8


@pytest.mark.parametrize("name", ["none", "current", "mxfp8"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["chain", "chain of groups"])
def test_operation_chains_with_sharded_weights_equal_chains_with_full_weights(
    measured, kind, name, fused
):
    for rank in measured:
        result = rank[f"{kind}/{name}/{fused}"]
        assert all(result["equal"]) and result["error"] < 2**-7, result
        assert result["calls"].count("gradients") == len(result["equal"]) // 2


def test_an_unquantized_whole_weight_is_dropped_until_the_backward_pass(measured):
    for rank in measured:
        assert rank["linear/none/False"]["calls"] == ["forward", "backward", "gradients"]
        assert rank["grouped/none/True"]["calls"] == ["forward", "backward", "gradients"]
        assert rank["linear/mxfp8/False"]["calls"] == ["forward", "gradients"], "codes are saved"


@pytest.mark.parametrize("name", ["none", "current"])
@pytest.mark.parametrize("kind", LAYERS)
def test_delayed_gradients_of_whole_weights_are_finalized_in_backward_dw(measured, kind, name):
    for rank in measured:
        result = rank[f"{kind}/{name}/False/delayed"]
        assert all(result["equal"]), result
        assert result["calls"].count("gradients") == len(LAYERS[kind][1])
        if kind != "pieces":
            assert rank[f"{kind}/{name}/True/delayed"]["error"] < 2**-8


def test_delayed_gradients_of_shards_accumulate_and_skip_frozen_weights():
    layer: Any = te.LayerNormMLP(
        64, 128, device="cpu", params_dtype=torch.bfloat16, delay_wgrad_compute=True
    )
    calls = sharded(layer, [["fc1_weight"], ["fc2_weight"]], 1)
    for name in ("fc1_weight", "fc2_weight"):
        shard = getattr(layer, name)
        shard.materialize_group_for_forward = shard.materialize_group_for_backward = (
            shard.detach().clone
        )
        shard.finalize_group_grads = lambda wgrads: calls.append("gradients") or wgrads
    layer.fc1_weight.requires_grad_(False)
    gradients = []
    for _ in range(2):
        step(layer, "mlp", "none", 0, torch.device("cpu"))
        layer.backward_dw()
        gradients.append(layer.fc2_weight.grad.clone())
    assert calls == ["gradients"] * 2 and layer.fc1_weight.grad is None
    assert torch.equal(gradients[1], 2 * gradients[0])


def test_operations_that_do_not_accept_shards_raise_an_error():
    bias = te.ops.Bias(64, device="cpu")
    sharded(bias, [["bias"]])
    with pytest.raises(
        NotImplementedError, match=r"Bias does not accept .* Shard: use te.ops.BasicLinear"
    ):
        te.ops.Sequential(bias)(torch.randn(64, 64))
    for option, names in (
        ("delay_wgrad_compute", ["weight0", "weight1"]),
        ("single_grouped_weight", ["weight"]),
    ):
        grouped = te.ops.GroupedLinear(2, 64, 64, bias=False, device="cpu", **{option: True})
        sharded(grouped, [names])
        with pytest.raises(
            NotImplementedError, match=rf"GroupedLinear .* Shard: leave {option} False"
        ):
            te.ops.Sequential(grouped)(torch.randn(64, 64), torch.tensor([32, 32]))
    model = chain(torch.device("cpu"), False)
    sharded(model[0], [["weight"]])
    model[2] = te.ops.BasicLinear(
        128, 64, accumulate_into_main_grad=True, device="cpu", dtype=torch.bfloat16
    )
    sharded(model[2], [["weight"]])
    with pytest.raises(NotImplementedError, match="differ in accumulate_into_main_grad"):
        step(model, "chain", "none", 0, torch.device("cpu"))


def test_a_chain_of_shards_accumulates_gradients_of_whole_weights_into_main_grad():
    """The first weight is a shard, whose gradient is returned; the other is whole and has a buffer."""
    full, ours = (chain(torch.device("cpu"), False) for _ in range(2))
    ours[2] = te.ops.BasicLinear(
        128, 64, accumulate_into_main_grad=True, device="cpu", dtype=torch.bfloat16
    )
    with torch.no_grad():
        ours[2].weight.copy_(full[2].weight)
    ours[2].weight.main_grad = torch.zeros(64, 128)
    sharded(ours[0], [["weight"]], 1)
    shard = ours[0].weight
    shard.materialize_group_for_forward = shard.materialize_group_for_backward = (
        shard.detach().clone
    )
    shard.finalize_group_grads = lambda wgrads: wgrads
    expected, actual = [
        step(model, "chain", "none", 0, torch.device("cpu")) for model in (full, ours)
    ]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(shard.grad, full[0].weight.grad)
    assert torch.equal(ours[2].weight.main_grad.bfloat16(), full[2].weight.grad)


def test_sharded_biases_are_rejected():
    grouped = te.ops.GroupedLinear(2, 64, 64, device="cpu")
    sharded(grouped, [["weight0", "weight1"], ["bias0", "bias1"]])
    with pytest.raises(
        NotImplementedError, match=r"GroupedLinear does not accept .* Shard: leave bias0 whole"
    ):
        te.ops.Sequential(grouped)(torch.randn(64, 64), torch.tensor([32, 32]))


def test_a_traced_layer_of_shards_raises_an_error():
    layer = te.Linear(16, 16, device="cpu")
    sharded(layer, [["weight"]])
    with (
        mock.patch.object(torch.compiler, "is_compiling", lambda: True),
        pytest.raises(
            NotImplementedError, match=r"torch.compile with a distributed weight.*in eager mode"
        ),
        whole_weights([[layer.weight]], fused=False, store=None),
    ):
        pass


@pytest.mark.parametrize("name", ["none", "mxfp8"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_frozen_weight_of_a_group_has_no_gradient(name, fused):
    layer: Any = te.GroupedLinear(
        2, 64, 128, device="cpu", params_dtype=torch.bfloat16, fuse_wgrad_accumulation=fused
    )
    sharded(layer, [["weight0", "weight1"]], 1)
    frozen, trained = layer.weight0, layer.weight1
    frozen.requires_grad_(False)
    received: list[Any] = []

    def finalize(wgrads: Any) -> Any:
        received.extend(wgrads)
        return [None if grad is None else grad.to(torch.bfloat16) for grad in wgrads]

    frozen.materialize_group_for_forward = frozen.materialize_group_for_backward = lambda: [
        shard.detach().clone() for shard in frozen.group
    ]
    frozen.finalize_group_grads = finalize
    with emulate():
        step(layer, "grouped", name, 0, torch.device("cpu"))
    assert received[0] is None and not frozen.buffer.any()
    assert trained.grad.any() and trained.buffer.any() == fused


def test_a_group_that_returns_another_number_of_gradients_raises_an_error():
    layer: Any = te.GroupedLinear(2, 64, 128, device="cpu", params_dtype=torch.bfloat16)
    sharded(layer, [["weight0", "weight1"]], 1)
    layer.weight0.materialize_group_for_forward = layer.weight0.materialize_group_for_backward = (
        lambda: [shard.detach().clone() for shard in layer.weight0.group]
    )
    layer.weight0.finalize_group_grads = lambda wgrads: wgrads[0]
    with pytest.raises(
        ValueError, match=r"finalize_group_grads of Shard returned 1 gradients; return 2"
    ):
        step(layer, "grouped", "none", 0, torch.device("cpu"))
    assert layer.weight0.grad is None and layer.weight1.grad is None
