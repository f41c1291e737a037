"""What `te info` says of JAX: versions, devices, and the way that FP8 products go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from ..common import optional


@dataclass(frozen=True)
class JaxMachine:
    """`versions` of jax, jaxlib and flax; without JAX they are empty, and `devices` says so."""

    versions: Mapping[str, str] = field(default_factory=dict)
    devices: str = ""
    fp8: str = ""


def jax_machine() -> JaxMachine:
    """The facts about JAX on this machine; starts its backends where it is installed."""
    if not optional.installed("jax"):
        return JaxMachine(devices=f"not installed; {optional.install_command('jax')}")
    versions = {name: _version(name) for name in ("jax", "jaxlib", "flax")}
    refusal = optional.failure("transformer_engine.jax")
    if refusal is not None:
        return JaxMachine(versions, refusal)
    import jax

    from ..jax import platform
    from ..jax.primitives.gemm.float8 import FLAG

    devices = ", ".join(f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.devices())
    capability = platform.compute_capability() if platform.has_gpu() else None
    return JaxMachine(versions, devices, fp8_route(capability, FLAG, platform.xla_flag(FLAG)))


def fp8_route(capability: int | None, flag: str, value: str | None) -> str:
    """How FP8 products with one scale a tensor are computed; `capability` is ten times a GPU's, None on a CPU."""
    said = f"--{flag} is {'not set' if value is None else value}"
    if capability is None:
        return f"reference, in float32 on the CPU; {said}"
    if capability < 89:
        return f"reference: compute capability {capability / 10} < 8.9; {said}"
    if value in ("false", "0"):
        return f"scaled: cuBLASLt takes codes and scales; {said}"
    return f"direct: the scales come after cuBLASLt; {said}, set XLA_FLAGS=--{flag}=false before jax starts"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"not installed; {optional.install_command('jax')}"
