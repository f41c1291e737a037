"""GPU capabilities: one row per vendor and architecture, which backends query by capability name.

`lacks` returns the reason that a row has no such capability, or None:

    reason = hardware.lacks("mxfp8 products")

No other module compares compute capabilities. ROCm reports gfx942 as compute capability 9.4, so the key of a row is the
vendor and the architecture. NVIDIA's assembler shows which instructions a row has; the limits come from the CUDA C++
Programming Guide. `docs/hardware.json` lists the backends of matrix products per row.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

Capability = Literal[
    # Kernels and matrix instructions.
    "triton kernels",  # Triton compiles for it
    "bf16 products",
    "cublaslt",  # the library, which nvmath-python calls
    "fp8 products",  # E4M3 x E4M3 and E4M3 x E5M2
    "fp8 products in all layouts",  # any contiguous axis, by cuBLASLt and NVIDIA's rule
    "fp8 products in all layouts by xla",  # NVIDIA's rule for JAX
    "fp8 block products",  # by cuBLASLt: 1x128 and 128x128 blocks with float32 scales
    "mxfp8 products",
    "nvfp4 products",
    "mxfp8 products in all layouts",  # any contiguous axis, without a transposed copy
    "hopper instructions",  # wgmma, for kernels in Gluon
    "tensor memory",  # tcgen05: products with at least 128 rows; accumulators and scales in tensor memory
    # Casts.
    "cast kernels",  # kernels that round to FP8 and FP4 codes, by an instruction or by integer arithmetic
    "fp8 casts",  # float32 to FP8 in one instruction, which rounds once
    "triton fp8 casts",  # the same, as Triton's own conversion
    "fp4 casts",
    "stochastic casts",
    # Memory and launches.
    "dependent launch",  # programmatic dependent launch
    "copy engine",  # multi-dimensional tensors by TMA
    # Attention libraries.
    "cudnn attention",
    "cudnn packed attention",  # THD through jax.nn
    "cudnn deterministic packed attention",
    "cudnn fp8 attention",
    "cudnn deterministic attention",  # bit-equal gradients in every run
    "cudnn cached attention",  # keys and values from earlier steps
    "cudnn ragged statistics",  # logarithms for packed sequences without padding, which gradients read
    "cudnn gradients of equal wide heads",  # equal head sizes between 128 and 256
    "cudnn fp8 gradients of all heads",  # head sizes up to 128 other than 128
    "cudnn fp8 gradients of two sizes",  # 192/128 heads
    "cudnn mxfp8 attention",
    "cudnn linear attention",  # gated delta rules of the cuDNN frontend
    "torch cudnn attention",
    "torch flash attention",
    "early flash attention 2",  # releases before 2.7.3
    "flash attention 2 of wide heads",  # gradients for heads above 192 with dropout, or before 2.5.5
    "flash attention 3",
    "flash attention 4",
    "early flash attention 4",  # releases before 4.0.0b36
    "flash attention 4 of a cache",
    "flash attention 4 of wide heads",  # head sizes above 128 other than 192/128
    "flash attention 4 gradients of scores",  # gradients with a score function, such as a softcap
    # Availability of NVIDIA's recipes.
    "bf16 recipe",
    "fp8 recipe",
    "fp8_block_scaling recipe",
    "mxfp8 recipe",
    "nvfp4 recipe",
    "current scaling by default",
]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)


@dataclass(frozen=True, slots=True, eq=False)
class Hardware:
    """A GPU architecture; rows compare by identity.

    Attributes:
        vendor: "nvidia", "amd", or "none" without a GPU.
        architecture: The compute capability, such as "9.0", or AMD's target name, such as "gfx942".
        gpus: GPU names, as their vendor spells them.
        capabilities: `Capability` names; a tuple, because torch.compile cannot trace `in` for a constant's set.
        shared_memory: Bytes of shared memory that one program may use.
        threads: Threads per multiprocessor.
        tensor_memory: Tensor memory columns, each 128 x 32 bits; 0 without tensor memory.
        cudnn: First cuDNN version whose attention supports it; zeros for all versions that the package supports.
        cudnn_fp8: First cuDNN version whose FP8 attention supports it; zeros likewise.
        triton: First Triton release whose assembler has the architecture; zeros without a GPU.
        scaled_dot: First Triton release whose tl.dot_scaled becomes the native instruction.
        portable_ptx: Newest PTX version, (major, minor), of kernels that XLA's assembler reads instead of Triton's.
        backward_head: Largest head size in cuDNN's attention gradient.
        likeness: Architecture whose capabilities an unlisted one is assumed to have; "" for a row in the table.
        remark: Why it lacks the formats of recipes, for messages.
    """

    vendor: str
    architecture: str
    gpus: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    shared_memory: int = 48 << 10
    threads: int = 1024
    tensor_memory: int = 0
    backward_head: int = 0
    triton: tuple[int, int] = (0, 0)
    scaled_dot: tuple[int, int] = (3, 6)
    cudnn: tuple[int, int, int] = (0, 0, 0)
    cudnn_fp8: tuple[int, int, int] = (0, 0, 0)
    portable_ptx: tuple[int, int] = (8, 8)
    likeness: str = ""
    remark: str = ""

    def has(self, capability: Capability) -> bool:
        """Whether the architecture has a capability."""
        return capability in self.capabilities

    def lacks(self, capability: Capability) -> str | None:
        """Reason that a capability is missing, or None."""
        if self.has(capability):
            return None
        return _reason(self, capability)

    @property
    def title(self) -> str:
        """Architecture name in messages."""
        if self.vendor == "none":
            return "no GPU"
        title = f"{'compute capability' if self.vendor == 'nvidia' else 'AMD'} {self.architecture}"
        return f"{title} (not in the table, treated as {self.likeness})" if self.likeness else title

    @property
    def target(self) -> int | str:
        """Architecture in Triton's notation: 90 for compute capability 9.0."""
        return capability_number(self) if self.vendor == "nvidia" else self.architecture

    def __reduce__(self) -> tuple[object, ...]:
        return hardware_named, (self.vendor, self.architecture)


