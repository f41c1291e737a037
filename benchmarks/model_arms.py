"""Llama-like language models in bfloat16, each from the layers of one library, for `models.py` and `model_step.py`.

An arm is "LIBRARY:PRECISION". The arms of `te` use whichever Transformer Engine is first on the path. `OPT_INS` are
arms "te:PRECISION+OPTION" with options that are off by default.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

BF16 = torch.bfloat16
EPSILON = 1e-5
MARK = "models:"  # prefix for profiler ranges that begin a part of a step
ARMS = (
    *("te:bf16", "te:delayed", "te:current", "te:block"),
    *("pt:bf16", "pt:tensorwise", "pt:rowwise"),
    "liger:bf16",
)
OPT_INS = tuple(f"te:current+{option}" for option in ("columns", "cached", "loss", "head"))


@dataclass(frozen=True)
class Size:
    """Model shape, and sequences per step."""

    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    vocabulary: int
    batch: int
    length: int

    @property
    def head(self) -> int:
        """Features per attention head."""
        return self.hidden // self.heads


SIZES = {
    "57M": Size(8, 768, 2048, 12, 12, 256, batch=32, length=512),
    "1B": Size(16, 2048, 8192, 32, 8, 32768, batch=4, length=4096),
    "8Bx4": Size(4, 4096, 14336, 32, 8, 32768, batch=2, length=4096),
    "tiny": Size(2, 64, 128, 2, 1, 128, batch=2, length=32),
}


class LanguageModel(nn.Module):
    """Mean next-token cross entropy: embedding, layers, norm and a bfloat16 head; subclasses choose the layers.

    With `traced`, each part of a step begins with a profiler range, in the forward and the backward pass.
    """

    layers: nn.ModuleList

    def __init__(self, size: Size, device: str) -> None:
        super().__init__()
        self.size, self.traced = size, False
        self.embedding = nn.Embedding(size.vocabulary, size.hidden, device=device, dtype=BF16)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False, device=device, dtype=BF16)

    def run_layers(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self._boundary("embedding", "layers", self.embedding(tokens))
        x = self._boundary("layers", "head", self.run_layers(x))
        return self.loss(x, targets)

    def mark(self, part: str) -> None:
        """Mark the following launches as a part of the step."""
        if self.traced:
            with record_function(MARK + part):
                pass

    def _boundary(self, before: str, after: str, x: Tensor) -> Tensor:
        self.mark(after)
        if self.traced:
            x.register_hook(lambda gradient: self.mark(before))
        return x


class EngineModel(LanguageModel):
    """`TransformerLayer` and `parallel_cross_entropy` of Transformer Engine.

    | option | meaning |
    | --- | --- |
    | `columns` | the backward pass casts all weights and norm outputs along columns |
    | `cached` | as `columns`, and the activation input is saved in FP8 |
    | `loss` | `fused_linear_cross_entropy`, which stores no logits |
    | `head` | the head computes under the recipe |
    """

    def __init__(self, size: Size, precision: str, device: str) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes
        from transformer_engine.pytorch.attention import RotaryPositionEmbedding

        super().__init__(size, device)
        precision, _, self.option = precision.partition("+")
        choices: dict[str, Callable[[], Any]] = {
            "bf16": lambda: None,
            "delayed": recipes.DelayedScaling,
            "current": recipes.Float8CurrentScaling,
            "block": recipes.Float8BlockScaling,
        }
        self.engine, self.recipe = te, choices[precision]()
        self.layers = nn.ModuleList(self._layer(device) for _ in range(size.layers))
        if self.option == "cached":
            for layer in self.layers:
                layer.layernorm_mlp.cache_quantized_activation_input = True
        if self.option == "head":
            self.head = te.Linear(
                size.hidden, size.vocabulary, bias=False, params_dtype=BF16, device=device
            )
        self.norm = te.RMSNorm(size.hidden, eps=EPSILON, dtype=BF16, device=device)
        self.angles = RotaryPositionEmbedding(size.head)(max_seq_len=size.length).to(device)

    def _layer(self, device: str) -> nn.Module:
        size = self.size
        return self.engine.TransformerLayer(
            size.hidden,
            size.inner,
            size.heads,
            num_gqa_groups=size.groups,
            bias=False,
            activation="swiglu",
            normalization="RMSNorm",
            layernorm_epsilon=EPSILON,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            fuse_qkv_params=True,
            attn_input_format="bshd",
            self_attn_mask_type="causal",
            params_dtype=BF16,
            device=device,
        )

    def run_layers(self, x: Tensor) -> Tensor:
        with self._autocast(), self._columns():
            for layer in self.layers:
                x = layer(x, rotary_pos_emb=self.angles)
        return x

    def _autocast(self) -> AbstractContextManager[Any]:
        return self.engine.autocast(enabled=self.recipe is not None, recipe=self.recipe)

    def _columns(self) -> AbstractContextManager[Any]:
        if self.option not in ("columns", "cached"):
            return nullcontext()
        return self.engine.use_backend(weight_columns="recomputed", norm_columns="recomputed")

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if self.option == "loss":
            return self.engine.fused_linear_cross_entropy(self.norm(x), self.head.weight, targets)
        loss = self.engine.parallel_cross_entropy
        # The gradient of this engine's loss overwrites the logits; another release may lack the option.
        in_place = (
            {"overwrite_input": True} if "overwrite_input" in signature(loss).parameters else {}
        )
        with self._autocast() if self.option == "head" else nullcontext():
            logits = self.head(self.norm(x))
        return loss(logits, targets, 0.0, False, None, **in_place).mean()


class RMSNorm(nn.Module):
    """torch's own RMSNorm with a bfloat16 weight."""

    def __init__(self, hidden: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPSILON)


