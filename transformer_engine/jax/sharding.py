"""The mesh axes over which tensor dimensions are sharded, by name.

These functions move no data: a constraint is a hint to XLA's partitioner, and has no effect without a mesh.

Longer than 400 lines because it is one public module in NVIDIA's engine.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..common.checks import accepts_former_keywords, described, suggests_keywords, text_or_none
from ..common.numbers import with_article
from .runtime.blocks import reusable
from .runtime.checks import check_array, check_axis_names
from .runtime.explicit_axes import explicit_axes, explicit_entries

_PREFIX = "nvte_"  # prefix for this module's logical axis names
BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
SEQLEN_CP_AXES = "nvte_seqlen_cp"
HEAD_AXES = "nvte_head"
HIDDEN_AXES = "nvte_hidden"
HIDDEN_TP_AXES = "nvte_hidden_tp"
JOINED_AXES = "nvte_joined"
W_NO_SHARD_AXES = "nvte_w_no_shard"
W_FSDP_AXES = "nvte_w_fsdp"
W_TP_AXES = "nvte_w_tp"
W_JOINED_AXES = "nvte_w_joined"


def token_axes(transposed: bool, sequence: str, hidden: str) -> tuple[str, str, str]:
    """Axis names for [b, s, hidden], or for [s, b, hidden] if transposed.

    Args:
        transposed: Whether the sequence is the first axis.
        sequence: Sequence axis name.
        hidden: Last axis name.
    """
    return (sequence, BATCH_AXES, hidden) if transposed else (BATCH_AXES, sequence, hidden)


@suggests_keywords
@dataclass(frozen=True)
class MeshResource:
    """Mesh axis names by the parallelism that they serve; None if the mesh has no such axis.

    Args:
        dp_resource: Data-parallel axis: shards batches.
        tp_resource: Tensor-parallel axis: shards weights and heads.
        tpsp_resource: Tensor-parallel axis that also shards sequences between the sharded layers.
        fsdp_resource: Axis over which batches and weights are sharded (FSDP).
        pp_resource: Pipeline-parallel axis.
        cp_resource: Context-parallel axis: shards sequences.
        ep_resource: Expert-parallel axis.
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None


_resource: ContextVar[MeshResource | None] = ContextVar(
    "transformer_engine_mesh_resource", default=None
)


@reusable
def global_shard_guard(resource: MeshResource | None) -> Iterator[None]:
    """Shard the tensors in layers that are traced in this block over `resource`'s axes; None: over no axis.

    A mesh that is entered later is checked when an axis is read.

    Args:
        resource: Mesh axis names.

    Raises:
        ValueError: The mesh in use lacks an axis.
    """
    if resource is not None:
        if not isinstance(resource, MeshResource):
            raise TypeError(
                f"resource={resource!r} is {with_article(type(resource))}; pass a MeshResource, for example "
                "MeshResource(dp_resource='dp')"
            )
        for name, axis in vars(resource).items():
            text_or_none(name, axis)
        _check_axes(resource)
    token = _resource.set(resource)
    try:
        yield
    finally:
        _resource.reset(token)


def mesh_resource_or_default() -> MeshResource:
    """The active MeshResource, by default one without axes."""
    return MeshResource() if _resource.get() is None else global_mesh_resource()


def global_mesh_resource() -> MeshResource:
    """Get the active MeshResource; raise ValueError without one, or if the mesh in use lacks one of its axes."""
    resource = _resource.get()
    if resource is None:
        mesh = "no mesh is in use, and no" if _mesh() is None else "a mesh is in use and no"
        raise ValueError(
            f"{mesh} MeshResource assigns its axes; enter autocast(mesh_resource=MeshResource(..)) or "
            "global_shard_guard(MeshResource(..))"
        )
    # checked again, because the mesh may have been entered after the resource
    _check_axes(resource)
    return resource


def _check_axes(resource: MeshResource) -> None:
    """Raise ValueError if the mesh in use lacks an axis, or if two axes would both shard tensor widths."""
    for name, axis in vars(resource).items():
        check_axis(name, axis)
    both = (resource.tp_resource, resource.tpsp_resource)
    if None not in both and all(get_mesh_axis_size(axis) > 1 for axis in both):
        raise ValueError(
            f"tp_resource={both[0]!r} and tpsp_resource={both[1]!r} both have more than one device; "
            "set one of them to None: tpsp_resource shards sequences too"
        )


