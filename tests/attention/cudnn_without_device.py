"""Ask cuDNN, without a device, for which of this package's attention graphs it has engines; print JSON.

    PYTHONPATH=. python -m tests.attention.cudnn_without_device [10.0 ..]

{version: {architecture: {case: {pass: "" or the library's reason}}}}; `cudnn_engines.json` has two versions. It needs a
libcuda.so.1 whose functions may all fail, nvidia-cudnn-frontend from 1.32 on, nvidia-cudnn-cu13 and nvidia-cublas. The
graphs come from the backends `cudnn`, `cudnn_fp8` and `cudnn_blocks`, for a device described by its
properties. An engine is a necessary condition: its kernels are neither compiled nor run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.attention.test_cudnn import request
from transformer_engine.common.hardware import ROWS, Hardware, capability_number, hardware_named
from transformer_engine.pytorch.primitives.attention.backends import (
    cudnn,
    cudnn_blocks,
    cudnn_fp8,
    cudnn_plan,
)
from transformer_engine.pytorch.primitives.attention.backends.cudnn_graph import (
    library,
    load_bindings,
)
from transformer_engine.pytorch.primitives.attention.backends.cudnn_plan import Strided
from transformer_engine.pytorch.primitives.attention.call import AttentionCall

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZE = {"heads": 16, "groups": 16, "seqlen_q": 2048, "seqlen_kv": 2048, "batch": 2}
PACKED = {"q_format": "thd", "kv_format": "thd", "mask": "padding_causal", "same_lengths": True}
# The options for every case; heads are (d_qk, d_v).
CASES: dict[str, dict[str, Any]] = {
    **{f"heads {d}": {"head_dim_qk": d, "head_dim_v": d} for d in (64, 128, 192, 256)},
    "heads 192/128": {"head_dim_qk": 192, "head_dim_v": 128},
    "grouped": {"groups": 4},
    "packed": PACKED,
    "deterministic": {"deterministic": True},
    "packed, deterministic": {**PACKED, "deterministic": True},
    "window": {"window": (256, 0)},
    "dropout": {"dropout": 0.1},
    "sink": {"softmax": "learnable"},
    "bias": {
        "mask": "no_mask",
        "bias": "post_scale_bias",
        "bias_shape": (1, 16, 2048, 2048),
        "bias_gradient": True,
    },
    "padding": {"mask": "padding"},
    **{
        f"fp8, heads {name}": {"fp8": "delayed", "head_dim_qk": d, "head_dim_v": v}
        for name, d, v in (
            ("64", 64, 64),
            ("128", 128, 128),
            ("256", 256, 256),
            ("192/128", 192, 128),
        )
    },
    "fp8, deterministic": {
        "fp8": "delayed",
        "head_dim_qk": 128,
        "head_dim_v": 128,
        "deterministic": True,
    },
    **{
        f"mxfp8, {name}": {"fp8": "mxfp8", "head_dim_qk": d, "head_dim_v": v, **options}
        for name, d, v, options in (
            ("heads 64", 64, 64, {}),
            ("heads 128", 128, 128, {}),
            ("heads 256", 256, 256, {}),
            ("heads 192/128", 192, 128, {}),
            ("grouped", 128, 128, {"groups": 4}),
            ("window", 128, 128, {"window": (256, 0)}),
            ("deterministic", 128, 128, {"deterministic": True}),
        )
    },
}


def attention_call(case: str, hardware: Hardware) -> AttentionCall:
    """Attention call for a case on a GPU from the table."""
    options = {**SIZE, "head_dim_qk": 128, "head_dim_v": 128, **CASES[case]}
    return request(hardware=hardware, **options)


def properties(hardware: Hardware) -> dict[str, Any]:
    """Graph arguments for a device that does not exist."""
    blocks = {2048: 32, 1536: 16 if hardware.architecture == "8.6" else 24}[hardware.threads]
    facts = {
        "deviceVer": 10 * capability_number(hardware),
        "driverVer": 13000,
        "multiProcessorCount": 128,
        "maxSharedMemoryPerBlockOptin": hardware.shared_memory,
        "maxSharedMemoryPerSM": hardware.shared_memory + 1024,
        "maxSharedMemoryPerBlock": 49152,
        "reservedSharedMemoryPerBlock": 1024,
        "maxThreadsPerSM": hardware.threads,
        "maxThreadsPerBlock": 1024,
        "maxCtasPerSM": blocks,
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": 65536,
        "maxRegistersPerSM": 65536,
        "smClockRateKHz": 1_900_000,
        "memClockRateKHz": 4_000_000,
        "memoryBusWidth": 512,
        "l2CacheSize": 64 << 20,
        "warpSize": 32,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "cudaDeviceId": 0,
        "totalGlobalMem": 64 << 30,
        "deviceName": hardware.title,
    }
    described = library().create_device_properties(json.dumps(facts))
    return {"device_property": described, "sm_version": capability_number(hardware)}


def contiguous_strides(call: AttentionCall) -> Strided:
    """Strides for a call with contiguous tensors."""
    q = cudnn._format_strides(call, True, call.heads, call.head_dim_qk)
    k = cudnn._format_strides(call, False, call.groups, call.head_dim_qk)
    v = cudnn._format_strides(call, False, call.groups, call.head_dim_v)
    bias = cudnn.contiguous_strides(call.bias_shape) if call.bias_shape else None
    tokens = (cudnn.bucket_tokens(call.batch * size) for size in (call.seqlen_q, call.seqlen_kv))
    return Strided(q, k, v, None, bias, *tokens)


def reason(describe: Callable[..., Any], device: dict[str, Any], *arguments: Any) -> str:
    """Library's reason why it has no engine for a graph, or the empty text."""
    try:
        describe(*arguments, **device).supported()
    except Exception as error:  # the reasons are the result of this program
        return " ".join(str(error).split())[:120] or type(error).__name__
    return ""


def engines(hardware: Hardware) -> dict[str, dict[str, str]]:
    """{case: {pass: reason}} on a GPU from the table."""
    results: dict[str, dict[str, str]] = {}
    device = properties(hardware)
    for case in CASES:
        call = attention_call(case, hardware)
        strided = contiguous_strides(call)
        grad_output = cudnn._format_strides(call, True, call.heads, call.head_dim_v)
        backward = strided._replace(grad_output=grad_output)
        if call.fp8 is None:
            passes = (cudnn_plan.describe_forward, ()), (cudnn_plan.describe_backward, ())
        elif call.fp8 == "mxfp8":
            passes = (cudnn_blocks.describe_forward, ()), (cudnn_blocks.describe_backward, ())
        else:
            passes = (
                (cudnn_fp8.describe_forward, (E4M3, E4M3)),
                (cudnn_fp8.describe_backward, (E4M3, E4M3, E5M2, E5M2)),
            )
        results[case] = {
            name: reason(describe, device, call, argument, *dtypes)
            for name, (describe, dtypes), argument in zip(
                ("forward", "backward"), passes, (strided, backward), strict=True
            )
        }
    return results


def main(architectures: list[str]) -> None:
    rows = [hardware_named("nvidia", name) for name in architectures]
    rows = rows or [row for row in ROWS if row.vendor == "nvidia"]
    assert load_bindings(library()) is not None
    encoded = library().backend_version()
    version = f"{encoded // 10_000}.{encoded // 100 % 100}.{encoded % 100}"
    results = {row.architecture: engines(row) for row in rows}
    print(json.dumps({version: results}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
