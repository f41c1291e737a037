"""Quantized tensor views that share no codes: decoded copies, to which a write raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from ...common.numbers import with_article
from .promotion import decoding_dtype, read_arguments, writes


@dataclass(frozen=True, slots=True)
class _Whole:
    """The quantized tensor behind cut views, as it was when the views were taken.

    Attributes:
        name: Class and shape, for errors.
        decode: Function that returns all values in a dtype.
        like: The decoded values in the nominal dtype, on the meta device: their shape, strides and offset.
    """

    name: str
    decode: Callable[[torch.dtype], Tensor]
    like: Tensor

    def part(self, view: Tensor, dtype: torch.dtype) -> Tensor:
        """A view of the decoded values in another dtype, rounded once."""
        like = self.like
        values = self.decode(dtype)
        if values.stride() != like.stride():
            values = torch.empty_strided(
                like.shape, like.stride(), dtype=dtype, device=values.device
            ).copy_(values)
        offset = view.storage_offset() - like.storage_offset() + values.storage_offset()
        return values.as_strided(view.shape, view.stride(), offset)


class CutView(Tensor):
    """Decoded copy of a quantized tensor part that cannot be a view of its codes; a write to it raises.

    Rows that cut a scale block, columns, a transpose or a single element have no codes and scales,
    so that indexing returns a copy. Results of operations are plain tensors, except views.

    The copy has the nominal dtype. Operations that read it in another dtype decode the tensor's codes again, so that
    master weights in float32 receive every bit.
    """

    _whole: _Whole
    _plain: Tensor  # the same memory as a plain tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        return self._plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_MEMORY:
            args = tree_map(lambda leaf: leaf._plain if isinstance(leaf, CutView) else leaf, args)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if writes(argument):
                target = args[position] if position < len(args) else kwargs.get(argument.name)
                for leaf in tree_iter(target):
                    _check_not_written(func, leaf)
        plain_args, plain_kwargs = read_arguments(func, args, kwargs, read)
        result = func(*plain_args, **plain_kwargs)
        if not func.is_view:
            return result
        return tree_map(lambda leaf: _mark_cut(leaf, args[0]._whole), result)


# Methods that hand out the memory, which torch implements for plain tensors only.
_OF_MEMORY = frozenset(
    {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.share_memory_}
)


def _check_not_written(func: Any, target: Any) -> None:
    if isinstance(target, CutView):
        raise NotImplementedError(
            f"{func} writes to {list(target.shape)} of {target._whole.name}, which it would not reach: they are not "
            "whole rows of codes and scales, but a copy of their values. Change rows that end where blocks do, or "
            "dequantize the tensor, change that, and copy_ it back"
        )


def read(leaf: Any, dtype: torch.dtype | None) -> Any:
    """Values of a cut view in a dtype, rounded once; any other object is returned unchanged."""
    if not isinstance(leaf, CutView):
        return leaf
    source = leaf._whole
    # A view in another dtype reads the bytes of the copy.
    if dtype is None or dtype == leaf.dtype or leaf.dtype != source.like.dtype:
        return leaf._plain
    return source.part(leaf, decoding_dtype(dtype))


def _mark_cut(values: Tensor, source: _Whole) -> CutView:
    view = Tensor._make_subclass(CutView, values)
    view._whole, view._plain = source, values
    return view


def cut_view(result: Any, values: Tensor, tensor: Any) -> Any:
    """Mark view operation results on a tensor's decoded values as CutView.

    torch.compile does not see the subclass. Values that share the payload's memory are written directly.
    """
    if torch.compiler.is_compiling():
        return result
    payload = [getattr(tensor, name) for name in tensor.TENSORS]
    if any(
        part is not None and part.untyped_storage()._cdata == values.untyped_storage()._cdata
        for part in payload
    ):
        return result
    # The copy does not follow later writes to the tensor, and neither do reads in other dtypes.
    storage = tensor.mapped(lambda part: part.clone(memory_format=torch.preserve_format))
    source = _Whole(
        f"{with_article(type(tensor))} {list(tensor.shape)}", storage.decode, values.to("meta")
    )
    return tree_map(lambda leaf: _mark_cut(leaf, source) if type(leaf) is Tensor else leaf, result)
