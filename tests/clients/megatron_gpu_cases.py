"""Megatron-core as published, on GPUs: `python megatron_gpu_cases.py CASE` prints the case's result as JSON.

Models are trained by Megatron's own schedule, data parallelism and optimizer. Where a process is one of several (RANK,
WORLD_SIZE), every rank runs the case and the first one prints.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from tests.clients.megatron_cases import BF16, LLAMA
from tests.clients.ranked import said_by_the_first

VOCABULARY, LENGTH, BATCH, STEPS = 512, 128, 2, 6
MICROBATCHES = 2

RECIPES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
EXPERTS = {
    **LLAMA,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 256,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp32",
}
FUSED_EXPERTS = {"moe_permute_fusion": True, "moe_router_fusion": True}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "rope_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}


@dataclass(frozen=True)
class Run:
    """A training: settings of the model, its data parallelism, its optimizer and its model parallelism."""

    model: dict[str, Any] = field(default_factory=dict)
    positions: str = "rope"
    distributed: bool = False  # Megatron's distributed optimizer
    reduction: dict[str, Any] = field(default_factory=dict)  # DistributedDataParallelConfig
    optimizer: dict[str, Any] = field(default_factory=dict)  # OptimizerConfig
    parallel: dict[str, Any] = field(default_factory=dict)  # initialize_model_parallel


def start(parallel: dict[str, Any]) -> None:
    rank = int(os.environ.setdefault("RANK", "0"))
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("nccl")
    sys.modules["fused_weight_gradient_mlp_cuda"] = apex()
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    parallel_state.initialize_model_parallel(**parallel)
    copies = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(rank, None, MICROBATCHES * BATCH * copies, BATCH, copies)


def apex() -> types.ModuleType:
    """The module of apex that Megatron's output layer needs to accumulate weight gradients into main_grad."""

    def accumulate(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.addmm_(dy.float().t(), x.float())

    module = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    return module


def config(run: Run) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    common: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "ffn_hidden_size": 512,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        **BF16,
    }
    kind = MLATransformerConfig if "multi_latent_attention" in run.model else TransformerConfig
    sizes = {
        name: run.parallel[name]
        for name in ("tensor_model_parallel_size", "expert_model_parallel_size")
        if name in run.parallel
    }
    return kind(**{**common, **sizes, **run.model})