class TorchLayer(nn.Module):
    """Pre-norm transformer layer with rotary, grouped-query, causal attention and SwiGLU, in torch operations."""

    def __init__(self, size: Size, device: str, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.size = size
        self.norm1, self.norm2 = norm(), norm()
        self.qkv = _linear(size.hidden, (size.heads + 2 * size.groups) * size.head, device)
        self.out = _linear(size.hidden, size.hidden, device)
        self.up = _linear(size.hidden, 2 * size.inner, device)
        self.down = _linear(size.inner, size.hidden, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute the layer for x [batch, length, hidden] and angles [1, length, 1, head]."""
        size = self.size
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, size.head))
        query, key, value = qkv.split((size.heads, size.groups, size.groups), 2)
        query, key = self.rotate(query, key, cos, sin)
        attended = F.scaled_dot_product_attention(
            query, key, value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.activate(self.norm2(x)))

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate [batch, length, heads, head]; returns [batch, heads, length, head]."""
        return _rotate(query, cos, sin).transpose(1, 2), _rotate(key, cos, sin).transpose(1, 2)

    def activate(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return F.silu(gate) * up


class LigerLayer(TorchLayer):
    """`TorchLayer` with Liger's kernels for norms, rotary positions and SwiGLU, which reads separate gate and up."""

    def __init__(self, size: Size, device: str, norm: Callable[[], nn.Module]) -> None:
        super().__init__(size, device, norm)
        self.up = _linear(size.hidden, size.inner, device)
        self.gate = _linear(size.hidden, size.inner, device)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.rope import LigerRopeFunction

        transposed = (query.transpose(1, 2), key.transpose(1, 2))
        return LigerRopeFunction.apply(*transposed, cos[:, :, 0], sin[:, :, 0])

    def activate(self, x: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply(self.gate(x), self.up(x))


class TorchModel(LanguageModel):
    """Plain torch layers, each compiled; "tensorwise" and "rowwise" are recipes in torchao's float8 training."""

    layer_class: type[TorchLayer] = TorchLayer

    def __init__(self, size: Size, precision: str, device: str, compiled: bool) -> None:
        super().__init__(size, device)
        self.layers = nn.ModuleList(
            self.layer_class(size, device, lambda: self.make_norm(device))
            for _ in range(size.layers)
        )
        self.norm = self.make_norm(device)
        self.cos, self.sin = _angles(size, device)
        if precision != "bf16":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(
                self.layers, config=Float8LinearConfig.from_recipe_name(precision)
            )
        self.head_loss = self._head_loss
        if compiled:
            for layer in self.layers:
                layer.compile(fullgraph=True)
            self.head_loss = torch.compile(self._head_loss)

    def make_norm(self, device: str) -> nn.Module:
        return RMSNorm(self.size.hidden, device)

    def run_layers(self, x: Tensor) -> Tensor:
        with _cudnn_attention(x):
            for layer in self.layers:
                x = layer(x, self.cos, self.sin)
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.head_loss(x, targets)

    def _head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class LigerModel(TorchModel):
    """Layers with Liger's kernels, and Liger's loss, which computes the head's logits in chunks."""

    layer_class = LigerLayer

    def make_norm(self, device: str) -> nn.Module:
        from liger_kernel.transformers import LigerRMSNorm

        return LigerRMSNorm(self.size.hidden, EPSILON).to(device, BF16)

    def _head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        return loss(self.head.weight, self.norm(x).flatten(0, 1), targets.flatten())


def make_model(arm: str, size: Size, device: str, compiled: bool = True) -> LanguageModel:
    """Build an arm's model; the weights depend on torch's seed.

    Args:
        arm: One of `ARMS` or `OPT_INS`.
        size: Model shape.
        device: Parameter device.
        compiled: Compile the `pt` layers; False runs them eagerly.

    Raises:
        ValueError: The arm is unknown.
    """
    if arm not in (*ARMS, *OPT_INS):
        raise ValueError(f"arm {arm!r} is unknown; choose from {', '.join((*ARMS, *OPT_INS))}")
    library, precision = arm.split(":")
    if library == "te":
        return EngineModel(size, precision, device)
    if library == "liger":
        return LigerModel(size, precision, device, compiled=False)
    return TorchModel(size, precision, device, compiled)


def _linear(inputs: int, outputs: int, device: str) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device=device, dtype=BF16)


def _angles(size: Size, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine [1, length, 1, head] for the rotary positions."""
    frequencies = 1e4 ** -(torch.arange(0, size.head, 2, device=device).float() / size.head)
    angles = torch.outer(torch.arange(size.length, device=device).float(), frequencies).repeat(1, 2)
    return angles.cos().to(BF16)[None, :, None], angles.sin().to(BF16)[None, :, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _cudnn_attention(x: Tensor) -> AbstractContextManager[Any]:
    """Prefer cuDNN's attention over torch's FlashAttention; on a CPU torch chooses."""
    if x.device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)
