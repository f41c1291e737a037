"""Which axes of a mesh the dimensions of tensors are laid over, by name.

Nothing here moves data: a constraint is a hint to XLA's partitioner, and without a mesh there is none.
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

from ..common.checks import described, text_or_none
from .blocks import reusable
from .checks import check_array, check_axis_names

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
    """Names of the axes of [b, s, hidden], or of [s, b, hidden] when transposed."""
    return (sequence, BATCH_AXES, hidden) if transposed else (BATCH_AXES, sequence, hidden)


@dataclass(frozen=True)
class MeshResource:
    """Names of mesh axes: data (dp), tensor (tp), tensor and sequence (tpsp), fully sharded data (fsdp), pipeline (pp),
    context (cp) and expert parallelism (ep); None if the mesh has no such axis.
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None


_resource: ContextVar[MeshResource | None] = ContextVar("transformer_engine_mesh_resource", default=None)


@reusable
def global_shard_guard(resource: MeshResource | None) -> Iterator[None]:
    """Let layers traced in this block shard their tensors over the axes that resource names; None: over none.

    Raises ValueError where a mesh is in use that has not all of them; a mesh that is entered later is asked where an
    axis is looked up.
    """
    if resource is not None:
        if not isinstance(resource, MeshResource):
            raise TypeError(f"resource={resource!r} is a {type(resource).__name__}; pass a MeshResource(..)")
        for name, axis in vars(resource).items():
            text_or_none(name, axis)
        _check_axes(resource)
    token = _resource.set(resource)
    try:
        yield
    finally:
        _resource.reset(token)


def mesh_resource_or_default() -> MeshResource:
    """The MeshResource in force, else one of no axes."""
    return MeshResource() if _resource.get() is None else global_mesh_resource()


def global_mesh_resource() -> MeshResource:
    """The MeshResource in force; ValueError where there is none, or the mesh in use has not all of its axes."""
    resource = _resource.get()
    if resource is None:
        mesh = "no mesh is in use, and no" if _mesh() is None else "a mesh is in use and no"
        raise ValueError(
            f"{mesh} MeshResource says what axes of a mesh are for; enter autocast(mesh_resource=MeshResource(..)) or "
            "global_shard_guard(MeshResource(..))"
        )
    _check_axes(resource)  # again: the mesh may have come after the resource
    return resource


def _check_axes(resource: MeshResource) -> None:
    """ValueError where the mesh in use has not all axes, or two of them would both cut the width of tensors."""
    for name, axis in vars(resource).items():
        check_axis(name, axis)
    both = (resource.tp_resource, resource.tpsp_resource)
    if None not in both and all(get_mesh_axis_size(axis) > 1 for axis in both):
        raise ValueError(
            f"tp_resource={both[0]!r} and tpsp_resource={both[1]!r} both have more than one device; "
            "set one of them to None: tpsp_resource shards sequences too"
        )