_WIDE = {"flash attention 2 of wide heads"}
_ANY = frozenset({"triton kernels", "bf16 products", "early flash attention 2"}) | _WIDE
_AMD_ANY = _ANY | {"bf16 recipe"}
_AMPERE = _ANY | {
    "cublaslt",
    "cast kernels",
    "bf16 recipe",
    "cudnn attention",
    "torch flash attention",
    "cudnn deterministic attention",
    "cudnn cached attention",
}
_SMALL_AMPERE = _AMPERE - _WIDE
_ADA = (_SMALL_AMPERE | {"fp8 products", "fp8 casts", "fp8 recipe"}) - {"cudnn cached attention"}
_AFTER_ADA = _ADA | {
    "cudnn cached attention",
    "triton fp8 casts",
    "dependent launch",
    "copy engine",
    "cudnn packed attention",
    "torch cudnn attention",
    "fp8_block_scaling recipe",
}
_HOPPER = _AFTER_ADA | _WIDE
_HOPPER |= {
    "fp8 block products",
    "hopper instructions",
    "cudnn ragged statistics",
    "cudnn deterministic packed attention",
    "cudnn fp8 attention",
    "cudnn gradients of equal wide heads",
    "flash attention 3",
    "flash attention 4",
    "early flash attention 4",
    "flash attention 4 of a cache",
    "flash attention 4 of wide heads",
    "flash attention 4 gradients of scores",
}
_BLACKWELL = _AFTER_ADA - {"early flash attention 2"}
_BLACKWELL |= {
    "mxfp8 products",
    "nvfp4 products",
    "fp4 casts",
    "fp8 products in all layouts by xla",
    "nvfp4 recipe",
    "flash attention 4",
}
_DATA_CENTER = _BLACKWELL | _WIDE
_DATA_CENTER |= {
    "flash attention 4 of a cache",
    "flash attention 4 gradients of scores",
    "fp8 products in all layouts",
    "mxfp8 products in all layouts",
    "tensor memory",
    "mxfp8 recipe",
    "cudnn ragged statistics",
    "cudnn fp8 attention",
    "cudnn fp8 gradients of all heads",
}
_B200 = _DATA_CENTER | {
    "early flash attention 4",
    "stochastic casts",
    "cudnn deterministic packed attention",
    "cudnn fp8 gradients of two sizes",
    "cudnn linear attention",
    "cudnn mxfp8 attention",
}
_WORKSTATION = (_BLACKWELL | {"current scaling by default"}) - {
    "cudnn deterministic attention",
    "cudnn cached attention",
}

