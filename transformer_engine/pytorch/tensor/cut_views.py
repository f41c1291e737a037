"""Views of quantized tensors that share no codes: decoded copies, to which a write raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from ...common.numbers import with_article


class CutView(Tensor):
    """A decoded copy of a part of a quantized tensor that is not a view of its codes; a write to it raises.

    Rows that cut a block of one scale, columns, a transpose or a single element have no codes and scales, so that
    indexing returns a copy. torch counts the writes to a tensor and its views, and the count is compared after each
    function that has one as an argument. Results are plain tensors, except views of the same memory.
    """

    _cut_of: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
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
                        "would not reach: they are not whole rows of codes and scales, but a copy of their values. "
                        "Change rows that end where blocks do, or dequantize the tensor, change that, and copy_ it back"
                    )
            memory = {view.untyped_storage()._cdata: view._cut_of for view in cut}

            def mark(leaf: Any) -> Any:
                """Mark results that share memory with an argument."""
                if type(leaf) is not Tensor:
                    return leaf
                of = memory.get(leaf.untyped_storage()._cdata)
                return leaf if of is None else _marked(leaf, of)

            return tree_map(mark, result) if memory else result


def _marked(values: Tensor, of: str) -> Tensor:
    cut = values.as_subclass(CutView)
    cut._cut_of = of
    return cut


def cut_view(result: Any, values: Tensor, tensor: Any) -> Any:
    """Mark the results of a view operation on a tensor's decoded values as CutView where a write is possible.

    Autograd itself rejects a write to a view of a tensor that requires a gradient, and torch.compile does not see the
    subclass. Values that share the payload's memory are written directly.
    """
    if torch.compiler.is_compiling() or (tensor.requires_grad and torch.is_grad_enabled()):
        return result
    payload = [getattr(tensor, name) for name in tensor.TENSORS]
    if any(
        part is not None and part.untyped_storage()._cdata == values.untyped_storage()._cdata
        for part in payload
    ):
        return result
    of = f"{with_article(type(tensor))} {list(tensor.shape)}"
    return tree_map(lambda leaf: _marked(leaf, of) if type(leaf) is Tensor else leaf, result)
