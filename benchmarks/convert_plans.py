"""Steps of compiled models under several choices of converted layers (not timed by te.convert)."""

import argparse
import gc
import json
import statistics
import time

import torch
from convert_models import SIZES, make_batch, make_model
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

PLANS = {
    "bf16": None,
    "torchao": None,
    "all": ["layers.*"],
    "mlp": ["layers.?.w[123]", "layers.??.w[123]", "layers.*.fc?"],
    "large": ["layers.?.w[123]", "layers.??.w[123]", "layers.*.fc?", "layers.*.wq", "layers.*.wo"],
}


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--size", nargs="+", default=["llama-1b", "dit-xl", "vit-l"])
    options.add_argument("--plans", nargs="+", default=list(PLANS))
    options.add_argument("--seconds", type=float, default=1e9)
    arguments = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begin_all = time.perf_counter()
    for size in arguments.size:
        for plan in arguments.plans:
            if time.perf_counter() - begin_all > arguments.seconds:
                continue
            try:
                with sdpa_kernel(
                    [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
                    set_priority=True,
                ):
                    measure(size, plan, device)
            except Exception as error:  # reported, and the next plan runs
                print(
                    json.dumps({"size": size, "plan": plan, "error": repr(error)[:1500]}),
                    flush=True,
                )
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            torch._dynamo.reset()


def measure(size, plan, device):
    shape = SIZES[size]
    torch.manual_seed(0)
    batch = make_batch(shape, device)
    model = make_model(shape, device)
    begin = time.perf_counter()
    if plan == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model.layers, config=Float8LinearConfig.from_recipe_name("tensorwise")
        )
    elif plan != "bf16":
        te.convert(model, Float8CurrentScaling(), include=PLANS[plan], compiled=True, verbose=False)
    for layer in model.layers:
        layer.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    times, host = [], []
    batch_loss = model(*batch)
    batch_loss.backward()
    norms = [parameter.grad.float().norm().item() for parameter in model.layers[0].parameters()]
    print(
        "gradient norms", [f"{norm:.3g}" for norm in norms], "loss", batch_loss.item(), flush=True
    )
    optimizer.zero_grad()
    for step in range(15):
        if step == 4 and device == "cuda":
            print("first steps", time.perf_counter() - begin, flush=True)
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        host.append(time.perf_counter() - start)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    found = {
        "size": size,
        "plan": plan,
        "ms": 1e3 * statistics.median(times[4:]),
        "host_ms": 1e3 * statistics.median(host[4:]),
        "loss": loss.item(),
        "gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0,
    }
    print(json.dumps(found), flush=True)
    if device == "cuda":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(2):
                model(*batch).backward()
            torch.cuda.synchronize()
        rows = sorted(profiled.key_averages(), key=lambda row: -row.self_device_time_total)[:14]
        for row in rows:
            print(
                f"   {row.self_device_time_total / 2000:8.3f} ms {row.count / 2:6.0f} {row.key[:110]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