_SMALL, _LARGE = 101376, 232448  # shared memory in bytes
_ANY_PTX = (99, 0)
_NOT_RUN = "no kernel of FP8 codes was run on it"


def _nvidia(
    architecture: str,
    gpus: tuple[str, ...],
    capabilities: frozenset[str],
    shared_memory: int,
    threads: int,
    tensor_memory: int = 0,
    backward_head: int = 256,
    triton: tuple[int, int] = (3, 6),
    scaled_dot: tuple[int, int] = (3, 6),
    cudnn: tuple[int, int, int] = (0, 0, 0),
    cudnn_fp8: tuple[int, int, int] = (0, 0, 0),
    portable_ptx: tuple[int, int] = (8, 8),  # of CUDA 12.9
) -> Hardware:
    names = tuple(sorted(capabilities))
    sizes = shared_memory, threads, tensor_memory, backward_head
    versions = triton, scaled_dot, cudnn, cudnn_fp8, portable_ptx
    return Hardware("nvidia", architecture, gpus, names, *sizes, *versions)


# fmt: off
ROWS: tuple[Hardware, ...] = (
    _nvidia("8.0", ("A100", "A30", "A800"), _AMPERE, 166912, 2048, backward_head=128),
    _nvidia("8.6", ("RTX 3090", "RTX 3080", "RTX A6000", "A40", "A10"), _SMALL_AMPERE, _SMALL, 1536, backward_head=128),
    _nvidia("8.9", ("RTX 4090", "RTX 4080", "RTX 4070", "L40S", "L40", "L4", "RTX 6000 Ada"), _ADA, _SMALL, 1536,
            backward_head=128),
    _nvidia("9.0", ("H100", "H200", "H800", "H20", "GH200"), _HOPPER, _LARGE, 2048),
    _nvidia("10.0", ("B200", "GB200"), _B200, _LARGE, 2048, 512),
    _nvidia("10.3", ("B300", "GB300"), _B200, _LARGE, 2048, 512),
    # The assembler of Triton 3.6 has no sm_110a, which PTX 9.0 of CUDA 13.0 introduced.
    _nvidia("11.0", ("Thor",), _DATA_CENTER, _LARGE, 1536, 512, backward_head=128, triton=(3, 7),
            scaled_dot=(3, 7), cudnn_fp8=(9, 24, 0), portable_ptx=(9, 0)),
    _nvidia("12.0", ("RTX 5090", "RTX 5080", "RTX 5070", "RTX 5060", "RTX PRO 6000", "RTX PRO 5000", "RTX PRO 4500"),
            _WORKSTATION, _SMALL, 1536, backward_head=128, cudnn=(9, 18, 1)),
    _nvidia("12.1", ("DGX Spark", "GB10"), _WORKSTATION, _SMALL, 1536, backward_head=128, scaled_dot=(3, 8),
            cudnn=(9, 18, 1)),
    # No kernel in this package was run on either.
    Hardware(
        "amd",
        "gfx942",
        ("MI300X", "MI300A", "MI325X"),
        tuple(sorted(_AMD_ANY)),
        64 << 10,
        2048,
        remark="its FP8 codes (fnuz) differ from those of the recipes",
    ),
    Hardware(
        "amd",
        "gfx950",
        ("MI350X", "MI355X"),
        tuple(sorted(_AMD_ANY)),
        160 << 10,
        2048,
        remark=_NOT_RUN,
    ),
)
# fmt: on
NO_GPU = Hardware("none", "")
TABLE: dict[tuple[str, str], Hardware] = {
    (row.vendor, row.architecture): row for row in (*ROWS, NO_GPU)
}
_NVIDIA = tuple(row for row in ROWS if row.vendor == "nvidia")
_AMD = tuple(row for row in ROWS if row.vendor == "amd")


def nvidia(major: int, minor: int) -> Hardware:
    """Get the row for a compute capability."""
    return hardware_named("nvidia", f"{major}.{minor}")


def hardware_named(vendor: str, architecture: str) -> Hardware:
    """Get an architecture's row; an unlisted one has the capabilities of its nearest older relative.

    Args:
        vendor: "nvidia", "amd" or "none".
        architecture: The compute capability, "9.0", or AMD's target, "gfx942".
    """
    if (vendor, architecture) not in TABLE:
        TABLE[vendor, architecture] = _relative(vendor, architecture)
    return TABLE[vendor, architecture]


