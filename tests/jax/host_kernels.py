"""Kernels sharded over eight host devices, with plain operations in place of their calls.

Prints {case: difference} as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.jax.compiled import array, start_on_host_devices
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, E2M1, E4M3, MXFP8, NVFP4
from transformer_engine.jax import ep
from transformer_engine.jax.primitives import kernels
from transformer_engine.jax.primitives.gemm import block_scales, decoded, reference
from transformer_engine.jax.primitives.kernels import Kernel, call
from transformer_engine.jax.primitives.operand import Operand
from transformer_engine.jax.primitives.partitioning import ShardingRule, extent, named
from transformer_engine.jax.primitives.quantize import QuantizeSpec, quantize, unpack_e2m1
from transformer_engine.jax.primitives.several_axes import OverVmap, SeveralAxes, call_on_axes
from transformer_engine.jax.primitives.softmax import reference as literal_softmax
from transformer_engine.jax.primitives.softmax import triton as softmax

Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Measured(Kernel):
    """x [r, w] -> x * 2, its transpose, max|x| [1]"""

    rule = ShardingRule("r w -> r w, w r, o", maxed=(2,))

    def results(self, x):
        return Shape(x.shape, x.dtype), Shape(x.shape[::-1], x.dtype), Shape((1,), x.dtype)

    def run(self, x):
        return x * 2, x.T * 2, jnp.abs(x).max().reshape(1)


@dataclass(frozen=True)
class Blocks(Kernel):
    """x [m, k] -> the sums of its blocks of 16 columns, [m, k / 16]; shape: of the whole"""

    shape: tuple[int, int]

    @property
    def rule(self):
        k = extent("k", self.shape[1], 16)
        return ShardingRule.from_extents(f"m {k.whole} -> m {k.blocks}", k)

    def results(self, *operands):
        (x,) = operands
        return (Shape((x.shape[0], -(-x.shape[1] // 16)), x.dtype),)

    def run(self, *arrays):
        (x,) = arrays
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % 16)))
        return (x.reshape(x.shape[0], -1, 16).sum(axis=2),)


@dataclass(frozen=True)
class Product(Kernel):
    """a [m, k], b [n, k] -> a @ b.T, summed over parts of k"""

    rule = ShardingRule("m k, n k -> m n", led_by_results=True, summed=(0,))

    def vmap_kernel(self, mapped):
        return OverVmap(self, tuple(mapped)), (True,)

    def results(self, *operands):
        a, b = operands
        return (Shape((a.shape[0], b.shape[0]), a.dtype),)

    def run(self, *arrays):
        a, b = arrays
        return (lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision="highest"),)


@dataclass(frozen=True)
class Rounded(Product):
    """The product as dtype; parts of it are added up before they are rounded."""

    dtype: str = "bfloat16"

    @property
    def in_parts(self):
        return dataclasses.replace(self, dtype="float32")

    def results(self, *operands):
        return tuple(Shape(one.shape, jnp.dtype(self.dtype)) for one in super().results(*operands))

    def run(self, *arrays):
        return tuple(result.astype(self.dtype) for result in super().run(*arrays))


@dataclass(frozen=True)
class Heads(Kernel):
    """q [b, h, s], k [b, g, s] -> q times its k head, and the sum of every k head [b, g]"""

    members: int

    @property
    def rule(self):
        return ShardingRule(
            "b (g r) s, b g s -> b (g r) s, b g", ("r", "s"), {"g": 4, "r": self.members}
        )

    def results(self, *operands):
        q, k = operands
        return Shape(q.shape, q.dtype), Shape(k.shape[:2], k.dtype)

    def run(self, *arrays):
        q, k = arrays
        return q * jnp.repeat(k, self.members, axis=1), k.sum(axis=2)


@dataclass(frozen=True)
class Masked(softmax.SoftmaxForward):
    """The masked softmax in plain operations; a device's shard of the mask must match its shard of the scores."""

    def run(self, x, hidden=None):
        return (literal_softmax.run(x, hidden == 1, None),)


def mask(*shape):
    return array(np.random.default_rng(9).random(shape) < 0.3, jnp.uint8)


GATED = SeveralAxes(Product(), (("m", (4,)), ("n", (2,))))


