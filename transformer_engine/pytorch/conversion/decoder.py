"""logits [b, s, vocabulary] = head(norm(layers(embedding(tokens [b, s])))): a causal TransformerLayer stack."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...common.checks import described, number, whole
from ..attention import InferenceParams, RotaryPositionEmbedding
from ..module.layernorm import LayerNorm
from ..module.layernorm_linear import LayerNormLinear
from ..module.linear import Linear
from ..module.rmsnorm import RMSNorm
from ..quantization.resizable_state import CheckedLoading
from ..runtime.device import canonical_device
from ..transformer import TransformerLayer
from .decoder_config import DecoderConfig, RotaryConfig

_NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


class Decoder(CheckedLoading):
    """A causal language model without dropout, described by a `DecoderConfig`.

    Matrix products of the layers follow the active recipe. Embedding, last norm and head keep the parameters' dtype.

    Args:
        config: Sizes and options.
        device: Parameter device.
        dtype: Parameter dtype.
        init_method: `init_method(weight)` fills each weight.
        source: The checkpoint that the model was converted from, `{"family": .., "config": ..}`, which `convert` reads.
    """

    def __init__(
        self,
        config: DecoderConfig,
        device: torch.device | str | int = "cuda",
        dtype: torch.dtype = torch.float32,
        init_method: Callable[[Tensor], Any] | None = None,
        source: dict[str, Any] | None = None,
    ):
        super().__init__()
        factory_kwargs: dict[str, Any] = {"device": canonical_device(device), "dtype": dtype}
        fill = init_method or (lambda weight: nn.init.normal_(weight, std=0.02))
        self.config, self.source = config, source
        self.embedding_scale = torch.tensor(
            config.embedding_scale, dtype=dtype, device="cpu"
        ).item()
        self.embedding = _embedding(config.vocabulary, config.hidden, fill, factory_kwargs)
        self.rotary = self.position_embedding = None
        if config.rotary is None:
            self.position_embedding = _embedding(
                config.positions, config.hidden, fill, factory_kwargs
            )
        else:
            self.rotary = _rotary(config.rotary, config.head_size, factory_kwargs["device"])
        self.layers = nn.ModuleList(
            _layer(config, number, fill, factory_kwargs) for number in range(1, config.layers + 1)
        )
        self.norm = _NORMS[config.norm](
            config.hidden,
            eps=config.epsilon,
            zero_centered_gamma=config.zero_centered,
            **factory_kwargs,
        )
        self.head = None
        if not config.tied:
            self.head = nn.Linear(config.hidden, config.vocabulary, bias=False, device="meta")
            self.head.weight = nn.Parameter(
                torch.empty(config.vocabulary, config.hidden, **factory_kwargs)
            )
            fill(self.head.weight)

    def forward(self, tokens: Tensor, cache: InferenceParams | None = None) -> Tensor:
        """Return the logits [b, s, vocabulary].

        Args:
            tokens: Token ids [b, s].
            cache: Cache whose tokens precede the given ones, after `pre_step`; None for whole sequences.
        """
        return F.linear(self.features(tokens, cache), self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head [vocabulary, hidden]; the embedding's if they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def features(self, tokens: Tensor, cache: InferenceParams | None = None) -> Tensor:
        """Return the normalized output of the last layer [b, s, hidden], from which the head computes logits.

        Args:
            tokens: Token ids [b, s].
            cache: As in `forward`.
        """
        hidden = self.embedding(tokens)
        angles = None
        if self.rotary is not None:
            angles = self.rotary(tokens.shape[1] if cache is None else cache.max_sequence_length)
        if self.position_embedding is not None:
            length = tokens.shape[1]
            if cache is None and length > self.config.positions:
                raise ValueError(
                    f"{length} tokens exceed the {self.config.positions} positions that have an embedding; give fewer"
                )
            positions = torch.arange(length, device=tokens.device)
            if cache is not None:
                positions = cache.get_seqlens_pre_step()[:, None] + positions
            hidden = hidden + self.position_embedding(positions)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        for layer in self.layers:
            hidden = layer(hidden, rotary_pos_emb=angles, inference_params=cache)
        return self.norm(hidden)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy for targets [b, s], in nats per token, in float32."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        cached: bool = True,
    ) -> Tensor:
        """Return tokens [b, p + count]: prompt [b, p], continued by draws from softmax(logits / temperature).

        temperature 0 takes the most likely token; cached=False recomputes the whole sequence for every token.
        """
        if not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.shape[1] == 0:
            raise ValueError(
                f"prompt={described(prompt)} is not a tensor [batch, tokens]; give at least one token"
            )
        whole("count", count)
        number("temperature", temperature)
        if temperature < 0:
            raise ValueError(f"temperature={temperature} is below 0; 0 takes the most likely token")
        total = prompt.shape[1] + count
        if total > self.config.positions:
            raise ValueError(
                f"{prompt.shape[1]} + {count} tokens exceed the model's {self.config.positions} positions; "
                "ask for fewer"
            )
        training = self.training
        self.eval()
        try:
            generator = torch.Generator(device="cpu").manual_seed(seed)
            cache = self._cache(prompt, count) if cached else None
            tokens = fresh = prompt
            for _ in range(count):
                if cache is None:
                    logits = self(tokens)
                else:
                    cache.pre_step(OrderedDict((i, fresh.shape[1]) for i in range(prompt.shape[0])))
                    logits = self(fresh, cache)
                logits = logits[:, -1].float().cpu()
                if temperature == 0:
                    drawn = logits.argmax(dim=-1, keepdim=True)
                else:
                    drawn = torch.multinomial(
                        torch.softmax(logits / temperature, -1), 1, generator=generator
                    )
                fresh = drawn.to(prompt)
                tokens = torch.cat([tokens, fresh], dim=1)
            return tokens
        finally:
            self.train(training)

    def _cache(self, prompt: Tensor, count: int) -> InferenceParams:
        weight = self.norm.weight
        return InferenceParams(
            max_batch_size=prompt.shape[0],
            max_sequence_length=prompt.shape[1] + count,
            num_heads_kv=self.config.groups,
            head_dim_k=self.config.head_size,
            dtype=weight.dtype,
            qkv_format="bshd",
            device=weight.device,
        )


def _embedding(
    rows: int, width: int, fill: Callable[[Tensor], Any], factory_kwargs: dict[str, Any]
) -> nn.Embedding:
    embedding = nn.Embedding(rows, width, _weight=torch.empty(rows, width, **factory_kwargs))
    fill(embedding.weight)
    return embedding


def _layer(
    config: DecoderConfig,
    number: int,
    fill: Callable[[Tensor], Any],
    factory_kwargs: dict[str, Any],
) -> TransformerLayer:
    window = config.windows[number - 1]
    precision = {"device": factory_kwargs["device"], "params_dtype": factory_kwargs["dtype"]}
    layer = TransformerLayer(
        config.hidden,
        config.feed_forward,
        config.heads,
        num_gqa_groups=config.groups,
        layernorm_epsilon=config.epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=fill,
        output_layer_init_method=fill,
        layer_number=number,
        kv_channels=config.head_size,
        self_attn_mask_type="causal",
        window_size=None if window is None else (window - 1, 0),
        fuse_qkv_params=True,
        zero_centered_gamma=config.zero_centered,
        bias=config.mlp_bias,
        activation=config.activation,
        normalization=config.norm,
        attn_input_format="bshd",
        qk_norm_type="RMSNorm" if config.qk_norm else None,
        qk_norm_eps=config.epsilon,
        qk_norm_before_rope=True,
        **precision,
    )
    # TransformerLayer has one switch for all biases.
    attention = layer.self_attention
    attended = config.heads * config.head_size
    if config.qkv_bias != config.mlp_bias:
        projection = LayerNormLinear(
            config.hidden,
            attended + 2 * config.groups * config.head_size,
            eps=config.epsilon,
            init_method=fill,
            bias=config.qkv_bias,
            normalization=config.norm,
            zero_centered_gamma=config.zero_centered,
            **precision,
        )
        attention.add_module("layernorm_qkv", projection)
    if config.output_bias != config.mlp_bias:
        attention.proj = Linear(
            attended,
            config.hidden,
            init_method=fill,
            bias=config.output_bias,
            return_bias=True,
            **precision,
        )
    return layer


def _rotary(config: RotaryConfig, size: int, device: torch.device) -> RotaryPositionEmbedding:
    """Build the rotary embedding; checkpoints do not hold its frequencies, which `RotaryConfig` may scale."""
    rotary = RotaryPositionEmbedding(size, rotary_base=config.base)
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequency = 1.0 / (config.base**exponent)
    if config.low is None or config.high is None or config.trained is None:
        frequency = frequency if config.factor == 1.0 else frequency / config.factor
    else:
        turns = config.trained * frequency / (2 * math.pi)
        ramp = ((turns - config.low) / (config.high - config.low)).clamp(0.0, 1.0)
        frequency = (1.0 - ramp) * frequency / config.factor + ramp * frequency
    rotary.register_buffer("inv_freq", frequency.to(device), persistent=False)
    return rotary