def _mesh() -> Mesh | jax.sharding.AbstractMesh | None:
    """Get the mesh from jax.set_mesh, otherwise from `with mesh:`, otherwise None."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    with warnings.catch_warnings():
        # the only access to the mesh in `with mesh:`
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from jax.interpreters import pxla

            physical = pxla.thread_resources.env.physical_mesh
        except (ImportError, AttributeError):
            return None  # a jax without that access has no `with mesh:` either
    return None if physical.empty else physical


def mesh_of_devices() -> Mesh | None:
    """The mesh in use; None for an abstract mesh, and in a trace, where jax does not provide devices."""
    mesh = _mesh()
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        return None
    return None if mesh.empty else mesh


def mesh_in_use() -> Mesh | jax.sharding.AbstractMesh:
    """Get the mesh in use; raise ValueError without one."""
    mesh = _mesh()
    if mesh is None:
        raise ValueError("no mesh is in use; enter `with mesh:` or jax.set_mesh(mesh)")
    return mesh


def automatic_axes() -> dict[str, int]:
    """Axes in the current mesh that are not manual in an enclosing shard_map, with their device counts."""
    mesh = mesh_in_use()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind is not AxisType.Manual}


def is_mesh_available() -> bool:
    """Whether a mesh is in use."""
    return _mesh() is not None


def get_mesh_axis_size(axis: str | None, mesh: Mesh | None = None) -> int:
    """Number of devices along a mesh axis; 1 for None, and without a mesh.

    Args:
        axis: Mesh axis name, or None.
        mesh: Device mesh; None is the mesh in use.

    Raises:
        ValueError: The mesh does not have the axis.
    """
    check_axis("axis", axis, mesh)
    current = _mesh() if mesh is None else mesh
    return 1 if current is None or axis is None else current.shape[axis]


def check_axis(name: str, axis: str | None, mesh: Mesh | None = None) -> None:
    """Raise ValueError if the mesh, by default the one in use, lacks the axis; without a mesh, every axis is valid.

    Args:
        name: Argument or field name, for the message.
        axis: Mesh axis name, or None.
        mesh: Device mesh; None is the mesh in use.
    """
    current = _mesh() if mesh is None else mesh
    if current is not None and axis is not None and axis not in current.axis_names:
        raise ValueError(
            f"{name}={axis!r} is not an axis of the mesh{' in use' if mesh is None else ''}, which has "
            f"{tuple(current.axis_names)}; give one of them, or None"
        )


def check_automatic_axis(name: str, axis: str | None) -> None:
    """Raise ValueError if the mesh in use lacks the axis, or if the axis is manual; without a mesh, it is valid.

    Args:
        name: Argument or field name, for the message.
        axis: Mesh axis name, or None.
    """
    check_axis(name, axis)
    mesh = _mesh()
    if mesh is None or axis is None:
        return
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] is AxisType.Manual:
        raise ValueError(
            f"{name}={axis!r} is manual here, inside shard_map, where a device sees its own part only; call it "
            "outside of shard_map, or leave the axis out of shard_map's axis_names"
        )


def num_of_devices() -> int:
    """Number of devices over all processes."""
    return jax.device_count()


def get_num_devices_in_mesh(mesh: Mesh | None = None) -> int:
    """Number of devices in a mesh, by default the one in use; 1 without a mesh.

    Args:
        mesh: Device mesh; None is the mesh in use.
    """
    current = _mesh() if mesh is None else mesh
    return 1 if current is None else current.size


def get_sharding_map_logic_axis_to_mesh_axis() -> dict[str, str | None]:
    """Map {axis name in this module: mesh axis or None} for the active MeshResource."""
    resource = global_mesh_resource()

    def either(first: str | None, second: str | None) -> str | None:
        return first if first is not None and get_mesh_axis_size(first) > 1 else second

    tensor = either(resource.tpsp_resource, resource.tp_resource)
    return {
        BATCH_AXES: either(resource.fsdp_resource, resource.dp_resource),
        SEQLEN_AXES: None,
        SEQLEN_TP_AXES: resource.tpsp_resource,
        SEQLEN_CP_AXES: resource.cp_resource,
        HEAD_AXES: tensor,
        HIDDEN_AXES: None,
        HIDDEN_TP_AXES: tensor,
        JOINED_AXES: None,
        W_NO_SHARD_AXES: None,
        W_FSDP_AXES: resource.fsdp_resource,
        W_TP_AXES: tensor,
        W_JOINED_AXES: None,
    }


def with_sharding_constraint(x: Array, pspec: PartitionSpec | None) -> Array:
    """Shard x over the mesh by `pspec`; x itself without a mesh, without a spec, or if `pspec` is all None.

    Axes that are manual here (inside shard_map) are dropped from the spec. An axis that the mesh does not have raises
    ValueError, except in a mesh whose axes are all manual, such as pmap's mesh, where nothing can be sharded.

    Args:
        x: The array.
        pspec: Mesh axes for each axis of `x`.
    """
    check_array("x", x)
    _check_spec(pspec, x.ndim)
    mesh = _mesh()
    if pspec is None or mesh is None or all(kind is AxisType.Manual for kind in mesh.axis_types):
        return x
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def usable(entry: Any) -> Any:
        if entry is PartitionSpec.UNCONSTRAINED:
            return entry
        names = entry if isinstance(entry, tuple) else (entry,)
        for name in names:
            check_axis("pspec", name)
        usable_axes = tuple(
            name for name in names if name is not None and kinds[name] is not AxisType.Manual
        )
        return None if not usable_axes else usable_axes[0] if len(usable_axes) == 1 else usable_axes

    spec = PartitionSpec(*(usable(entry) for entry in pspec))
    if all(entry is None for entry in spec):
        return x
    if explicit := explicit_axes():
        # The sharding over Explicit axes is part of the array's type; a constraint would only assert it.
        x = jax.sharding.reshard(x, _explicit_spec(spec, explicit_entries(x), explicit))
        spec = PartitionSpec(*(_drop_axes(entry, explicit) for entry in spec))
        if all(entry is None for entry in spec):
            return x
    # A concrete array needs a device mesh, which JAX does not provide in a trace.
    devices = None if isinstance(x, Tracer) else mesh_of_devices()
    if devices is not None:
        return jax.lax.with_sharding_constraint(x, NamedSharding(devices, spec))
    return _constrain_array(x, NamedSharding(mesh, spec))


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _constrain_array(x: Array, sharding: NamedSharding) -> Array:
    """Constrain an array over an abstract mesh in a program, since an eager gradient's tracers are outside programs."""
    return jax.lax.with_sharding_constraint(x, sharding)


