"""Compile the kernel that appends to a key-value cache, without a GPU, and print its PTX size as JSON."""

from __future__ import annotations

import json

from tests.kernels.compile_cases import compile_ptx
from transformer_engine.common.kernels import kv_cache

POINTERS = dict.fromkeys(("new_k", "new_v", "k_cache", "v_cache"), "*bf16")
POINTERS |= dict.fromkeys(("page_table", "cu_new", "cu_cached"), "*i32")


def main() -> None:
    sizes = {}
    for capability in (80, 100):
        for packed, paged in ((False, False), (True, True)):
            launch = kv_cache.append(
                64,
                16,
                8,
                (128, 96),
                (0, 1024, 128) * 2,
                packed=packed,
                capacity=4096,
                page_size=64,
                pages=4096,
                table_stride=64,
            )
            pointers = POINTERS if paged else {**POINTERS, "page_table": None}
            ptx, _ = compile_ptx(launch, pointers, capability)
            sizes[f"sm{capability}-packed={packed}-paged={paged}"] = len(ptx)
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