def gpt(run: Run) -> Any:
    """A seeded two-layer GPT on the layer spec for this engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(7, te_rng_tracker=True, force_reset_rng=True)
    result = config(run)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=result.num_moe_experts,
        moe_grouped_gemm=result.moe_grouped_gemm,
        multi_latent_attention=result.multi_latent_attention,
        use_te_op_fuser=result.use_transformer_engine_op_fuser,
    )
    model = GPTModel(
        config=result,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type=run.positions,
    )
    return Float16Module(result, model.cuda())


class Training:
    """Training steps for a model under Megatron's data parallelism and optimizer."""

    def __init__(self, run: Run):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        inner = gpt(run)
        self.config = inner.config
        reduction = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": run.distributed}
        # As Megatron's training script does: gradient accumulators that DDP's hooks keep live on the stream on which
        # they were made, and a capture cannot take in the default one.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.model = DistributedDataParallel(
                config=self.config,
                ddp_config=DistributedDataParallelConfig(**{**reduction, **run.reduction}),
                module=inner,
            )
        torch.cuda.current_stream().wait_stream(stream)
        settings = {
            "optimizer": "adam",
            "lr": 2e-3,
            "weight_decay": 0.0,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "clip_grad": 1.0,
            "use_distributed_optimizer": run.distributed,
        }
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(**{**settings, **run.optimizer}), [self.model]
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator).cuda()
        positions = torch.arange(LENGTH, device="cuda").expand(BATCH, LENGTH)
        self.batch = (tokens, positions, torch.roll(tokens, -1, 1))

    def forward(
        self, batches: Iterator[Any], model: Any
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens, positions, labels = next(batches)
        output = model(tokens, positions, None, labels=labels)

        def loss(values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = values.float().mean()
            return mean, {"loss": mean.detach().clone()}

        return output, loss

    def step(self) -> torch.Tensor:
        """The loss before one more step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        said = get_forward_backward_func()(
            forward_step_func=self.forward,
            data_iterator=iter([self.batch] * MICROBATCHES),
            model=[self.model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        updated, _, _ = self.optimizer.step()
        assert updated
        return said[0]["loss"]

    def losses(self, steps: int = STEPS) -> list[float]:
        return [value.item() for value in [self.step() for _ in range(steps)]]


def train_model(run: Run) -> list[float]:
    return Training(run).losses()


def gradient_errors(run: Run) -> dict[str, float]:
    """Relative differences, in the Frobenius norm of all parameters, of the gradients of three models' first steps.

    The models have the same parameters: chains of operations (`run`), layers, and layers in bfloat16.
    """
    modules = replace(
        run, model={name: value for name, value in run.model.items() if name not in FUSER}
    )
    quantizing = {name for settings in RECIPES.values() for name in settings}
    plain = {name: value for name, value in modules.model.items() if name not in quantizing}
    results = [_first_gradients(each) for each in (run, modules, replace(modules, model=plain))]
    return {
        "operations against modules": _difference(results[0], results[1]),
        "operations against bfloat16": _difference(results[0], results[2]),
        "modules against bfloat16": _difference(results[1], results[2]),
    }


def _first_gradients(run: Run) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters before the first step, and their gradients."""
    training = Training(run)
    parameters = list(training.model.parameters())  # chains share them with their modules
    before = [parameter.detach().clone() for parameter in parameters]
    training.step()
    return [(value, p.main_grad.clone()) for value, p in zip(before, parameters, strict=True)]


def _difference(first: list[Any], second: list[Any]) -> float:
    """Match parameters by their initial values, those with equal ones by their order."""
    assert len(first) == len(second)
    left = list(second)
    error = norm = 0.0
    for value, gradient in first:
        index = next(
            i
            for i, (other, _) in enumerate(left)
            if other.shape == value.shape and torch.equal(other, value)
        )
        _, expected = left.pop(index)
        error += (gradient - expected).double().square().sum().item()
        norm += expected.double().square().sum().item()
    return (error / norm) ** 0.5


def engine_layers(run: Run) -> dict[str, int]:
    """Number of engine layers in the model, per class."""
    from collections import Counter

    import transformer_engine.pytorch as te

    kinds = (te.Linear, te.LayerNormLinear, te.GroupedLinear, te.DotProductAttention)
    result = Counter(
        kind.__name__ for module in gpt(run).modules() for kind in kinds if isinstance(module, kind)
    )
    return dict(result)


def operations(run: Run) -> dict[str, Any]:
    """Losses, and how many MLPs run as operation chains."""
    import transformer_engine.pytorch as te

    training = Training(run)
    losses = training.losses()
    # Megatron hides the chain from `modules()` in a tuple.
    chains = [getattr(module, "_fused_impl", None) for module in training.model.modules()]
    count = sum(
        isinstance(chain, tuple) and isinstance(chain[0], te.ops.Sequential) for chain in chains
    )
    return {"chains": count, "losses": losses}


def quantized_parameters(run: Run) -> dict[str, Any]:
    """Losses, and the weight classes."""
    training = Training(run)
    kinds = {
        type(parameter.data if type(parameter) is torch.nn.Parameter else parameter).__name__
        for name, parameter in training.model.named_parameters()
        if name.endswith(
            ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
        )
    }
    return {"kinds": sorted(kinds), "losses": training.losses()}


def graphs_of_the_engine(run: Run) -> list[float]:
    """Layers recorded by this engine's make_graphed_callables, after two plain steps."""
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    training = Training(run)
    losses = training.losses(2)
    helper = TECudaGraphHelper(
        [training.model], training.config, LENGTH, BATCH, [training.optimizer]
    )
    helper.create_cudagraphs()
    assert helper.graphs_created()
    return losses + training.losses(STEPS - 2)


def graphs_of_megatron(run: Run) -> list[float]:
    """Layers that Megatron itself records at the end of the first step."""
    from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord

    losses = train_model(run)
    assert _CudagraphGlobalRecord.cudagraph_created
    return losses


def distributed_checkpoint(run: Run) -> dict[str, Any]:
    """Losses without interruption, and from a run that is saved and loaded into a new model."""
    from megatron.core import dist_checkpointing

    first = Training(run)
    first.losses(3)

    def sharded(training: Training) -> dict[str, Any]:
        model = training.model.module.sharded_state_dict()
        return {
            "model": model,
            "optimizer": training.optimizer.sharded_state_dict(
                model, metadata={"distrib_optim_sharding_type": "dp_reshardable"}
            ),
        }

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dist_checkpointing.save(sharded(first), folder[0])
    expected = first.losses(3)
    repeated = Training(run)
    repeated.losses(1)
    loaded = dist_checkpointing.load(sharded(repeated), folder[0])
    repeated.model.module.load_state_dict(loaded["model"])
    repeated.optimizer.load_state_dict(loaded["optimizer"])
    return {"expected": expected, "found": repeated.losses(3)}


def rope_fused(run: Run) -> dict[str, Any]:
    """Logits and gradients of the input embedding with Megatron's and with this engine's rotary embedding."""
    outputs = []
    for fused in (False, True):
        model = gpt(Run(model={**run.model, "apply_rope_fusion": fused}, positions="rope"))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator).cuda()
        positions = torch.arange(LENGTH, device="cuda").expand(BATCH, LENGTH)
        loss = model(tokens, positions, None, labels=torch.roll(tokens, -1, 1)).float().mean()
        loss.backward()
        weight = model.module.embedding.word_embeddings.weight
        outputs.append((loss.item(), weight.grad.float()))
    (plain, grad_plain), (fused, grad_fused) = outputs
    error = (grad_plain - grad_fused).norm() / grad_plain.norm()
    return {"losses": [plain, fused], "gradient": error.item()}


def recipe(name: str, **more: Any) -> dict[str, Any]:
    return {**RECIPES[name], **more}


PARAMETERS = {"fp8_param": True}
FUSER = {"use_transformer_engine_op_fuser": True}
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
GRAPHS = {"cuda_graph_warmup_steps": 2}

# name: (function that computes the result, its run)
CASES: dict[str, tuple[Callable[[Run], Any], Run]] = {
    "layers": (engine_layers, Run(model=EXPERTS)),
    **{f"train {name}": (train_model, Run(model=recipe(name))) for name in RECIPES},
    **{
        f"llama {name}": (train_model, Run(model={**LLAMA, **recipe(name)}))
        for name in ("bfloat16", "delayed")
    },
    **{f"op fuser {name}": (operations, Run(model=recipe(name, **FUSER))) for name in RECIPES},
    **{
        f"op fuser llama {name}": (operations, Run(model={**LLAMA, **recipe(name, **FUSER)}))
        for name in ("bfloat16", "delayed")
    },
    **{
        f"gradients of the op fuser {name}": (gradient_errors, Run(model=recipe(name, **FUSER)))
        for name in RECIPES
    },
    **{
        f"gradients of the op fuser llama {name}": (
            gradient_errors,
            Run(model={**LLAMA, **recipe(name, **FUSER)}),
        )
        for name in ("bfloat16", "delayed")
    },
    "recompute bfloat16": (train_model, Run(model=recipe("bfloat16", **FULL_RECOMPUTE))),
    "recompute delayed": (train_model, Run(model=recipe("delayed", **FULL_RECOMPUTE))),
    "cross entropy": (
        train_model,
        Run(model={"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}),
    ),
    "rope fusion": (rope_fused, Run()),
    **{
        f"distributed {name}": (train_model, Run(model=recipe(name), distributed=True))
        for name in ("bfloat16", "delayed")
    },
    "overlapped": (
        train_model,
        Run(
            distributed=True,
            reduction={"overlap_grad_reduce": True, "overlap_param_gather": True},
            optimizer={"overlap_param_gather": True},
        ),
    ),
    "precision-aware": (
        train_model,
        Run(
            distributed=True,
            optimizer={
                "use_precision_aware_optimizer": True,
                "main_grads_dtype": torch.bfloat16,
                "exp_avg_dtype": torch.bfloat16,
                "exp_avg_sq_dtype": torch.bfloat16,
            },
            reduction={"grad_reduce_in_fp32": False},
        ),
    ),
    "fused accumulation": (
        train_model,
        Run(model={"gradient_accumulation_fusion": True}, distributed=True),
    ),
    **{
        f"parameters {name}": (
            quantized_parameters,
            Run(
                model=recipe(name, **PARAMETERS),
                distributed=True,
                reduction={"fp8_param_gather": True},
                optimizer={"fp8_recipe": name},
            ),
        )
        for name in ("delayed", "tensorwise", "blockwise")
    },
    **{
        f"graphs of the engine {name}": (
            graphs_of_the_engine,
            Run(model=recipe(name, cuda_graph_impl="transformer_engine", **GRAPHS)),
        )
        for name in ("bfloat16", "delayed", "tensorwise", "blockwise")
    },
    **{
        f"graphs of megatron {name}": (
            graphs_of_megatron,
            Run(model=recipe(name, cuda_graph_impl="local", **GRAPHS)),
        )
        for name in ("bfloat16", "delayed", "tensorwise", "blockwise")
    },
    "experts plain": (train_model, Run(model=EXPERTS)),
    **{
        f"experts {name}": (train_model, Run(model={**EXPERTS, **FUSED_EXPERTS, **recipe(name)}))
        for name in ("bfloat16", "delayed", "tensorwise", "blockwise")
    },
    **{
        f"latent {name}": (train_model, Run(model={**LATENT, **recipe(name)}))
        for name in ("bfloat16", "delayed")
    },
    "checkpoint": (distributed_checkpoint, Run(model=recipe("delayed"), distributed=True)),
    **{
        f"two tensor-parallel {name}": (
            train_model,
            Run(
                model=recipe(name, sequence_parallel=True),
                parallel={"tensor_model_parallel_size": 2},
            ),
        )
        for name in ("bfloat16", "delayed", "blockwise")
    },
    "two data-parallel parameters": (
        quantized_parameters,
        Run(
            model=recipe("delayed", **PARAMETERS),
            distributed=True,
            reduction={"fp8_param_gather": True},
        ),
    ),
    "two expert-parallel": (
        train_model,
        Run(
            model={**EXPERTS, **FUSED_EXPERTS, **recipe("delayed")},
            parallel={"expert_model_parallel_size": 2},
        ),
    ),
    "two data-parallel checkpoint": (
        distributed_checkpoint,
        Run(model=recipe("delayed"), distributed=True),
    ),
}


def main(name: str) -> None:
    warnings.simplefilter("ignore")
    said, sys.stdout = sys.stdout, io.StringIO()  # Megatron prints
    case, run = CASES[name]
    start(run.parallel)
    result = case(run)
    torch.cuda.synchronize()
    said_by_the_first(said, result)


if __name__ == "__main__":
    main(sys.argv[1])