def _mesh() -> Mesh | jax.sharding.AbstractMesh | None:
    """The mesh of jax.set_mesh, else that of `with mesh:`; None where there is none."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jax has no other door to a mesh of `with mesh:`
        try:
            from jax.interpreters import pxla

            physical = pxla.thread_resources.env.physical_mesh
        except (ImportError, AttributeError):
            return None  # a jax without that door has no `with mesh:` either
    return None if physical.empty else physical


def mesh_of_devices() -> Mesh | None:
    """The mesh in use; None where there is none but names of axes, and in a trace, where jax tells no devices."""
    mesh = _mesh()
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        return None
    return None if mesh.empty else mesh


def mesh_in_use() -> Mesh | jax.sharding.AbstractMesh:
    """The mesh in use here; ValueError where there is none."""
    mesh = _mesh()
    if mesh is None:
        raise ValueError("no mesh is in use; enter `with mesh:` or jax.set_mesh(mesh)")
    return mesh


def automatic_axes() -> dict[str, int]:
    """The axes of the mesh in use that no shard_map around us holds, and their devices."""
    mesh = mesh_in_use()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind is not AxisType.Manual}


def is_mesh_available() -> bool:
    """Is a mesh in use here?"""
    return _mesh() is not None


def get_mesh_axis_size(axis: str | None, mesh: Mesh | None = None) -> int:
    """Devices along an axis of the mesh, by default of the one in use; 1 for None, and where no mesh is in use.

    Raises ValueError for an axis that the mesh has not.
    """
    check_axis("axis", axis, mesh)
    found = _mesh() if mesh is None else mesh
    return 1 if found is None or axis is None else found.shape[axis]


def check_axis(name: str, axis: str | None, mesh: Mesh | None = None) -> None:
    """ValueError unless the mesh, by default the one in use, has the axis; without a mesh there is nothing to say."""
    found = _mesh() if mesh is None else mesh
    if found is not None and axis is not None and axis not in found.axis_names:
        raise ValueError(
            f"{name}={axis!r} is no axis of the mesh{' in use' if mesh is None else ''}, which has "
            f"{tuple(found.axis_names)}; give one of them, or None"
        )


def check_automatic_axis(name: str, axis: str | None) -> None:
    """ValueError unless the mesh in use has the axis and leaves it to XLA; without a mesh there is nothing to say."""
    check_axis(name, axis)
    mesh = _mesh()
    if mesh is None or axis is None:
        return
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] is AxisType.Manual:
        raise ValueError(
            f"{name}={axis!r} is manual here, inside shard_map, where a device sees its own part alone; call it "
            "outside of it, or leave the axis out of shard_map's axis_names"
        )


def num_of_devices() -> int:
    """Devices of all processes."""
    return jax.device_count()


def get_num_devices_in_mesh(mesh: Mesh | None = None) -> int:
    """Devices of the mesh, by default of the one in use; 1 where there is none."""
    found = _mesh() if mesh is None else mesh
    return 1 if found is None else found.size


def get_sharding_map_logic_axis_to_mesh_axis() -> dict[str, str | None]:
    """{axis name of this module: axis of the mesh or None}, by the MeshResource in force."""
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
    """x, laid over the mesh as pspec says; x as it is without a mesh, without a spec, or where pspec is all None.

    Axes that are manual here (inside shard_map) are dropped from the spec; one that the mesh has not raises ValueError,
    but for a mesh whose axes are all manual, that of pmap among them, where nothing can be laid.
    """
    check_array("x", x)
    _check_spec(pspec, x.ndim)
    mesh = _mesh()
    if pspec is None or mesh is None or _is_manual(mesh):
        return x
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def usable(entry: Any) -> Any:
        if entry is PartitionSpec.UNCONSTRAINED:
            return entry
        names = entry if isinstance(entry, tuple) else (entry,)
        for name in names:
            check_axis("pspec", name)
        kept = tuple(name for name in names if name is not None and kinds[name] is not AxisType.Manual)
        return None if not kept else kept[0] if len(kept) == 1 else kept

    spec = PartitionSpec(*(usable(entry) for entry in pspec))
    if all(entry is None for entry in spec):
        return x
    if not isinstance(x, Tracer):
        # An array is laid over devices, a traced one over their names; so is an array that a trace closes over.
        mesh = mesh_of_devices() or mesh
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _is_manual(mesh: Mesh | jax.sharding.AbstractMesh) -> bool:
    """Is no axis left to lay anything over, as inside shard_map of all axes, and pmap?"""
    return all(kind is AxisType.Manual for kind in mesh.axis_types)


def _check_spec(pspec: Any, ndim: int) -> None:
    """TypeError or ValueError unless this is None, or names of a mesh's axes for at most ndim axes of an array."""
    if pspec is None:
        return
    if not isinstance(pspec, (PartitionSpec, tuple, list)):
        raise TypeError(
            f"pspec={described(pspec)} is a {type(pspec).__name__}; give a PartitionSpec, or None"
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
    """x, laid over the mesh by the names of its axes: Flax's axis rules, or the names of this module.

    None or () does nothing, nor does any name where all axes of the mesh are manual (shard_map, pmap); without Flax
    rules names of this module are mapped with a DeprecationWarning, and others raise ValueError. Under Flax's rules an
    axis whose name none has stays whole, which a warning says once a name.
    """
    if logical_axis_names is None:
        return x
    check_axis_names("logical_axis_names", logical_axis_names, x.ndim)
    if not logical_axis_names:
        return x
    if (mesh := _mesh()) is not None and _is_manual(mesh):
        return x
    from flax import linen  # the layers below Flax do without it elsewhere

    if rules := linen.get_logical_axis_rules():
        if mesh is not None:
            _warn_of_names(logical_axis_names, {name for name, _ in rules})
        if mesh is not None and (AxisType.Manual in mesh.axis_types or not isinstance(x, Tracer)):
            # Flax neither drops manual axes nor lays an array that exists already.
            return with_sharding_constraint(x, linen.logical_to_mesh_axes(tuple(logical_axis_names)))
        return linen.with_logical_constraint(x, tuple(logical_axis_names))
    if not is_mesh_available():
        return x
    warnings.warn(
        "axis names of transformer_engine.jax without Flax axis rules are deprecated; enter "
        "flax.linen.logical_axis_rules(te.flax.extend_logical_axis_rules(()))",
        DeprecationWarning,
        stacklevel=2,
    )
    ours = get_sharding_map_logic_axis_to_mesh_axis()
    unknown = [name for name in logical_axis_names if name is not None and name not in ours]
    if unknown:
        raise ValueError(f"no rule for the axis names {unknown}; use Flax's rules, or {', '.join(ours)}")
    return with_sharding_constraint(
        x, PartitionSpec(*(None if name is None else ours[name] for name in logical_axis_names))
    )


def _warn_of_names(names: Sequence[str | None], known: set[str]) -> None:
    for name in names:
        if name is not None and name not in known:
            _warn_of_name(name)


@functools.cache
def _warn_of_name(name: str) -> None:
    """Once a process, of a name that Flax drops."""
    warnings.warn(
        f"no rule of flax.linen.logical_axis_rules has the axis name {name!r}: its axis is left whole; give "
        f"({name!r}, an axis of the mesh or None), or te.flax.extend_logical_axis_rules(rules), which adds our names",
        stacklevel=4,
    )


def get_active_resource_axis(mesh_resource_name: str) -> str | None:
    """The mesh axis of a field of MeshResource ("tp_resource"), None where it has one device.

    Raises ValueError for a name that is no field of it.
    """
    fields = vars(global_mesh_resource())
    if mesh_resource_name not in fields:
        raise ValueError(
            f"mesh_resource_name={described(mesh_resource_name)} is no field of MeshResource; give one of "
            f"{', '.join(fields)}"
        )
    axis = fields[mesh_resource_name]
    return axis if get_mesh_axis_size(axis) > 1 else None


def tpsp_axis_size() -> int:
    """Devices along the tensor-sequence-parallel axis."""
    return get_mesh_axis_size(global_mesh_resource().tpsp_resource)


def dp_or_fsdp_axis_size() -> int:
    """Devices along the axis that batches are laid over."""
    resource = global_mesh_resource()
    return max(get_mesh_axis_size(resource.dp_resource), get_mesh_axis_size(resource.fsdp_resource))


def ep_axis_size() -> int:
    """Devices along the expert-parallel axis."""
    return get_mesh_axis_size(global_mesh_resource().ep_resource)


def all_reduce_max_along_all_axes_except_PP(x: Array, mesh: Mesh | None = None) -> Array:
    """The maximum of x over every axis of the MeshResource but the pipeline's; for shard_map, where axes are manual."""
    resource = global_mesh_resource()
    axes = [axis for name, axis in vars(resource).items() if name != "pp_resource"]
    return _reduced(jax.lax.pmax, x, axes, mesh)


def all_reduce_sum_along_dp_fsdp(x: Array, mesh: Mesh | None = None) -> Array:
    """The sum of x over the axes that batches are laid over; for shard_map."""
    resource = global_mesh_resource()
    return _reduced(jax.lax.psum, x, [resource.dp_resource, resource.fsdp_resource], mesh)


def all_reduce_sum_along_dp_fsdp_tpsp(x: Array, mesh: Mesh | None = None) -> Array:
    """The sum of x over the axes that tokens are laid over: batches, and sequences; for shard_map."""
    resource = global_mesh_resource()
    axes = [resource.dp_resource, resource.fsdp_resource, resource.tpsp_resource]
    return _reduced(jax.lax.psum, x, axes, mesh)


def _reduced(
    operation: Callable[..., Array], x: Array, axes: Sequence[str | None], mesh: Mesh | None
) -> Array:
    """operation over those of the axes that have several devices, each once."""
    several = tuple(dict.fromkeys(axis for axis in axes if axis and get_mesh_axis_size(axis, mesh) > 1))
    return operation(x, several) if several else x
