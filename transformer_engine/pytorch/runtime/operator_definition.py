"""torch operator definitions that importing the package again replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import get_library_allowing_overwrite


def define_operator(
    namespace: str,
    schema: str,
    devices: str,
    eager: Callable[..., Any],
    results: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Define namespace::schema, or replace the definition of an earlier import, as `torch.library.custom_op` does.

    Torch keeps an operator for the life of the process. The modules that define it may be imported again, after a
    caller has removed them from `sys.modules`; the operator then runs the functions of the new modules.

    Args:
        namespace: Operator namespace.
        schema: Name, arguments and results of the operator.
        devices: Device type or dispatch key of the implementation; "default" for every device.
        eager: The implementation.
        results: Allocates tensors with the shapes and dtypes that `eager` returns, without computing them.
        tags: Tags besides `pt2_compliant_tag`.

    Returns:
        The operator, with all its overloads.
    """
    name = schema[: schema.index("(")]
    qualified = f"{namespace}::{name}"
    library = get_library_allowing_overwrite(namespace, name)
    torch.library.define(
        qualified, schema[len(name) :], lib=library, tags=(torch.Tag.pt2_compliant_tag, *tags)
    )
    torch.library.impl(qualified, devices, eager, lib=library)
    torch.library.register_fake(qualified, results, lib=library)
    return getattr(getattr(torch.ops, namespace), name)
