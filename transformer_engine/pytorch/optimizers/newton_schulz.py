"""Newton-Schulz iterations: the orthogonal factor of a matrix, on one device or over the ranks of a group.

One iteration with coefficients (a, b, c) is X <- a X + (b A + c A^2) X with A = X X^T, an odd polynomial in
the singular values of X. Repeated iterations move all singular values towards 1. The optimizer Muon applies
them to momenta (https://kellerjordan.github.io/posts/muon/). The original computes the products with
cuSolverMp; here they are PyTorch's products, and the Gram matrix is summed over the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...common.checks import check_option, suggests_keywords, whole
from ..constants import dist_group_type
from ..distributed.collectives import gather_along_first_dim, rank, world_size
from ..runtime.autograd import disable_autocast, matrix_product
from ..runtime.checks import group_or_none, tensor

__all__ = [
    "CoeffIterMode",
    "CoeffT",
    "CusolverMpCtx",
    "NSCoeffT",
    "get_coefficient_iterator",
    "get_coefficients",
    "newton_schulz",
    "newton_schulz_tp",
]

CoeffT = tuple[float, float, float]
NSCoeffT = Literal["simple", "quintic", "polar_express", "cans", "aol"]
CoeffIterMode = Literal["cycle", "repeat_last"]

# The original's CoeffT sets, by name. Iterations beyond the end of a set repeat it, or its last
# member for the sets that converge to a fixed polynomial.
_SETS: dict[str, tuple[CoeffT, ...]] = {
    # Muon, https://kellerjordan.github.io/posts/muon/: the largest slope at 0 with results in about [0.7, 1.2].
    "simple": ((3.4445, -4.7750, 2.0315),),
    # Five polynomials, fitted together.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # The Polar Express (arXiv:2505.16932), minimax polynomials for singular values in [1e-3, 1]. All but the last are
    # divided by 1.01^degree: rounding moves singular values above 1, where the unscaled polynomials diverge.
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # arXiv:2506.10935.
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # arXiv:2208.03160.
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
_REPEAT_LAST = frozenset({"polar_express", "cans"})


def get_coefficient_iterator(
    steps: int, coefficient_sets: Sequence[CoeffT], mode: str = "cycle"
) -> Iterator[CoeffT]:
    """Return the coefficients (a, b, c) for each iteration.

    Args:
        steps: Iteration count.
        coefficient_sets: CoeffT for the first iterations.
        mode: "cycle" starts again after the last set, "repeat_last" repeats the last one.

    Raises:
        ValueError: The sets are empty, or the mode is unknown.
    """
    whole("steps", steps)
    check_option("mode", mode, ("cycle", "repeat_last"))
    if not coefficient_sets:
        raise ValueError("coefficient_sets is empty; give at least one (a, b, c)")
    if mode == "cycle":
        return itertools.islice(itertools.cycle(coefficient_sets), steps)
    return itertools.islice(
        itertools.chain(coefficient_sets, itertools.repeat(coefficient_sets[-1])), steps
    )


def get_coefficients(steps: int, coefficient_type: str = "quintic") -> list[CoeffT]:
    """Return the coefficients of a named polynomial for a number of iterations.

    Args:
        steps: Iteration count.
        coefficient_type: "simple", "quintic", "polar_express", "cans" or "aol".

    Raises:
        ValueError: The name is unknown.
    """
    check_option("coefficient_type", coefficient_type, tuple(_SETS))
    mode = "repeat_last" if coefficient_type in _REPEAT_LAST else "cycle"
    return list(get_coefficient_iterator(steps, _SETS[coefficient_type], mode))


class CusolverMpCtx:
    """The group over which the columns of a matrix are sharded, named like the original's library handle.

    Args:
        group: Process group with any backend; None for one device.
    """

    @suggests_keywords
    def __init__(self, group: dist_group_type | None = None) -> None:
        group_or_none("group", group)
        self._group = group
        self._destroyed = False
        self.nranks = 1 if group is None else world_size(group)
        self.rank = 0 if group is None else rank(group)

    @property
    def group(self) -> dist_group_type | None:
        """The group; RuntimeError after `destroy`."""
        if self._destroyed:
            raise RuntimeError("the CusolverMpCtx was destroyed; create another one for this call")
        return self._group

    def destroy(self) -> None:
        """Release the context; it may not be used afterwards. Further calls have no effect."""
        self._destroyed = True
        self._group = None


@suggests_keywords
@disable_autocast
def newton_schulz(
    x: Tensor,
    ctx: CusolverMpCtx | None = None,
    num_iterations: int = 5,
    coefficients: Sequence[Any] | None = None,
) -> Tensor:
    """Replace a matrix [M, N] by its approximate orthogonal factor, in place.

    Singular values must be at most about 1, so divide the matrix by its Frobenius norm before the
    call. Every rank in the group holds a column shard and makes the same call. Products are in the
    dtype of `x`; the sums of the group and the update are float32.

    Args:
        x: Matrix [M, N], or the shard [M, N / ranks] of its columns, float32 or bfloat16, contiguous.
        ctx: Group whose ranks hold the other columns; None for a whole matrix.
        num_iterations: Iteration count.
        coefficients: (a, b, c) for each iteration, as triples or as 3 * num_iterations numbers; by
            default `get_coefficients(num_iterations)`.

    Returns:
        `x`.

    Raises:
        ValueError: The matrix or the coefficients have another shape, dtype or layout, or a sharded matrix has more
            rows than columns.
        RuntimeError: The context was destroyed.
    """
    _check_matrix(x, num_iterations)
    steps = _check_coefficients(coefficients, num_iterations)
    group = None if ctx is None else ctx.group
    if ctx is not None and group is not None and x.shape[0] > x.shape[1] * ctx.nranks:
        raise ValueError(
            f"the whole matrix is [{x.shape[0]}, {x.shape[1] * ctx.nranks}], with more rows than columns, and its "
            "columns are sharded; call newton_schulz_tp, which transposes it"
        )
    with torch.no_grad():
        # Without a group the smaller Gram matrix is used: (b A + c A^2) X = X (b B + c B^2), B = X^T X.
        wide = group is not None or x.shape[0] <= x.shape[1]
        matrix = x if wide else x.t().contiguous()
        for a, b, c in steps:
            gram = matrix_product(matrix, matrix.t()).float()
            if group is not None:
                torch.distributed.all_reduce(gram, group=group)
            gram = gram.to(matrix.dtype)
            polynomial = torch.addmm(b * gram.float(), gram.float(), gram.float(), alpha=c)
            update = matrix_product(polynomial.to(matrix.dtype), matrix)
            matrix = (a * matrix.float() + update.float()).to(matrix.dtype)
        x.copy_(matrix if wide else matrix.t())
    return x


@suggests_keywords
def newton_schulz_tp(
    x: Tensor,
    ctx: CusolverMpCtx | None,
    num_iterations: int = 5,
    coefficients: Sequence[Any] | None = None,
    partition_dim: int | None = None,
    tp_mode: str = "duplicated",
) -> None:
    """Replace a matrix that tensor-parallel ranks hold by its approximate orthogonal factor, in place.

    Args:
        x: The whole matrix, equal on every rank, or this rank's shard along `partition_dim`; see `newton_schulz`.
        ctx: Group of the ranks; None for one device.
        num_iterations: Iteration count.
        coefficients: See `newton_schulz`.
        partition_dim: Dimension that is sharded over the ranks, 0 or 1; None: x is the whole matrix.
        tp_mode: With `partition_dim`: "duplicated" gathers the matrix, so that each rank computes a
            longer-dimension shard; "distributed" computes on the given shards.

    Raises:
        ValueError: The longer dimension does not divide by the ranks, `partition_dim` is not the longer dimension in
            mode "distributed", or another argument does not fit.
        RuntimeError: The context was destroyed.
    """
    _check_matrix(x, num_iterations)
    _check_coefficients(coefficients, num_iterations)
    ctx = CusolverMpCtx() if ctx is None else ctx
    group = ctx.group
    settings = (num_iterations, coefficients)
    with torch.no_grad():
        if partition_dim is None:
            _orthogonalize_whole(x, ctx, *settings)
            return
        if partition_dim not in (0, 1):
            raise ValueError(f"partition_dim={partition_dim!r}; give 0, 1 or None")
        if tp_mode not in ("duplicated", "distributed"):
            raise ValueError(f'tp_mode={tp_mode!r}; give "duplicated" or "distributed"')
        if tp_mode == "distributed":
            shape = [*x.shape]
            shape[partition_dim] *= ctx.nranks
            if shape[partition_dim] < shape[1 - partition_dim]:
                raise ValueError(
                    f"the whole matrix is {shape}, whose dimension {partition_dim} is the shorter one; shard the longer"
                    ' dimension, or give tp_mode="duplicated"'
                )
            shard = x if partition_dim == 1 else x.t().contiguous()
            newton_schulz(shard, ctx, *settings)
            x.copy_(shard if partition_dim == 1 else shard.t())
            return
        along = x if partition_dim == 0 else x.t().contiguous()
        gathered = along if group is None else gather_along_first_dim(along, group)[0]
        whole_matrix = gathered.clone() if partition_dim == 0 else gathered.t().contiguous()
        _orthogonalize_whole(whole_matrix, ctx, *settings)
        x.copy_(whole_matrix.chunk(ctx.nranks, partition_dim)[ctx.rank])


def _orthogonalize_whole(
    x: Tensor, ctx: CusolverMpCtx, num_iterations: int, coefficients: Sequence[Any] | None
) -> None:
    """Orthogonalize a matrix that all ranks hold; each rank computes a longer-dimension shard."""
    wide = x if x.shape[0] <= x.shape[1] else x.t().contiguous()
    if wide.shape[1] % ctx.nranks:
        raise ValueError(
            f"the longer dimension {wide.shape[1]} of x {list(x.shape)} is not divisible by the {ctx.nranks} ranks; "
            "pad it"
        )
    shard = wide.chunk(ctx.nranks, 1)[ctx.rank].contiguous()
    newton_schulz(shard, ctx, num_iterations, coefficients)
    columns = shard.t().contiguous()
    gathered = columns if ctx.group is None else gather_along_first_dim(columns, ctx.group)[0]
    x.copy_(gathered.t() if x.shape[0] <= x.shape[1] else gathered)


def _check_matrix(x: Tensor, num_iterations: int) -> None:
    tensor("x", x)
    whole("num_iterations", num_iterations)
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16) or not x.is_contiguous():
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)}{'' if x.is_contiguous() else ', not contiguous'}; give a contiguous "
            "float32 or bfloat16 matrix [M, N]"
        )


def _check_coefficients(coefficients: Sequence[Any] | None, num_iterations: int) -> list[CoeffT]:
    """Return (a, b, c) for each iteration; raise ValueError for another coefficient count."""
    if coefficients is None:
        return get_coefficients(num_iterations)
    numbers: list[float] = []
    for entry in coefficients:
        numbers += [
            float(number) for number in (entry if isinstance(entry, (tuple, list)) else (entry,))
        ]
    if len(numbers) != 3 * num_iterations:
        raise ValueError(
            f"coefficients has {len(numbers)} numbers; give three for each of num_iterations={num_iterations}"
        )
    return [(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]
