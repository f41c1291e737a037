"""Values of a part of a quantized tensor that is no view of its codes: to be read; a write would be lost, and raises.

Rows that cut a block of one scale, columns, a transpose or a single element have no codes and scales of their own. What
indexing gives is then a decoded copy, in which a write would end. The copy says so itself: torch counts the writes to a
tensor and to all its views, and the count is compared after each function that is called with one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map


class CutView(Tensor):
    """The copy. Whatever is computed of it is an ordinary tensor, whatever lies in its memory another CutView."""

    _cut_of: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As an ordinary tensor: what is loaded from a file is a part of nothing."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cut = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, CutView)]
        with torch._C.DisableTorchFunctionSubclass():
            before = [view._version for view in cut]
            result = func(*args, **kwargs)
            for view, version in zip(cut, before, strict=True):
                if view._version != version:
                    raise NotImplementedError(
                        f"{getattr(func, '__name__', func)} writes to {list(view.shape)} of {view._cut_of}, which it "
                        "would not reach: they are no whole rows of codes and scales, but a copy of their values. "
                        "Change rows that end where blocks do, or dequantize the tensor, change that, and copy_ it back"
                    )
            memory = {view.untyped_storage()._cdata: view._cut_of for view in cut}
            return tree_map(lambda leaf: _of_memory(leaf, memory), result)


def _of_memory(leaf: Any, memory: dict[int, str]) -> Any:
    if type(leaf) is not Tensor or not memory:
        return leaf
    of = memory.get(leaf.untyped_storage()._cdata)
    return leaf if of is None else _marked(leaf, of)


def _marked(values: Tensor, of: str) -> Tensor:
    cut = values.as_subclass(CutView)
    cut._cut_of = of
    return cut


def cut_view(result: Any, values: Tensor, tensor: Any) -> Any:
    """What a view operation has made of a tensor's decoded values: a CutView, or several, where it could be written.

    Autograd itself refuses a write to a view of what needs a gradient, and a compiler sees no subclass. Values that are
    the payload itself are written as they are.
    """
    if torch.compiler.is_compiling() or (tensor.requires_grad and torch.is_grad_enabled()):
        return result
    payload = [getattr(tensor, name) for name in tensor.TENSORS]
    if any(
        part is not None and part.untyped_storage()._cdata == values.untyped_storage()._cdata
        for part in payload
    ):
        return result
    of = f"a {type(tensor).__name__} {list(tensor.shape)}"
    return tree_map(lambda leaf: _marked(leaf, of) if type(leaf) is Tensor else leaf, result)
