"""A grouped product as a loop over the groups, one `gemm` call per group: any format, any device.

It needs every group's row count on the host, and waits for the device if it does not know them.
"""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Backend
from ..gemm import Epilogue, gemm
from .pieces import iterate_operands
from .request import GroupedGemmRequest, GroupedProduct


def run(product: GroupedProduct) -> None:
    if product.clears:
        assert isinstance(product.out, Tensor)
        product.out[sum(product.groups.read_rows) :].zero_()
    biases = [None] * product.groups.count if product.bias is None else product.bias.unbind(0)
    for bias, (_, a, b, out) in zip(biases, iterate_operands(product), strict=True):
        epilogue = Epilogue(
            out.dtype, bias=bias, out=out, accumulate=product.accumulate, exact=product.exact
        )
        gemm(a, b, epilogue)


BACKEND: Backend[GroupedGemmRequest] = Backend("reference", bind=lambda request: run)