def _relative(vendor: str, architecture: str) -> Hardware:
    if vendor == "amd":
        newest = _AMD[-1].architecture if architecture.startswith("gfx95") else _AMD[0].architecture
        nearest = hardware_named("amd", newest)
    else:
        older = [row for row in _NVIDIA if _version(row.architecture) <= _version(architecture)]
        if not older:
            return Hardware("nvidia", architecture)
        nearest = older[-1]
    capabilities = set(nearest.capabilities)
    if vendor == "nvidia" and _version(architecture)[0] > _version(_NVIDIA[-1].architecture)[0]:
        # NVIDIA's engine expects products in all layouts on every later generation.
        capabilities |= {"fp8 products in all layouts"}
    return replace(
        nearest,
        architecture=architecture,
        gpus=(),
        capabilities=tuple(sorted(capabilities)),
        likeness=nearest.architecture,
        portable_ptx=_ANY_PTX,  # its first version is unknown
        remark=_NOT_RUN if vendor == "amd" else "",
    )


def hardware_of_gpu(name: str) -> Hardware | None:
    """Get the row of a GPU by its name, such as "NVIDIA GeForce RTX 4090"; None for an unlisted name."""
    words = name.lower().replace("-", " ").split()
    candidates = [(gpu.lower().split(), row) for row in ROWS for gpu in row.gpus]
    matches = [(len(gpu), row) for gpu, row in candidates if _contains(words, gpu)]
    return max(matches, key=lambda pair: pair[0])[1] if matches else None


def find_rows(capability: Capability) -> tuple[Hardware, ...]:
    """NVIDIA rows that have a capability, in order of compute capability."""
    return tuple(row for row in _NVIDIA if row.has(capability))


def capability_number(row: Hardware) -> int:
    """Ten times a compute capability: 90 for 9.0; 94 for gfx942, as ROCm reports it."""
    if row.vendor == "amd":
        return int(row.architecture[3:-1])
    major, minor = _version(row.architecture)
    return 10 * major + minor


def capability_limits(capability: Capability) -> tuple[Hardware, Hardware | None]:
    """Oldest NVIDIA row with a capability, and the first row after the newest one with it, or None."""
    having = find_rows(capability)
    later = _NVIDIA[_NVIDIA.index(having[-1]) + 1 :]
    return having[0], later[0] if later else None


def is_older(row: Hardware, other: Hardware) -> bool:
    """Whether a compute capability is lower than another one."""
    return _version(row.architecture or "0.0") < _version(other.architecture)


@functools.cache
def driver_version() -> str | None:
    """NVIDIA driver version, such as "580.65.06"; None without a driver."""
    kernel = Path("/proc/driver/nvidia/version")
    if kernel.is_file():
        version = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", kernel.read_text(encoding="utf-8"))
        return version.group(1) if version else "of unknown version"
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (
        completed.stdout.split()[0]
        if completed.returncode == 0 and completed.stdout.split()
        else None
    )


def _contains(words: list[str], part: list[str]) -> bool:
    return any(
        words[start : start + len(part)] == part for start in range(len(words) - len(part) + 1)
    )


def _version(architecture: str) -> tuple[int, int]:
    major, minor = architecture.split(".")
    return int(major), int(minor)


@functools.cache
def _reason(row: Hardware, capability: Capability) -> str:
    if row is NO_GPU:
        return f"there is no GPU, which {capability} need"
    having = [each.architecture for each in find_rows(capability)]
    every = [each.architecture for each in _NVIDIA]
    begin, end = every.index(having[0]), every.index(having[-1]) + 1
    if having != every[begin:end]:
        places = f"{', '.join(having[:-1])} and {having[-1]}"
    elif end == len(every):
        places = f"{having[0]} and higher"
    else:
        places = having[0] if len(having) == 1 else f"{having[0]} to {having[-1]}"
    remark = (
        f" ({row.remark})" if row.remark and capability.startswith(("fp", "mxfp8", "nvfp4")) else ""
    )
    return (
        f"{row.title} has no {capability}{remark}; NVIDIA GPUs of compute capability {places} have"
    )
