"""Megatron-core over two ranks on gloo: {case: differences from one rank} as JSON.

Each rank runs the full model alone first, then its model or batch shard, with the same weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.clients import megatron_cases
from tests.clients.ranked import said_by_the_first

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
}
NCCL_EP = {
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "ncclep",
    "moe_expert_rank_capacity_factor": 2.0,
}


class _NoStream:
    """A replacement of a CUDA stream or event on a machine without a GPU."""

    def wait_stream(self, *rest: Any) -> None:
        """Do nothing: all work has already completed."""

    synchronize = wait_event = wait_stream

    def record_event(self) -> _NoStream:
        return self


def replace_cuda_functions() -> None:
    """Replace the torch.cuda functions that Megatron calls on any machine."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = lambda device=None: _NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    exchange = dist.all_to_all_single

    def exchange_by_tensors(output: Any, argument: Any, *sizes: Any, **kwargs: Any) -> Any:
        """Megatron converts sizes to numbers only if their tensors are on a GPU."""
        kwargs = {
            name: value.tolist() if torch.is_tensor(value) else value
            for name, value in kwargs.items()
        }
        return exchange(output, argument, *sizes, **kwargs)

    dist.all_to_all_single = exchange_by_tensors


class OnTheCPU(TorchFunctionMode):
    """Creates the tensors that Megatron's schedule asks for on "cuda" on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def gpt(settings: dict[str, Any], ours: bool = False, first: bool = True, last: bool = True) -> Any:
    """A model on the layer spec for this engine.

    Args:
        settings: Of the TransformerConfig.
        ours: Our attention layer and its core replace Megatron's.
        first: The model has the embedding.
        last: The model has the output layer.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(0)
    result = megatron_cases.config(**settings)
    spec: Any = get_gpt_layer_with_transformer_engine_spec(
        result.num_moe_experts, result.moe_grouped_gemm
    )
    if ours:
        from transformer_engine.pytorch.integrations.megatron import SelfAttention
        from transformer_engine.pytorch.integrations.megatron.layers import CoreAttention

        spec = copy.deepcopy(spec)
        spec.submodules.self_attention.module = SelfAttention
        spec.submodules.self_attention.submodules.core_attention = CoreAttention
    return GPTModel(
        config=result,
        transformer_layer_spec=spec,
        vocab_size=megatron_cases.VOCABULARY,
        max_sequence_length=megatron_cases.LENGTH,
        position_embedding_type="learned_absolute",
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=False,
    )


def losses(model: Any, rows: Any = slice(None), held: Any = slice(None)) -> torch.Tensor:
    """Per-token losses for selected batch rows and positions."""
    tokens, positions, mask = megatron_cases.batch()
    labels = torch.roll(tokens, -1, 1)
    return model(
        tokens[rows][:, held], positions[rows][:, held], mask, labels=labels[rows][:, held]
    ).float()


def start(**sizes: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    model_parallel: Any = parallel_state
    model_parallel.destroy_model_parallel()
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)  # otherwise one thread per group polls to the end
    model_parallel.initialize_model_parallel(**sizes)
    random.initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
    for seed, name in enumerate(
        ("model-parallel-rng", random.get_expert_parallel_rng_tracker_name())
    ):
        tracker: Any = random.get_cuda_rng_tracker()
        tracker.add(name, seed)


