"""Layouts of queries, keys and values by name: "sbhd_sb2hd" means q [s, b, h, d] and k, v in one [s, b, 2, g, d]."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .enums import NVTE_QKV_Format, NVTE_QKV_Layout


@dataclass(frozen=True)
class Layout:
    """One layout for queries, keys and values.

    Backends read sbhd, bshd or thd. Other layouts are converted by views. A bhsd tensor is viewed as bshd. Keys and
    values are viewed in the queries' axis order; pages, and keys and values for packed queries, as bshd.

    Attributes:
        name: Layout name.
        q_format: Query format for backends.
        kv_format: Key and value format for backends.
        interleaved: How many among the three tensors share a buffer: 3, 2 (keys and values) or 0.
        axis: Tensor axis in the buffer, from the end.
        paged: Whether keys and values are in pages.
        transposed: Whether the layout is bhsd.
        turned: Whether keys and values have their first two axes exchanged.
    """

    name: str
    q_format: str
    kv_format: str
    interleaved: int = 0
    axis: int = -3
    paged: bool = False
    transposed: bool = False
    turned: bool = False

    @staticmethod
    @functools.cache
    def of(qkv_layout: NVTE_QKV_Layout | int) -> Layout:
        """Look up the layout for an enumeration member or its number."""
        name = NVTE_QKV_Layout(qkv_layout).name.removeprefix("NVTE_").lower()
        parts = name.removeprefix("paged_kv_").split("_")
        q_format, kv_format = (
            "".join(c for c in part if c.isalpha()) for part in (parts[0], parts[-1])
        )
        packed = next((digit for digit in "32" if digit in parts[-1]), "0")
        paged, transposed = name.startswith("paged"), q_format == "bhsd"
        if transposed:
            q_format = kv_format = "bshd"
        axes_order = (
            kv_format if kv_format == "thd" else "bshd" if paged or q_format == "thd" else q_format
        )
        return Layout(
            name,
            q_format,
            axes_order,
            interleaved=int(packed),
            axis=-2 if "h" + packed in parts[-1] else -3,
            paged=paged,
            transposed=transposed,
            turned=axes_order != kv_format,
        )

    def queries(self, x: Tensor) -> Tensor:
        """Return x in q_format."""
        return x.transpose(1, 2) if self.transposed else x

    def as_queries(self, x: Tensor) -> Tensor:
        """Convert x from q_format to the layout's query format."""
        return x.transpose(1, 2) if self.transposed else x

    def keys(self, x: Tensor) -> Tensor:
        """Return x in kv_format; pages are [page, token, g, d]."""
        if self.turned:
            return x.transpose(0, 1)
        return x.transpose(1, 2) if self.transposed else x

    def packed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert q, k, v from q_format and kv_format to the layout's format; shared buffers stay shared."""
        if self.interleaved == 3:
            q, k, v = torch.stack((q, k, v), dim=self.axis).unbind(self.axis)
        elif self.interleaved == 2:
            k, v = torch.stack((k, v), dim=self.axis).unbind(self.axis)
        if self.turned:
            return q, k.transpose(0, 1), v.transpose(0, 1)
        if not self.transposed:
            return q, k, v
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def reorder_axes(x: Tensor, source: str, target: str, name: str) -> Tensor:
    """Permute x's axes.

    Args:
        x: Tensor whose axes are named by `source`.
        source: Axis order, such as "sbhd".
        target: Requested order, with the same axes.
        name: Argument that requested the order, for the message.

    Raises:
        ValueError: The two orders have different axes, as packed sequences ("thd") and padded ones do.
    """
    if source == target:
        return x
    if sorted(source) != sorted(target):
        raise ValueError(
            f"{name}={target!r} has other axes than {source!r}; give an order of the same axes, or None"
        )
    return x.permute([source.index(axis) for axis in target])


def requested_order(
    requested: NVTE_QKV_Format | int | str | None, layout: Layout, name: str
) -> str:
    """Axis order that a format argument requests; None means the queries' order.

    Raises:
        ValueError: `requested` does not name an axis order.
    """
    own = "bhsd" if layout.transposed else layout.q_format
    if requested is None:
        return own
    if not isinstance(requested, str):
        requested = NVTE_QKV_Format(requested).name.removeprefix("NVTE_")
    order = requested.lower()
    if order == "qkv_format_not_set":
        return own
    if order not in ("sbhd", "bshd", "thd", "bhsd"):
        raise ValueError(
            f"{name}={requested!r} is not an order of axes; give 'sbhd', 'bshd', 'bhsd' or 'thd'"
        )
    return order