def random(seed, *shape):
    return array(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def whole(seed, *shape):
    """Numbers whose float32 sums are exact in any order, and whose partial sums bfloat16 rounds."""
    return array(np.random.default_rng(seed).integers(-30, 30, shape), jnp.float32)


def largest(pairs) -> float:
    """The largest difference. NaN is kept, which max() may drop."""
    return float(np.max([np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs]))


CASES = {
    "rows": (Measured(), [random(0, 16, 32)], [("dp",)]),
    "both axes": (Measured(), [random(0, 16, 32)], [("dp", "tp")]),
    "one axis twice": (Measured(), [random(0, 16, 32)], [(("dp", "tp"),)]),
    "blocks": (Blocks((16, 64)), [random(1, 16, 64)], [("dp", "tp")]),
    "blocks that are not full": (Blocks((16, 72)), [random(1, 16, 72)], [("dp", "tp")]),
    "fewer blocks than devices": (Blocks((16, 32)), [random(1, 16, 32)], [(None, "dp")]),
    "blocks that devices do not divide": (Blocks((16, 96)), [random(1, 16, 96)], [("tp", "dp")]),
    "columns": (Product(), [random(2, 16, 32), random(3, 24, 32)], [("dp", None), ("tp", None)]),
    "contraction": (Product(), [random(2, 16, 32), random(3, 24, 32)], [("dp", "tp"), (None, "tp")]),
    "contraction that is rounded": (Rounded(), [whole(2, 16, 32), whole(3, 24, 32)], [(None, "dp"), (None, "dp")]),
    "one of both": (Product(), [random(2, 16, 32), random(3, 24, 32)], [(None, "tp"), (None, None)]),
    "the same axis": (Product(), [random(2, 16, 32), random(3, 24, 32)], [("dp", None), ("dp", None)]),
    "rows and features of two axes": (
        GATED, [random(2, 4, 8, 32), random(3, 2, 24, 32)], [("dp", None, None), (None, "tp", None)],
    ),
    "contraction of two axes": (
        SeveralAxes(Product(), (("k", (4,)),)), [random(2, 16, 4, 8), random(3, 24, 4, 8)],
        [(None, "dp", "tp"), (None, "dp", "tp")],
    ),
    "of all that are mapped": (
        OverVmap(GATED, (True, False)), [random(2, 3, 4, 8, 32), random(3, 2, 24, 32)],
        [(None, "dp", None, None), (None, "tp", None)],
    ),
    "maxima of several axes": (
        SeveralAxes(Measured(), (("r", (4,)), ("w", (2,)))), [random(0, 4, 8, 2, 16)], [("dp", None, None, "tp")],
    ),
    "blocks of several axes": (
        SeveralAxes(Blocks((16, 64)), (("m", (4,)), ("k", (2,)))), [random(1, 4, 4, 2, 32)], [("dp", None, None, "tp")],
    ),
    "a mask": (Masked("b m1 q k"), [random(6, 4, 2, 4, 8), mask(4, 1, 4, 8)], [("dp", "tp"), ("dp",)]),
    "a mask of whole scores": (Masked("b m1 q k"), [random(6, 4, 2, 4, 8), mask(4, 1, 4, 8)], [(), ("dp",)]),
    "a mask with sharded keys": (
        Masked("b h q k"), [random(6, 4, 2, 4, 8), mask(4, 2, 4, 8)], [("dp",), (None, None, None, "tp")],
    ),
    "a mask of one row": (Masked("m0 m1 m2 k"), [random(6, 4, 2, 4, 8), mask(1, 1, 1, 8)], [("dp", "tp"), ()]),
    "heads": (Heads(2), [random(4, 8, 8, 3), random(5, 8, 4, 3)], [("dp", "tp"), ("dp", "tp")]),
}  # fmt: skip


def experts_there_and_back(x):
    """Send x [t, h] to two experts per token over four devices; each returns half of it, so the result is x."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("ep",), axis_types=(AxisType.Auto,))
    config = ep.EpConfig(8, 4)

    def local(x, picked):
        weights = jnp.full(picked.shape, 0.5, x.dtype)
        rows, scales, handle, counts, _ = ep.ep_dispatch(config, picked, x, weights, 64)
        return ep.ep_combine(config, handle, counts, rows * scales[:, None], x.shape[0])

    first = array(np.random.default_rng(0).integers(0, 8, (x.shape[0], 1)), jnp.int32)
    spec = PartitionSpec("ep")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return mapped(x, jnp.concatenate((first, (first + 3) % 8), axis=1))


def misnamed_count(mesh: Mesh) -> int:
    """Number of arrays sharded over mesh axes for which `named` finds another sharding."""
    specs = [
        (),
        ("dp",),
        (None, "tp"),
        ("tp", None, "dp"),
        (("dp", "tp"),),
        (None, ("tp", "dp")),
        (None, "tp", "dp"),
    ]
    arrays = [
        Shape(
            (8, 8, 8),
            jnp.float32,
            sharding=NamedSharding(mesh, PartitionSpec(*spec, *(None,) * (3 - len(spec)))),
        )
        for spec in specs
    ]
    pairs = zip(named(mesh, arrays), arrays, strict=True)
    return sum(not got.sharding.is_equivalent_to(x.sharding, x.ndim) for got, x in pairs)


# {what: (formats for a and b, their element, a [*M, *K], b [*N, *K], mesh axes over a's and b's axes)}
PRODUCTS = {
    "axes with blocks of their own": (
        (MXFP8, MXFP8), E4M3, (8, 4, 2, 64), (2, 24, 2, 64), ("dp", None, None, "tp"), (None, "tp"),
    ),
    "a block on two axes": ((MXFP8, MXFP8), E4M3, (8, 4, 2, 48), (8, 2, 48), ("dp",), (None, None, "tp")),
    "a block that is not full": ((MXFP8, MXFP8), E4M3, (8, 72), (16, 72), ("dp",), ("dp", "tp")),
    "fewer blocks than devices": ((NVFP4, NVFP4), E2M1, (8, 32), (16, 32), (None, "dp"), (None, "dp")),
    "a block alone": ((NVFP4, NVFP4), E2M1, (8, 2, 8), (16, 2, 8), ("dp", "tp"), (None, "tp")),
    "squares": ((BLOCK_1D, BLOCK_2D), E4M3, (8, 256), (512, 256), ("dp", "tp"), ("dp", "tp")),
}  # fmt: skip


class PackedProduct(decoded.DecodedProduct):
    """A product of which devices exchange two E2M1 codes in a byte, as kernels read them."""

    packs = True

    def product(self, a: Operand, b: Operand) -> jax.Array:
        a, b = (
            dataclasses.replace(x, codes=unpack_e2m1(x.codes)) if x.format == NVFP4 else x
            for x in (a, b)
        )
        return super().product(a, b)


def packed_product(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> jax.Array:
    return block_scales.multiply_codes(PackedProduct, a, b, dtype)


DECODED = functools.partial(decoded.run, widens=False)
WIDENED = functools.partial(decoded.run, widens=True)


def products_of_codes(mesh: Mesh) -> dict[str, float]:
    """Products of codes that devices decode, against the literal ones, relative to the largest element."""
    results = {}
    for name, (forms, element, *shapes, a_cut, b_cut) in PRODUCTS.items():
        contracted = 1 if len(shapes[0]) == 2 else 2

        def quantized_product(*arrays, forms=forms, element=element, contracted=contracted):
            operands = []
            for x, form in zip(arrays, forms, strict=True):
                tensor = quantize(x, QuantizeSpec(form, element), axis=x.ndim - contracted)
                scaled = tensor.codes, tensor.scale, tensor.amax
                operands.append(Operand(*scaled, form, jnp.dtype(jnp.float32), x.ndim - contracted))
            return operands, reference.run(*operands, jnp.dtype(jnp.float32), True)

        operands, expected = jax.jit(quantized_product)(
            *(random(seed, *shape) for seed, shape in enumerate(shapes))
        )
        cut_up = [
            dataclasses.replace(
                operand,
                codes=jax.device_put(operand.codes, NamedSharding(mesh, PartitionSpec(*cut))),
            )
            for operand, cut in zip(operands, (a_cut, b_cut), strict=True)
        ]
        for title, run in (("decoded", DECODED), ("widened", WIDENED), ("packed", packed_product)):
            if title == "widened" and not all(form.fits_bfloat16 for form in forms):
                continue
            with jax.set_mesh(mesh):
                got = jax.jit(lambda a, b, run=run: run(a, b, jnp.dtype(jnp.float32), True))(
                    *cut_up
                )
            results[f"product, {title}: {name}"] = largest([(got, expected)]) / float(
                jnp.abs(expected).max()
            )
    return results


def main() -> None:
    start_on_host_devices()
    mlir.register_lowering(kernels._kernel, kernels._lower_kernel, platform="cpu")
    mesh = Mesh(
        np.asarray(jax.devices()).reshape(4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2
    )
    actual = {"misnamed": misnamed_count(mesh)} | products_of_codes(mesh)
    expected = jax.jit(
        lambda cases: {name: CASES[name][0].run(*arrays) for name, arrays in cases.items()}
    )({name: arrays for name, (_, arrays, _) in CASES.items()})
    for name, (kernel, arrays, specs) in CASES.items():
        placed = [
            jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
            for x, spec in zip(arrays, specs, strict=True)
        ]
        run = jax.jit(lambda *a, kernel=kernel: call(kernel, *a))
        with jax.set_mesh(mesh):
            program = run.lower(*placed)
            actual["not cut"] = actual.get("not cut", 0) + (
                "CustomSPMDPartitioning" not in program.as_text()
            )
            compiled = program.compile()
            result = compiled(*placed)
        actual[name] = largest(zip(result, expected[name], strict=True))
        actual[f"{name}: gathers"] = len(
            re.findall(r"all-gather(?:-start)?\(", compiled.as_text() or "")
        )
    x = jax.device_put(random(6, 16, 32), NamedSharding(mesh, PartitionSpec("dp", "tp")))
    for name, kernels_of in (  # warns once on stderr that no mesh is set
        ("a kernel", lambda x, apply: apply(x)),
        ("kernels of kernels", lambda x, apply: apply(apply(apply(x)[1])[0])),
    ):
        result = jax.jit(lambda x, of=kernels_of: of(x, lambda x: call(Measured(), x)))(x)
        pairs = zip(result, kernels_of(random(6, 16, 32), Measured().run), strict=True)
        actual[f"{name} without a mesh"] = largest(pairs)
    x = random(1, 16, 2, 16)
    (sums,) = jax.jit(lambda x: call_on_axes(Blocks((16, 32)), {"k": 2}, x))(x)
    actual["axes of a block each"] = float(
        np.abs(np.asarray(sums) - np.asarray(x).sum(axis=2)).max()
    )
    (sums,) = jax.jit(lambda a, b: call_on_axes(Product(), {"n": 2}, a, b))(
        random(2, 16, 32), random(3, 2, 3, 32)
    )
    reference = np.einsum("mk,abk->mab", random(2, 16, 32), random(3, 2, 3, 32))
    actual["one of both of several axes"] = float(np.abs(np.asarray(sums) - reference).max())
    spec = PartitionSpec("dp", "tp")
    mapped = jax.shard_map(
        lambda x: call(Measured(), x)[0], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    x = random(6, 16, 32)
    actual["inside shard_map"] = float(
        np.abs(np.asarray(jax.jit(mapped)(x)) - np.asarray(x) * 2).max()
    )
    partly = jax.shard_map(
        lambda x: call(Measured(), x)[0],
        mesh=mesh,
        in_specs=PartitionSpec("dp"),
        out_specs=PartitionSpec("dp"),
        axis_names={"dp"},
        check_vma=False,
    )
    actual["inside shard_map of one axis"] = float(
        np.abs(np.asarray(jax.jit(partly)(x)) - np.asarray(x) * 2).max()
    )
    x = random(7, 24, 16)
    actual["experts"] = float(
        np.abs(np.asarray(jax.jit(experts_there_and_back)(x)) - np.asarray(x)).max()
    )
    gradient = jax.jit(jax.grad(lambda x: (experts_there_and_back(x) ** 2).sum()))
    actual["gradient of experts"] = float(np.abs(np.asarray(gradient(x)) - 2 * np.asarray(x)).max())
    text = gradient.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    actual["ragged exchanges between GPUs"] = text.count("ragged_all_to_all")
    print(json.dumps(actual))


if __name__ == "__main__":
    main()
