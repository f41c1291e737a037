"""Megatron-core as published, on a CPU.

Prints {case: result} as JSON, where the result of a case that raises is its traceback. Importing Megatron changes
torch, and its models write environment variables, so everything runs in a separate process.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import os
import queue
import re
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.clients import forked_examples, megatron_dynamic
from tests.support import pages

VOCABULARY, LENGTH, BATCH = 96, 32, 2
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
}
TRAINED: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": BF16,
    "delayed": {**BF16, "fp8": "hybrid", "fp8_recipe": "delayed"},
    "tensorwise": {**BF16, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {**BF16, "fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {**BF16, "fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {**BF16, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
    "fp8_parameters": {**BF16, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True},
    "llama": LLAMA,
    "qk_layernorm": {"qk_layernorm": True, "normalization": "RMSNorm"},
    "op_fuser": {"use_transformer_engine_op_fuser": True},
    "op_fuser_llama": {**LLAMA, "use_transformer_engine_op_fuser": True},
    "op_fuser_fp8": {
        **BF16,
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "use_transformer_engine_op_fuser": True,
    },
    "cross_entropy": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def start() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(use_te_rng_tracker=True)


def config(**settings: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    common: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**common, **settings})


def model(settings: dict[str, Any], ours: bool = False) -> Any:
    """A GPT on the layer spec for this engine; ours: with our SelfAttention in Megatron's place."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(0)
    result = config(**settings)
    spec = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=result.qk_layernorm, use_te_op_fuser=result.use_transformer_engine_op_fuser
    )
    if ours:
        from transformer_engine.pytorch.integrations.megatron import SelfAttention

        spec = copy.deepcopy(spec)
        spec.submodules.self_attention.module = SelfAttention
    gpt = GPTModel(
        config=result,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="learned_absolute",
    )
    return Float16Module(result, gpt) if result.bf16 else gpt


