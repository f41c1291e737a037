"""Userbuffers: the settings by which collectives overlap with matrix products.

`initialize_ub` sets the size of the buffers through which sequence-parallel layers with `ub_*` flags gather and scatter
rows (`distributed/overlap.py`). Methods and settings per product are accepted for compatibility.
They are checked and recorded for `get_ub` and change nothing else: `distributed/overlapped_rows.py` describes the one
method of this package.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ...common.checks import described, suggests_keywords
from ...common.numbers import to_bool, to_int
from .overlap import reserve


class UserBufferQuantizationMode(Enum):
    """Data type in which activations would be communicated."""

    NONE = "none"
    FP8 = "fp8"


RING, PIPELINE, BULK, EXTERNAL = "ring_exchange", "pipeline", "bulk", "external"
_METHODS = {
    "qkv_fprop": RING,
    "qkv_dgrad": BULK,
    "qkv_wgrad": BULK,
    "proj_fprop": PIPELINE,
    "proj_dgrad": RING,
    "proj_wgrad": EXTERNAL,
    "fc1_fprop": RING,
    "fc1_dgrad": BULK,
    "fc1_wgrad": BULK,
    "fc2_fprop": PIPELINE,
    "fc2_dgrad": RING,
    "fc2_wgrad": EXTERNAL,
}
_SCATTERS = frozenset({"proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad"})
_SETTINGS = frozenset(
    [
        "method",
        "is_reduce_scatter",
        "num_sm",
        "cga_size",
        "set_sm_margin",
        "num_splits",
        "aggregate",
        "atomic_gemm",
        "use_ce",
        "fp8_buf",
        "comm_priority",
        "gemm_priority",
        "pipeline_rs_overlap_first_gemm",
    ]
)
_BACKENDS = ("gloo", "mpi", "nccl")


@dataclass(frozen=True)
class Communicator:
    """The settings of one product's communication, as `get_ub` returns them; see `initialize_ub`."""

    name: str
    method: str
    reduces: bool
    tp_size: int
    fp8: bool
    atomic: bool

    def is_fp8_ubuf(self) -> bool:
        """Return whether the buffer would hold FP8 codes."""
        return self.fp8

    def is_atomic_gemm(self) -> bool:
        """Return whether the product would signal its chunks by atomic counters."""
        return self.atomic

    def is_p2p_overlap(self) -> bool:
        """Return whether chunks would be sent from rank to rank in a ring."""
        return self.method in (RING, EXTERNAL)

    def with_cublasmp(self) -> bool:
        """Return False: cuBLASMp never runs the product."""
        return False

    def get_tp_size(self) -> int:
        """Return the number of tensor-parallel ranks."""
        return self.tp_size


_communicators: dict[tuple[str, UserBufferQuantizationMode], Communicator] = {}


@suggests_keywords
def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
) -> None:
    """Reserve buffers through which collectives of sequence-parallel layers with `ub_*` flags overlap with products.

    The first such collective in a process group allocates two buffers of the given shape on each rank and
    measures the least message size for which they are faster. The process group sends smaller messages,
    messages on a CPU, and messages from compiled functions. `te.explain` says which one a call uses, and why.

    Args:
        shape: [tokens, hidden] of the activations communicated over all ranks in a tensor-parallel group.
        tp_size: Number of tensor-parallel ranks.
        use_fp8: Deprecated; `quantization_modes=[UserBufferQuantizationMode.FP8]`.
        quantization_modes: Data types of the communicated activations.
        dtype: Dtype of the activations.
        ub_cfgs: {name of a product: settings}, or one such mapping per quantization mode; checked and recorded for
            `get_ub`.
        bootstrap_backend: "gloo", "mpi" or "nccl"; checked, and has no effect.
        with_cublasmp: Has no effect.

    Raises:
        RuntimeError: A configuration is recorded already.
        TypeError: A quantization mode is not a UserBufferQuantizationMode, tp_size is not a whole number, or a
            configuration has an unknown setting.
        ValueError: The shape is not [tokens, hidden], tp_size is below 1, the backend is unknown, the numbers of
            configurations and modes differ, or settings of a product exclude each other.
    """
    if _communicators:
        raise RuntimeError("userbuffers are initialized already; call destroy_ub() first")
    if len(shape) != 2:
        raise ValueError(f"shape={list(shape)}; give [tokens, hidden]")
    size = to_int("shape[0]", shape[0], 1) * to_int("shape[1]", shape[1], 1) * dtype.itemsize
    to_int("tp_size", tp_size, 1)
    if bootstrap_backend is not None and bootstrap_backend not in _BACKENDS:
        raise ValueError(
            f"bootstrap_backend={described(bootstrap_backend)} is unknown; choose one of {_BACKENDS}"
        )
    modes = _check_modes(use_fp8, quantization_modes)
    configs = (
        [ub_cfgs] * len(modes) if ub_cfgs is None or isinstance(ub_cfgs, Mapping) else list(ub_cfgs)
    )
    if len(configs) != len(modes):
        raise ValueError(
            f"ub_cfgs holds {len(configs)} configurations for {len(modes)} quantization modes; give one per mode, or "
            "one mapping for all"
        )
    created = {}
    for mode, settings in zip(modes, configs, strict=True):
        created |= _create_communicators(tp_size, mode, settings or {})
    _communicators.update(created)
    reserve(size)