def alone(settings: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """The model on one rank after a backward pass, and its losses [batch, length]."""
    start()
    model = gpt(settings)
    result = losses(model)
    result.sum().backward()
    return model, result.detach()


def own_part(whole: torch.Tensor, part: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's shard of a parameter or its gradient."""
    for axis, (size, local) in enumerate(zip(whole.shape, part.shape, strict=True)):
        if size != local:
            return whole.chunk(size // local, axis)[rank]
    return whole


def load(part: Any, names: dict[str, str], whole: Any, rank: int) -> None:
    """Copy the full model's parameters; `names` maps each shard parameter to its full-model name."""
    source = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(own_part(source[names.get(name, name)], parameter, rank))


def differences(
    part: Any,
    whole: Any,
    actual: torch.Tensor,
    expected: torch.Tensor,
    rank: int,
    names: dict[str, str],
    summed: Callable[[str, Any], bool],
) -> dict[str, float]:
    """Greatest differences over the ranks; summed: gradients that the ranks add up before they use them."""
    source = dict(whole.named_parameters())
    gradients = 0.0
    for name, parameter in part.named_parameters():
        gradient = parameter.grad
        if summed(name, parameter):
            dist.all_reduce(gradient)
        reference = source[names.get(name, name)].grad
        difference = (own_part(reference, gradient, rank) - gradient).abs().max()
        gradients = max(gradients, float(difference / reference.abs().max()))
    worst = torch.tensor(
        [float((actual - expected).abs().max()) if actual.numel() else 0.0, gradients]
    )
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(("losses", "gradients"), worst.tolist(), strict=True))


def context_parallel(comm: str, settings: dict[str, Any], ours: bool) -> dict[str, float]:
    """Each rank has a quarter from the front of the sequence and one from its end."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    full, expected = alone(settings)
    start(context_parallel_size=2)
    attention: Any = TEDotProductAttention
    attention.cp_stream = "no stream on a CPU"  # otherwise Megatron creates a CUDA stream
    rank = dist.get_rank()
    part = gpt({**settings, "context_parallel_size": 2, "cp_comm_type": comm}, ours)
    load(part, {}, full, rank)
    contents = torch.arange(megatron_cases.LENGTH).view(4, -1)[[rank, 3 - rank]].flatten()
    actual = losses(part, held=contents)
    actual.sum().backward()
    return differences(
        part, full, actual, expected[:, contents], rank, {}, lambda name, parameter: True
    )


def tensor_parallel(sequence_parallel: bool) -> dict[str, float]:
    """Each rank has half the heads, inner features and vocabulary."""
    full, expected = alone({})
    start(tensor_model_parallel_size=2)
    part = gpt({"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel})
    load(part, {}, full, dist.get_rank())
    actual = losses(part)
    actual.sum().backward()
    return differences(
        part,
        full,
        actual,
        expected,
        dist.get_rank(),
        {},
        lambda name, parameter: (
            sequence_parallel and getattr(parameter, "sequence_parallel", False)
        ),
    )


def expert_parallel(settings: dict[str, Any]) -> dict[str, float]:
    """Each rank has half the experts and half the batch."""
    full, expected = alone({**EXPERTS, "moe_token_dispatcher_type": "alltoall"})
    start(expert_model_parallel_size=2)
    rank = dist.get_rank()
    part = gpt({**EXPERTS, **settings, "expert_model_parallel_size": 2})
    local = EXPERTS["num_moe_experts"] // 2
    expert = re.compile(r"(?<=experts\.linear_fc[12]\.weight)\d+$")
    names = {
        name: expert.sub(lambda actual: str(int(actual.group()) + rank * local), name)
        for name, _ in part.named_parameters()
    }
    load(part, names, full, rank)
    row = slice(rank, rank + 1)
    actual = losses(part, rows=row)
    actual.sum().backward()
    result = differences(
        part,
        full,
        actual,
        expected[row],
        rank,
        names,
        lambda name, parameter: expert.search(name) is None,
    )
    with torch.no_grad():
        for parameter in (*full.parameters(), *part.parameters()):
            parameter -= 0.02 * parameter.grad
        difference = (losses(part, rows=row) - losses(full)[row]).abs().max()
    assert (losses(part, rows=row) - actual).abs().max() > 0.1  # the step changed the losses
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return {**result, "losses after a step": float(difference)}


def pipeline_parallel() -> dict[str, float]:
    """Each rank has one layer; Megatron's schedule runs two micro-batches with one row each."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    full, expected = alone({})
    start(pipeline_model_parallel_size=2)
    rank = dist.get_rank()
    part = gpt({"pipeline_model_parallel_size": 2}, first=rank == 0, last=rank == 1)
    part.model_type = full.model_type
    layers = re.compile(r"(?<=decoder\.layers\.)0(?=\.)")
    names = {name: layers.sub(str(rank), name) for name, _ in part.named_parameters()}
    load(part, names, full, rank)
    results: list[torch.Tensor] = []

    def step(data: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        row = next(data)
        output = losses(model, rows=slice(row, row + 1))

        def total(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            results.append(output.detach())
            return output.sum() * 2, {}  # the schedule divides by the number of micro-batches

        return output, total

    with OnTheCPU():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(range(2)),
            model=part,
            num_microbatches=2,
            seq_length=megatron_cases.LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
    outputs = torch.cat(results) if results else expected[:0]
    return differences(
        part, full, outputs, expected[: outputs.shape[0]], 0, names, lambda name, parameter: False
    )


CASES: dict[str, Callable[[], dict[str, float]]] = {
    "context p2p": functools.partial(context_parallel, "p2p", {}, False),
    "context all_gather": functools.partial(
        context_parallel, "all_gather", megatron_cases.LLAMA, False
    ),
    "context a2a": functools.partial(context_parallel, "a2a", megatron_cases.LLAMA, False),
    "context p2p, own attention": functools.partial(
        context_parallel, "p2p", megatron_cases.LLAMA, True
    ),
    "experts allgather": functools.partial(
        expert_parallel, {"moe_token_dispatcher_type": "allgather"}
    ),
    "experts alltoall": functools.partial(
        expert_parallel, {"moe_token_dispatcher_type": "alltoall"}
    ),
    "experts ncclep": functools.partial(expert_parallel, NCCL_EP),
    "tensor": functools.partial(tensor_parallel, False),
    "tensor and sequence": functools.partial(tensor_parallel, True),
    "pipeline": pipeline_parallel,
}


def main() -> None:
    warnings.simplefilter("ignore")
    said, sys.stdout = sys.stdout, io.StringIO()  # Megatron prints
    # Megatron would compile some of its small functions, which takes longer than all cases. TORCHDYNAMO_DISABLE is
    # read when torch._dynamo is imported, before this process is forked.
    torch._dynamo.config.disable = True
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.pipeline_parallel  # noqa: F401

    gc.freeze()
    # importing takes longer than all cases, so one process imports for both ranks
    other = os.fork()
    dist.init_process_group("gloo", rank=0 if other else 1, world_size=2)
    replace_cuda_functions()
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            results[name] = case()
        except Exception:
            results[name] = traceback.format_exc()
            print(results[name], file=sys.stderr)
            break  # the ranks now differ in their next collective
    said_by_the_first(said, results)
    if other:
        os.waitpid(other, 0)


if __name__ == "__main__":
    main()