def batch() -> tuple[Any, ...]:
    tokens = torch.randint(
        0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    return tokens, torch.arange(LENGTH).expand(BATCH, LENGTH), None


def model_loss(gpt: Any) -> torch.Tensor:
    tokens, positions, mask = batch()
    return gpt(tokens, positions, mask, labels=torch.roll(tokens, -1, 1)).float().mean()


def train_model(
    gpt: Any, make_optimizer: Callable[..., Any] = torch.optim.AdamW, steps: int = 3
) -> list[float]:
    optimizer = make_optimizer(gpt.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        gpt.set_is_first_microbatch()
        loss = model_loss(gpt)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# Flags in Megatron's files that depend on this engine. Other flags are about apex, flashinfer and similar packages.
FLAG = re.compile(
    r"^\s*((?:HAVE_TE|HAVE_GTP|HAVE_FUSED_QKV|USING_TE|USING_PYTORCH|HAVE_APEX_OR_TE)\w*)\s*=",
    re.MULTILINE,
)


def flags() -> dict[str, bool]:
    """Every flag of Megatron's files that depends on the engine, and the names that it sets to None instead."""
    import megatron.core
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.transformer.moe import moe_utils

    root = Path(megatron.core.__path__[0])
    results: dict[str, bool] = {}
    for file in sorted(root.rglob("*.py")):
        names = set(FLAG.findall(file.read_text()))
        if not names:
            continue
        position = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(f"megatron.core.{position}")
        for name in sorted(names):
            if hasattr(module, name):  # some are a function's own
                results[f"{position} {name}"] = bool(getattr(module, name)) != name.startswith(
                    "USING_PYTORCH"
                )
    optional = (
        "SplitAlongDim",
        "fused_permute",
        "fused_permute_with_probs",
        "fused_permute_and_pad_with_probs",
        "fused_unpermute",
        "fused_sort_chunks_by_index",
        "fused_topk_with_score_function",
        "te_parallel_cross_entropy",
        "Fp8Padding",
        "get_cpu_offload_context",
    )
    return {
        **results,
        **{name: getattr(extension, name) is not None for name in optional},
        "te_general_gemm": moe_utils.te_general_gemm is not None,
    }


def fused_adam() -> list[float]:
    import transformer_engine.pytorch as te

    return train_model(model({}), te.optimizers.FusedAdam)


def count_recomputations() -> bool:
    """Gradients with and without recomputation under delayed scaling, bit for bit."""
    grads = []
    for settings in (TRAINED["delayed"], {**TRAINED["delayed"], **RECOMPUTED}):
        gpt = model(settings)
        for _ in range(2):
            gpt.zero_grad()
            model_loss(gpt).backward()
        grads.append([parameter.grad for parameter in gpt.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def own_attention(settings: dict[str, Any]) -> dict[str, float]:
    """Greatest differences of logits and gradients between Megatron's SelfAttention and ours, with the same weights."""
    reference, ours = model(settings), model(settings, ours=True)
    ours.load_state_dict(reference.state_dict())
    logits = [gpt(*batch()) for gpt in (reference, ours)]
    for gpt in (reference, ours):
        model_loss(gpt).backward()
    pairs = zip(reference.parameters(), ours.parameters(), strict=True)
    return {
        "logits": (logits[0] - logits[1]).abs().max().item(),
        "gradients": max((a.grad - b.grad).abs().max().item() for a, b in pairs),
    }


def t5(ours: bool) -> Any:
    """An encoder and a decoder of two layers; ours: with our self- and cross-attention in Megatron's place."""
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    from transformer_engine.pytorch.integrations.megatron import CrossAttention, SelfAttention

    torch.manual_seed(0)
    result = config()
    encoder = copy.deepcopy(t5_spec.get_t5_encoder_with_transformer_engine_block_spec(2))
    decoder = copy.deepcopy(t5_spec.get_t5_decoder_with_transformer_engine_block_spec(2))
    for spec in (*encoder.layer_specs, *decoder.layer_specs) if ours else ():
        spec.submodules.self_attention.module = SelfAttention
    for spec in decoder.layer_specs if ours else ():
        spec.submodules.cross_attention.module = CrossAttention
    return T5Model(
        result,
        result,
        encoder,
        decoder,
        VOCABULARY,
        LENGTH,
        position_embedding_type="learned_absolute",
    )


def own_cross_attention() -> dict[str, float]:
    """Largest loss and gradient differences on padded batches, with the same weights."""
    reference, ours = t5(False), t5(True)
    ours.load_state_dict(reference.state_dict())
    source, target = batch()[0][:, :12], batch()[0][:, 12:21]
    padded, full = (torch.zeros(BATCH, 1, 1, length, dtype=torch.bool) for length in (12, 9))
    padded[1, ..., 8:] = True
    labels = torch.roll(target, -1, 1)
    losses = [
        t(source, target, padded, None, (full, padded), lm_labels=labels) for t in (reference, ours)
    ]
    for loss in losses:
        loss.float().mean().backward()
    pairs = [
        (a.grad, b.grad) for a, b in zip(reference.parameters(), ours.parameters(), strict=True)
    ]
    return {
        "logits": (losses[0] - losses[1]).abs().max().item(),
        "gradients": max((a - b).abs().max().item() for a, b in pairs if a is not None),
    }


def own_generation() -> float:
    """Largest logit difference between step-by-step generation in Megatron's static context and one call."""
    from megatron.core.inference.contexts import StaticInferenceContext

    gpt = model({}, ours=True).eval()
    tokens, positions, mask = batch()
    with torch.no_grad():
        whole = gpt(tokens, positions, mask)
        context = StaticInferenceContext(BATCH, LENGTH)
        parts = []
        for begin, end in ((0, 20), (20, 21), (21, 22), (22, LENGTH)):
            part = gpt(
                tokens[:, begin:end],
                positions[:, begin:end],
                mask,
                inference_context=context,
                runtime_gather_output=True,
            )
            parts.append(part[:, -1])
            context.sequence_len_offset = end
    last = whole[:, [19, 20, 21, LENGTH - 1]]
    return (torch.stack(parts, 1) - last).abs().max().item()


def own_dynamic_generation() -> float:
    """Largest logit difference in Megatron's dynamic context: three paged requests, different lengths."""
    tokens, *_ = batch()
    prompts = [tokens[0, :7], tokens[1, :3], tokens[0, :11]]
    return megatron_dynamic.worst_difference(model(LLAMA, ours=True).eval(), prompts)


def extra_states() -> dict[str, bool]:
    """Extra states that were saved after Megatron replaced torch's loader of storages are loaded again."""
    gpt = model(TRAINED["delayed"])
    train_model(gpt, steps=1)
    state = gpt.state_dict()
    saved = [
        value for key, value in state.items() if key.endswith("_extra_state") and value is not None
    ]
    names = any(b"safe_load_from_bytes" in bytes(value.numpy()) for value in saved if value.numel())
    fresh = model(TRAINED["delayed"])
    fresh.load_state_dict(state)
    gpt.set_is_first_microbatch()
    return {"named": names, "same": abs(model_loss(gpt).item() - model_loss(fresh).item()) < 1e-6}


def distributed_checkpoint() -> bool:
    """Whether a model continues without a difference after it is saved and loaded as a sharded checkpoint."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    gpt = model(TRAINED["delayed"])
    train_model(gpt, steps=2)
    fresh = model(TRAINED["delayed"])
    model_loss(fresh).backward()
    # Otherwise Megatron spawns a process that holds a queue, and that process imports torch.
    filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportAttributeAccessIssue]
    with tempfile.TemporaryDirectory() as folder:
        # Megatron asks for both on a CPU, too.
        torch.cuda.synchronize, torch.cuda.current_device = (
            (lambda device=None: None),
            (lambda: "cpu"),
        )
        dist_checkpointing.save(gpt.module.sharded_state_dict(), folder)
        loaded = dist_checkpointing.load(fresh.module.sharded_state_dict(), folder)
    fresh.module.load_state_dict(loaded)
    return all(torch.equal(a, b) for a, b in zip(gpt.parameters(), fresh.parameters(), strict=True))


def permutation() -> dict[str, float]:
    """Greatest differences between this engine's permutation of tokens and back and Megatron's torch code."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    torch.manual_seed(0)
    routing = torch.zeros(16, 4, dtype=torch.bool)
    routing.scatter_(1, torch.rand(16, 4).topk(2, dim=1).indices, True)
    probs = torch.rand(16, 4) * routing
    outputs = []
    for fused in (False, True):
        tokens = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
        weights = probs.clone().requires_grad_()
        out, permuted_probs, order, *_ = permute(
            tokens, routing, probs=weights, num_out_tokens=32, fused=fused
        )
        back = unpermute(
            out * permuted_probs.unsqueeze(-1),
            order,
            tokens.shape,
            routing_map=routing,
            fused=fused,
        )
        back.square().sum().backward()
        outputs.append((out, back, tokens.grad, weights.grad))
    names = ("out", "back", "tokens", "probabilities")
    return {name: (a - b).abs().max().item() for name, a, b in zip(names, *outputs, strict=True)}


def router() -> dict[str, float]:
    """Fused top-k routing probabilities and gradients against Megatron's own."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    differences = {}
    for function, bias in (("softmax", None), ("sigmoid", torch.linspace(-0.1, 0.1, 8))):
        outputs = []
        for fused in (False, True):
            logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
            probs, routing = topk_routing_with_score_function(
                logits, 2, score_function=function, expert_bias=bias, fused=fused
            )
            (probs * torch.linspace(0, 1, 8)).sum().backward()
            outputs.append((probs, routing.float(), logits.grad))
        for name, a, b in zip(("probabilities", "map", "gradient"), *outputs, strict=True):
            differences[f"{function} {name}"] = (a - b).abs().max().item()
    return differences


def example_of_the_page() -> str:
    """Run the example in a forked process, for which Megatron is already imported; return its errors."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model  # noqa: F401

    (example,) = pages.examples("megatron.md", "python-clients")
    with tempfile.TemporaryDirectory() as folder:
        return forked_examples.run_examples(folder, [("docs/megatron.md", example, None)])


def public_attributes() -> list[str]:
    """Model layers that have an attribute which Megatron's data parallelism empties."""
    return [type(m).__name__ for m in model({}).modules() if hasattr(m, "weight_tensor")]


CASES: dict[str, Callable[[], Any]] = {
    "flags": flags,
    **{
        f"train {name}": lambda settings=settings: train_model(model(settings))
        for name, settings in TRAINED.items()
    },
    "fused_adam": fused_adam,
    "recomputed": count_recomputations,
    **{
        f"own attention {name}": lambda settings=TRAINED[name]: own_attention(settings)
        for name in ("float32", "llama", "qk_layernorm")
    },
    "own attention of a T5": own_cross_attention,
    "own generation": own_generation,
    "own dynamic generation": own_dynamic_generation,
    "extra_states": extra_states,
    "distributed_checkpoint": distributed_checkpoint,
    "permutation": permutation,
    "router": router,
    "public_attributes": public_attributes,
}


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    said, sys.stdout = sys.stdout, io.StringIO()  # Megatron prints
    results: dict[str, Any] = {}
    if not names:
        results["example"] = {"errors": example_of_the_page()}
    start()
    for name, case in CASES.items():
        if names and name not in names:
            continue
        try:
            results[name] = case()
        except Exception:
            results[name] = traceback.format_exc()
    dist.destroy_process_group()
    said.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
