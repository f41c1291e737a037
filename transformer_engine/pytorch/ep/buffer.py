"""EpBuffer: settings and routing for one dispatch in flight, and `ep_prepare`, which exchanges the routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described, whole, whole_or_none
from ...common.numbers import with_article
from ...common.recipe import Recipe
from ..distributed.expert_parallel import ExpertRouting, gather_choices, route
from ..quantization.family import find_family
from ..runtime.checks import integers, values_dtype
from ..runtime.device import canonical_device
from ..runtime.tracing import run_eagerly
from ..runtime.warn_once import warn_once
from ..tensor.quantizer import Quantizer
from .settings import current_settings


class EpBuffer:
    """Settings and routing for one dispatch in flight.

    A forward pass that dispatches several times before it combines needs one buffer for each dispatch. After
    `ep_combine` the buffer can be used again: the backward pass keeps the routing that it needs.

    Args:
        top_k: Experts per token, k.
        max_tokens_per_rank: Most tokens on a rank, the same on all ranks.
        hidden_dim: Token width, H.
        num_local_experts: Expert count on this rank.
        recv_capacity_per_rank: Receive buffer rows; None for the capacity in `ep_bootstrap`. Has no
            effect in eager mode.
        alignment: The rows of each expert are padded with zeros to a multiple of this power of two;
            0 and 1 mean no padding.
        payload_dtype: Has no effect; the received rows have the dtype of the tokens.
        device: Device for the counts before the first `ep_prepare`.
        dispatch_fwd_quant_recipe: Recipe whose format for inputs quantizes the tokens before they
            are sent. Codes and scales travel, and `ep_dispatch` returns a quantized tensor. Rows in
            the format must have their own scales: MXFP8BlockScaling, or Float8BlockScaling.
        combine_bwd_quant_recipe: The same for the gradient of `ep_combine`, in the gradient format;
            it is dequantized after it has been received.

    Attributes:
        handle_mem: Routing from the last `ep_prepare` or `ep_dispatch`, uint8.
        tokens_per_expert: Rows per local expert, including padding, int64 [num_local_experts].
        total_recv_tokens: Rows that this rank needs, including padding and dropped rows, int64 [1]. On the CPU in
            eager mode.

    Raises:
        RuntimeError: `ep_bootstrap` was not called.
        ValueError: A number is invalid, or num_local_experts differs from `ep_bootstrap`.
        NotImplementedError: Rows in a recipe's format share a scale, so that they cannot travel separately.
    """

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        recv_capacity_per_rank: int | None = None,
        alignment: int = 0,
        payload_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        dispatch_fwd_quant_recipe: Recipe | None = None,
        combine_bwd_quant_recipe: Recipe | None = None,
    ):
        settings = current_settings()
        if settings is None:
            raise RuntimeError(
                "EpBuffer requires the placement of experts; call ep_bootstrap first"
            )
        whole("top_k", top_k)
        whole("max_tokens_per_rank", max_tokens_per_rank)
        whole("hidden_dim", hidden_dim)
        whole("num_local_experts", num_local_experts)
        whole_or_none("recv_capacity_per_rank", recv_capacity_per_rank)
        whole("alignment", alignment, 0)
        values_dtype("payload_dtype", payload_dtype)
        if alignment & (alignment - 1):
            raise ValueError(f"alignment={alignment} is not 0 or a power of two; pass 1, 2, 4, ..")
        if num_local_experts != settings.placement.local_experts:
            raise ValueError(
                f"num_local_experts={num_local_experts}; ep_bootstrap placed {settings.placement.num_experts} experts "
                f"on {settings.placement.size} ranks; pass {settings.placement.local_experts}"
            )
        self.top_k, self.hidden_dim, self.num_local_experts = top_k, hidden_dim, num_local_experts
        self.max_tokens_per_rank, self.alignment, self.payload_dtype = (
            max_tokens_per_rank,
            alignment,
            payload_dtype,
        )
        self.device = canonical_device(device, "device")
        self.placement, self.drop_on_overflow = settings.placement, settings.drop
        self.recv_capacity_per_rank = recv_capacity_per_rank or settings.capacity
        if settings.capacity is None and recv_capacity_per_rank is not None:
            self.recv_capacity_per_rank = None
            warn_once(
                "EpBuffer(recv_capacity_per_rank=) in eager mode",
                f"recv_capacity_per_rank={recv_capacity_per_rank} has no effect without that of ep_bootstrap: the "
                "receive buffer has as many rows as needed; pass it to ep_bootstrap too",
            )
        self._dispatch_quantizer = _quantizer(
            "dispatch_fwd_quant_recipe", dispatch_fwd_quant_recipe, "forward", hidden_dim
        )
        self._gradient_quantizer = _quantizer(
            "combine_bwd_quant_recipe", combine_bwd_quant_recipe, "backward", hidden_dim
        )
        self._routing: ExpertRouting | None = None
        self.handle_mem: Tensor = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.tokens_per_expert: Tensor = torch.zeros(
            num_local_experts, dtype=torch.int64, device=self.device
        )
        on_host = self.recv_capacity_per_rank is None
        device = "cpu" if on_host else self.device
        self.total_recv_tokens: Tensor = torch.zeros(1, dtype=torch.int64, device=device)

    def _store(self, routing: ExpertRouting) -> None:
        """Replace the routing and the public tensors that describe it."""
        self._routing = routing
        self.handle_mem = torch.cat((routing.sent.map, routing.received.map)).view(torch.uint8)
        self.tokens_per_expert, self.total_recv_tokens = routing.tokens_per_expert, routing.total


def _quantizer(name: str, recipe: Recipe | None, mode: str, width: int) -> Quantizer | None:
    """Return the rowwise quantizer for inputs (mode "forward") or gradients ("backward"); None without a recipe."""
    if recipe is None:
        return None
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{name}={described(recipe)} is {with_article(type(recipe))}; pass a recipe, or None"
        )
    make = find_family(recipe).quantizer
    slot = "input" if mode == "forward" else "grad_output"
    quantizer = None if make is None else make(recipe, mode, slot, canonical_device())
    if quantizer is not None:
        reason = quantizer.unsupported_shape_reason((1, width), True, False)
        if reason is not None:
            raise ValueError(f"hidden_dim={width} does not fit {name}: {reason}")
        quantizer.set_usage(rowwise=True, columnwise=False)
        row: Any = quantizer.make_empty((1, width), dtype=torch.float32, device="cpu")
        if row.format.block is not None and row.format.block[0] == 1 and row.format.levels is None:
            return quantizer
    raise NotImplementedError(
        f"{name}: rows of {type(recipe).__name__} share a scale, so that they cannot travel to different ranks; pass "
        "MXFP8BlockScaling, Float8BlockScaling with blocks of one row, or None"
    )


@run_eagerly(
    "expert parallelism exchanges tokens between ranks, in numbers that are read on the host"
)
def ep_prepare(buffer: EpBuffer, topk_idx: Tensor) -> Tensor:
    """Exchange the routing of all ranks and store it in the buffer; `ep_dispatch` does the same first.

    Args:
        buffer: Dispatch buffer.
        topk_idx: Experts of this rank's tokens, int32 or int64 [T, k]. An index outside [0, num_experts) sends nothing.

    Returns:
        tokens_per_expert, int64 [num_local_experts]: rows per local expert, including padding and
        without rows beyond the capacity.

    Raises:
        TypeError: An argument has another type.
        ValueError: topk_idx has another shape, or the arguments of another rank are invalid. Then
            every rank raises an error.
        RuntimeError: Rows do not fit into the receive buffer and drop_on_overflow is False. Every rank raises it.
    """
    check_buffer(buffer)
    exchange_routing(buffer, topk_idx, lambda: None)
    return buffer.tokens_per_expert


def check_buffer(buffer: EpBuffer) -> None:
    if not isinstance(buffer, EpBuffer):
        raise TypeError(
            f"buffer={described(buffer)} is {with_article(type(buffer))}; pass an EpBuffer"
        )


def exchange_routing(
    buffer: EpBuffer, topk_idx: Tensor, check: Callable[[], None]
) -> ExpertRouting:
    """Check the arguments, gather the choices of all ranks and store the routing.

    `check` raises an error for further invalid caller arguments.
    """
    device = topk_idx.device if isinstance(topk_idx, Tensor) else buffer.device
    eager = buffer.recv_capacity_per_rank is None
    if eager and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the eager mode of expert parallelism waits for the device, which a graph capture does not allow; pass "
            "recv_capacity_per_rank to ep_bootstrap"
        )
    sizes = (buffer.max_tokens_per_rank, buffer.top_k, buffer.placement, device)
    try:
        integers("topk_idx", topk_idx)
        if topk_idx.dim() < 2 or topk_idx.shape[-1] != buffer.top_k:
            raise ValueError(
                f"topk_idx is {list(topk_idx.shape)}; pass the experts of each token, [T, {buffer.top_k}]"
            )
        tokens = topk_idx.numel() // buffer.top_k
        if tokens > buffer.max_tokens_per_rank:
            raise ValueError(
                f"topk_idx has {tokens} tokens; max_tokens_per_rank={buffer.max_tokens_per_rank} of the EpBuffer is "
                "the limit, increase it on all ranks"
            )
        check()
    except (TypeError, ValueError, NotImplementedError):
        gather_choices(None, *sizes)  # the other ranks wait for this rank's choices
        raise
    choices = topk_idx.detach().reshape(-1, buffer.top_k)
    gathered = gather_choices(choices, *sizes)
    routing = route(
        gathered,
        choices.shape[0],
        buffer.top_k,
        buffer.placement,
        max(1, buffer.alignment),
        buffer.recv_capacity_per_rank,
        buffer.drop_on_overflow,
    )
    buffer._store(routing)
    return routing