def destroy_ub() -> None:
    """Free the buffers of `initialize_ub` and forget its configuration; without one, do nothing.

    CUDA graphs that were captured with the buffers must not be replayed afterwards.
    """
    _communicators.clear()
    reserve(0)


def is_ub_initialized() -> bool:
    """Return whether a configuration is recorded."""
    return bool(_communicators)


def get_ub(name: str, use_fp8: bool) -> Communicator:
    """Return the settings of a product's communication.

    Args:
        name: For example "qkv_fprop".
        use_fp8: Those of the FP8 mode.

    Raises:
        RuntimeError: `initialize_ub` has not been called.
        KeyError: The name is unknown in this mode.
    """
    if not _communicators:
        raise RuntimeError("userbuffers are not initialized; call initialize_ub first")
    mode = UserBufferQuantizationMode.FP8 if use_fp8 else UserBufferQuantizationMode.NONE
    if (name, mode) not in _communicators:
        names = sorted({f"{product} ({kind.value})" for product, kind in _communicators})
        raise KeyError(f"no communicator {name!r} for {mode}; there are {', '.join(names)}")
    return _communicators[name, mode]


def get_ub_is_fp8(name: str, use_fp8: bool) -> bool:
    """Return whether the buffer of a product would hold FP8 codes; errors as in `get_ub`."""
    return get_ub(name, use_fp8).is_fp8_ubuf()


def _check_modes(
    use_fp8: Any, modes: list[UserBufferQuantizationMode] | None
) -> list[UserBufferQuantizationMode]:
    """Return the quantization modes; by default, from the deprecated flag."""
    if to_bool("use_fp8", use_fp8):
        warnings.warn(
            "use_fp8 is deprecated; give quantization_modes=[UserBufferQuantizationMode.FP8]",
            DeprecationWarning,
            stacklevel=3,
        )
    if not modes:
        return [UserBufferQuantizationMode.FP8 if use_fp8 else UserBufferQuantizationMode.NONE]
    if not isinstance(modes, list):
        raise TypeError(
            f"quantization_modes={described(modes)} is not a list; give a list of modes"
        )
    for mode in modes:
        if not isinstance(mode, UserBufferQuantizationMode):
            raise TypeError(
                f"quantization_modes holds {described(mode)}; give values of UserBufferQuantizationMode"
            )
    return modes


def _create_communicators(
    tp_size: int, mode: UserBufferQuantizationMode, settings: Mapping[str, Any]
) -> dict[tuple[str, UserBufferQuantizationMode], Communicator]:
    """Return the communicators of one quantization mode."""
    methods = dict(_METHODS)
    scatters = set(_SCATTERS)
    for gradient in ("qkv_dgrad", "fc1_dgrad"):
        method = dict(settings.get(gradient, {})).get("method", BULK)
        if method == BULK:
            continue
        of_weight = gradient.replace("dgrad", "wgrad")
        if of_weight in settings:
            raise ValueError(
                f"ub_cfgs[{of_weight!r}] excludes {gradient}'s method {method!r}, which leaves no bulk communication "
                f"to {of_weight}; remove the entry, or set the method to 'bulk'"
            )
        del methods[of_weight]
        scatters = scatters - {of_weight} | {gradient}
    return {
        (name, mode): _communicator(
            name, methods, name in scatters, tp_size, mode, dict(settings.get(name, {}))
        )
        for name in methods
    }


def _communicator(
    name: str,
    methods: Mapping[str, str],
    reduces: bool,
    tp_size: int,
    mode: UserBufferQuantizationMode,
    settings: dict[str, Any],
) -> Communicator:
    """Return the communicator of one product; TypeError or ValueError for settings that exclude each other."""
    if unknown := sorted(set(settings) - _SETTINGS):
        raise TypeError(
            f"ub_cfgs[{name!r}] has the unknown setting {unknown[0]!r}; known are {sorted(_SETTINGS)}"
        )
    method = settings.get("method", methods[name])
    if method not in (RING, PIPELINE, BULK, EXTERNAL):
        raise ValueError(
            f"ub_cfgs[{name!r}]: method={described(method)} is unknown; choose {RING!r}, {PIPELINE!r}, {BULK!r} or "
            f"{EXTERNAL!r}"
        )
    reduces = to_bool("is_reduce_scatter", settings.get("is_reduce_scatter", reduces))
    if method == PIPELINE and not reduces:
        raise ValueError(
            f"ub_cfgs[{name!r}]: a pipeline reduces and scatters only; use {RING!r} to gather"
        )
    if (method == EXTERNAL) != (methods[name] == EXTERNAL):
        raise ValueError(
            f"ub_cfgs[{name!r}]: method {EXTERNAL!r} is that of proj_wgrad and fc2_wgrad and of no other product"
        )
    fp8 = mode is UserBufferQuantizationMode.FP8
    atomic = to_bool("atomic_gemm", settings.get("atomic_gemm", False))
    if atomic and not fp8:
        raise ValueError(
            f"ub_cfgs[{name!r}]: atomic_gemm=True requires the FP8 mode; set it to False"
        )
    if atomic and method == BULK:
        warnings.warn(
            f"ub_cfgs[{name!r}]: atomic_gemm has no effect with method {BULK!r}", stacklevel=4
        )
        atomic = False
    gathers_codes = fp8 and (not reduces or bool(settings.get("fp8_buf", False)))
    return Communicator(name, method, reduces, tp_size, gathers_codes, atomic)