def _explicit_spec(
    spec: PartitionSpec, current: Sequence[Any], explicit: Sequence[str]
) -> PartitionSpec:
    """Select the spec entries over Explicit axes; an unconstrained axis keeps its current entry."""
    entries: list[Any] = []
    for entry, unchanged in zip(
        (*spec, *(None,) * (len(current) - len(spec))), current, strict=True
    ):
        names = entry if isinstance(entry, tuple) else (entry,)
        axes = tuple(name for name in names if name in explicit)
        entries.append(unchanged if entry is PartitionSpec.UNCONSTRAINED else axes or None)
    return PartitionSpec(*entries)


def _drop_axes(entry: Any, axes: Sequence[str]) -> Any:
    """Remove these axes from a spec entry."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if name is not None and name not in axes) or None


def _check_spec(pspec: Any, ndim: int) -> None:
    """Raise TypeError or ValueError unless this is None, or mesh axis names for at most ndim array axes."""
    if pspec is None:
        return
    if not isinstance(pspec, (PartitionSpec, tuple, list)):
        raise TypeError(
            f"pspec={described(pspec)} is {with_article(type(pspec))}; give a PartitionSpec, or None"
        )
    for entry in pspec:
        names = entry if isinstance(entry, tuple) else (entry,)
        if entry is not PartitionSpec.UNCONSTRAINED and not all(
            name is None or isinstance(name, str) for name in names
        ):
            raise TypeError(
                f"pspec={pspec} holds {described(entry)}; give the name of an axis of the mesh, a tuple of names, "
                "or None"
            )
    if len(pspec) > ndim:
        raise ValueError(
            f"pspec={pspec} has {len(pspec)} entries for an array of {ndim} axes; give at most {ndim}"
        )


def with_sharding_constraint_by_logical_axes(
    x: Array, logical_axis_names: Sequence[str | None] | None
) -> Array:
    """Shard x by the names of its axes: by Flax's axis rules, or by the names in this module.

    None or () has no effect, and neither has any name if all mesh axes are manual (shard_map, pmap). Without
    Flax rules, names in this module are mapped with a DeprecationWarning, and axes with other names, such as "embed" in
    the layers' defaults, are not sharded. With Flax rules, an axis whose name has no rule is not sharded, which a
    warning reports once per name.

    Args:
        x: The array.
        logical_axis_names: One name, or None, per axis of `x`.

    Raises:
        ValueError: Without Flax rules, a name that begins with "nvte_" is not defined in this module, or no
            MeshResource is active.
    """
    if logical_axis_names is None:
        return x
    check_axis_names("logical_axis_names", logical_axis_names, x.ndim)
    if not logical_axis_names:
        return x
    if (mesh := _mesh()) is not None and all(kind is AxisType.Manual for kind in mesh.axis_types):
        return x
    from flax import linen  # other layers do not depend on Flax

    if rules := linen.get_logical_axis_rules():
        if mesh is not None:
            known = {name for name, _ in rules}
            for name in logical_axis_names:
                if name is not None and name not in known:
                    _warn_of_name(name)
        if mesh is None:
            return x
        spec: Any = linen.logical_to_mesh_axes(tuple(logical_axis_names))
        if isinstance(x, Tracer) and all(kind is AxisType.Auto for kind in mesh.axis_types):
            # As flax.linen.with_logical_constraint does in a program; a spec without axes replicates the array.
            return _constrain_array(x, NamedSharding(mesh, spec))
        return with_sharding_constraint(x, spec)
    names = [name for name in logical_axis_names if name is not None and name.startswith(_PREFIX)]
    if mesh is None or not names:
        return x
    ours = get_sharding_map_logic_axis_to_mesh_axis()
    if misspelled := [name for name in names if name not in ours]:
        raise ValueError(
            f"logical_axis_names={tuple(logical_axis_names)} has {', '.join(misspelled)}, which no rule of Flax and no "
            f"name of transformer_engine.jax.sharding matches; give a rule, or one of {', '.join(ours)}"
        )
    warnings.warn(
        "axis names of transformer_engine.jax without Flax axis rules are deprecated; enter "
        "flax.linen.logical_axis_rules(te.flax.extend_logical_axis_rules(()))",
        DeprecationWarning,
        stacklevel=2,
    )
    return with_sharding_constraint(
        x, PartitionSpec(*(None if name is None else ours.get(name) for name in logical_axis_names))
    )


@functools.cache
def _warn_of_name(name: str) -> None:
    """Warn once per process about a name without a rule."""
    warnings.warn(
        f"flax.linen.logical_axis_rules has no rule for the axis name {name!r}: its axis is not sharded; give "
        f"({name!r}, an axis of the mesh or None), or te.flax.extend_logical_axis_rules(rules), which adds our names",
        stacklevel=4,
    )


@accepts_former_keywords(mesh_resource_name="resource_name")
def get_active_resource_axis(resource_name: str) -> str | None:
    """Get the mesh axis for a MeshResource field ("tp_resource"); None if it has one device.

    Args:
        resource_name: MeshResource field name.

    Raises:
        ValueError: MeshResource does not have the field.
    """
    fields = vars(global_mesh_resource())
    if resource_name not in fields:
        raise ValueError(
            f"resource_name={described(resource_name)} is not a field of MeshResource; give one of "
            f"{', '.join(fields)}"
        )
    axis = fields[resource_name]
    return axis if get_mesh_axis_size(axis) > 1 else None


def tpsp_axis_size() -> int:
    """Number of devices along the tensor-sequence-parallel axis."""
    return get_mesh_axis_size(global_mesh_resource().tpsp_resource)


def dp_or_fsdp_axis_size() -> int:
    """Number of devices along the axis over which batches are sharded."""
    resource = global_mesh_resource()
    return max(get_mesh_axis_size(resource.dp_resource), get_mesh_axis_size(resource.fsdp_resource))


def ep_axis_size() -> int:
    """Number of devices along the expert-parallel axis."""
    return get_mesh_axis_size(global_mesh_resource().ep_resource)


def all_reduce_max_along_all_axes_except_PP(x: Array, mesh: Mesh | None = None) -> Array:
    """Compute the maximum of x over all MeshResource axes except the pipeline axis; for use in shard_map.

    Args:
        x: The device's values.
        mesh: Device mesh; None is the mesh in use.
    """
    resource = global_mesh_resource()
    axes = [axis for name, axis in vars(resource).items() if name != "pp_resource"]
    return _reduce_over_axes(jax.lax.pmax, x, axes, mesh)


def all_reduce_sum_along_dp_fsdp(x: Array, mesh: Mesh | None = None) -> Array:
    """Sum x over the axes over which batches are sharded; for use in shard_map.

    Args:
        x: The device's values.
        mesh: Device mesh; None is the mesh in use.
    """
    resource = global_mesh_resource()
    return _reduce_over_axes(jax.lax.psum, x, [resource.dp_resource, resource.fsdp_resource], mesh)


def all_reduce_sum_along_dp_fsdp_tpsp(x: Array, mesh: Mesh | None = None) -> Array:
    """Sum x over the axes over which batches and sequences are sharded; for use in shard_map.

    Args:
        x: The device's values.
        mesh: Device mesh; None is the mesh in use.
    """
    resource = global_mesh_resource()
    axes = [resource.dp_resource, resource.fsdp_resource, resource.tpsp_resource]
    return _reduce_over_axes(jax.lax.psum, x, axes, mesh)


def _reduce_over_axes(
    operation: Callable[..., Array], x: Array, axes: Sequence[str | None], mesh: Mesh | None
) -> Array:
    """Apply operation(x) over each axis that has several devices."""
    several = tuple(
        dict.fromkeys(axis for axis in axes if axis and get_mesh_axis_size(axis, mesh) > 1)
    )
    return operation(x, several) if several else x
