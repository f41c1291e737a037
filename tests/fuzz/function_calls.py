"""Bad function calls: quantizers, distributed helpers, reports, and the extension module's flat names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import transformer_engine.pytorch as te
from tests.fuzz.bad_values import (
    COUNT,
    DEVICE,
    FLAG,
    FUNCTION,
    GROUP,
    NAME,
    RECIPE,
    SIZE,
    WORD,
    Call,
    Made,
)
from tests.fuzz.extension_calls import extension_calls
from tests.fuzz.forward_calls import WRONG_KIND, tensor
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.distributed import tensor_parallel

E4M3 = te.DType.kFloat8E4M3
QUANTIZERS: dict[str, Callable[[], te.Quantizer]] = {
    "Float8Quantizer": lambda: te.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3),
    "Float8CurrentScalingQuantizer": lambda: te.Float8CurrentScalingQuantizer(E4M3),
    "Float8BlockQuantizer": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "MXFP8Quantizer": lambda: te.MXFP8Quantizer(E4M3),
    "NVFP4Quantizer": te.NVFP4Quantizer,
}
VALUES = (
    *WRONG_KIND,
    tensor(32, 32, dtype=torch.int64),
    tensor(32, 32).bool(),
    tensor(32, 32, dtype=torch.complex64),
)
RESULT_DTYPE = ("float32", torch.int32, 32, float)
SHAPES = ("ab", 3, (-32, 32), (2.5, 32), None, (32, "32"))


def function_calls() -> list[Call]:
    """Everything that is called and not constructed."""
    return [*_quantizing(), *_distributed(), *_reports(), *extension_calls()]


def _quantizing() -> list[Call]:
    calls = []
    for name, build in QUANTIZERS.items():
        calls += [
            Call(
                f"{name}.quantize",
                _method(build, "quantize", tensor=tensor(32, 32)),
                {"tensor": VALUES, "out": (3, "out", tensor(32, 32)), "dtype": RESULT_DTYPE},
                stateful=True,
            ),
            Call(
                f"{name}.update_quantized",
                _make_quantize_call(build),
                {
                    "src": (*VALUES, tensor(16, 32), tensor(32)),
                    "dst": (3, None, tensor(32, 32)),
                    "noop_flag": (3, "1", [1.0], tensor(3)),
                },
                stateful=True,
            ),
            Call(
                f"{name}.make_empty",
                _method(build, "make_empty", shape=(32, 32)),
                {
                    "shape": SHAPES,
                    "dtype": (*RESULT_DTYPE, None),
                    "device": DEVICE,
                    "requires_grad": FLAG,
                    "pin_memory": FLAG,
                },
            ),
            Call(
                f"{name}.set_usage",
                _method(build, "set_usage"),
                {"rowwise": FLAG, "columnwise": FLAG},
            ),
            Call(f"{name[:-9]} tensor, dequantize", _quantized(build), {"dtype": RESULT_DTYPE}),
        ]
    return calls


def _method(build: Callable[[], Any], method: str, **arguments: Any) -> Callable[[], Made]:
    def make() -> Made:
        owner = build()
        return Made(getattr(owner, method), arguments, [owner])

    return make


def _make_quantize_call(build: Callable[[], te.Quantizer]) -> Callable[[], Made]:
    def make() -> Made:
        quantizer = build()
        target = quantizer.quantize(tensor(32, 32))
        return Made(quantizer.update_quantized, {"src": tensor(32, 32), "dst": target}, [quantizer])

    return make


def _quantized(build: Callable[[], te.Quantizer]) -> Callable[[], Made]:
    def make() -> Made:
        result = build().quantize(tensor(32, 32))
        return Made(result.dequantize, {"dtype": torch.float32}, [result])

    return make


def _distributed() -> list[Call]:
    x = tensor(4, 8)
    inputs = {"inp": WRONG_KIND}
    weight = torch.nn.Parameter(tensor(4, 8))
    attributes = {"partition_dim": (1.5, "0", None), "stride": (0, 1.5, "1", None)}

    def fill(weight: Any = weight, init_method: Any = torch.nn.init.zeros_, **options: Any) -> None:
        tensor_parallel.initialize_affine_weight_gpu(
            weight, init_method, set_tp_attributes=False, **options
        )

    def run_checkpointed(function: Any = torch.relu, x: Any = x, **options: Any) -> Any:
        return te.checkpoint(function, x, **options)

    return [
        Call(
            "checkpoint",
            lambda: Made(run_checkpointed, {}),
            {
                "function": FUNCTION,
                "distribute_saved_activations": FLAG,
                "use_reentrant": FLAG,
                "tp_group": GROUP,
                "get_rng_state_tracker": FUNCTION,
                "context_fn": FUNCTION,
                "debug": FLAG,
            },
        ),
        Call(
            "gather_along_first_dim",
            lambda: Made(distributed.gather_along_first_dim, {"inp": x, "process_group": None}),
            {**inputs, "process_group": GROUP, "async_op": FLAG, "quantizer": (3, "mxfp8")},
        ),
        Call(
            "reduce_scatter_along_first_dim",
            lambda: Made(distributed.reduce_scatter_along_first_dim, {"inp": x, "tp_group": None}),
            {**inputs, "tp_group": GROUP, "async_op": FLAG},
        ),
        Call(
            "allreduce",
            lambda: Made(distributed.allreduce, {"inp": x, "tp_group": None}),
            {**inputs, "tp_group": GROUP, "async_op": FLAG},
        ),
        Call(
            "symmetric_all_reduce",
            lambda: Made(distributed.symmetric_all_reduce, {"inp": x, "tp_group": None}),
            {**inputs, "tp_group": GROUP, "all_reduce_type": NAME, "async_op": FLAG},
        ),
        Call(
            "initialize_affine_weight_gpu",
            lambda: Made(fill, {}),
            {
                "weight": WRONG_KIND,
                "init_method": (*FUNCTION, None),
                "get_rng_state_tracker": FUNCTION,
                **attributes,
            },
        ),
        Call(
            "set_tensor_model_parallel_attributes",
            lambda: Made(_mark_parallel, {"tensor": weight}),
            {
                "tensor": (*WRONG_KIND,),
                "is_parallel": FLAG,
                "dim": (1.5, "0", None),
                "stride": (0, 1.5, "1", None),
            },
        ),
        Call(
            "TensorParallel",
            lambda: Made(tensor_parallel.TensorParallel, {"mode": "column", "size": 2}),
            {"mode": NAME, "size": (0, -1, 2.5, "2", None)},
        ),
        Call("CudaRNGStatesTracker.fork", _tracker, {"name": (WORD, 3, None, ["a"])}),
        Call(
            "CudaRNGStatesTracker.set_states",
            _states,
            {"states": (3, "states", None, {"a": 3}, [1])},
        ),
    ]


def _mark_parallel(tensor: Any, is_parallel: Any = True, dim: Any = 0, stride: Any = 1) -> None:
    twin = (
        torch.nn.Parameter(tensor.detach().clone()) if isinstance(tensor, torch.Tensor) else tensor
    )
    tensor_parallel.set_tensor_model_parallel_attributes(twin, is_parallel, dim, stride)


def _tracker() -> Made:
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("dropout", 7)

    def fork(name: Any) -> None:
        with tracker.fork(name):
            pass

    return Made(fork, {"name": "dropout"}, [tracker])


def _states() -> Made:
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("dropout", 8)
    return Made(tracker.set_states, {"states": tracker.get_states()}, [tracker])


def _reports() -> list[Call]:
    model = te.Linear(16, 16, device="cpu")

    def force(**choice: Any) -> None:
        with te.use_backend(**choice):
            pass

    return [
        Call("explain", lambda: Made(_explain, {}), {"function": FUNCTION, "backward": FLAG}),
        Call(
            "memory_plan",
            lambda: Made(te.memory_plan, {"model": model, "recipe": None, "tokens": 16}, [model]),
            {
                "model": (3, "model", None, torch.relu),
                "recipe": RECIPE,
                "tokens": (0, -1, 2.5, "16", None, True),
                "input_gradient": FLAG,
                "inputs": (3, "x"),
            },
        ),
        Call(
            "graphed",
            lambda: Made(te.graphed, {"module": torch.relu}),
            {"module": (3, "relu", None), "after": SIZE, "signatures": SIZE},
        ),
        Call(
            "make_graphed_callables",
            lambda: Made(_graph_callables, {"modules": torch.nn.Identity()}),
            {
                "modules": (3, "model", None, [model], ()),
                "sample_args": (3, "x", (3,), None),
                "sample_kwargs": ({"a": object}, 3),
                "num_warmup_iters": COUNT,
                "allow_unused_input": FLAG,
                "enabled": FLAG,
                "calibrating": FLAG,
                "amax_reduction_group": GROUP,
                "cache_quantized_params": FLAG,
                "_order": ([0], [1], [-1, 1]),
                "retain_graph_in_backward": FLAG,
                "_reuse_graph_input_output_buffers": (*FLAG, True),
            },
        ),
        Call(
            "get_cpu_offload_context",
            lambda: Made(te.get_cpu_offload_context, {"enabled": False}),
            {
                "enabled": FLAG,
                "offload_activations": FLAG,
                "offload_weights": FLAG,
                "double_buffering": FLAG,
                "manual_synchronization": FLAG,
                "retain_pinned_cpu_buffers": FLAG,
            },
        ),
        Call("deterministic", lambda: Made(_deterministic, {}), {"enabled": FLAG}),
        Call("use_backend", lambda: Made(force, {"gemm": "reference"}), {"gemm": (WORD, 3, None)}),
    ]


def _graph_callables(modules: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return te.make_graphed_callables(modules, **({"sample_args": (tensor(4),)} | options))


def _deterministic(enabled: Any = False) -> None:
    with te.deterministic(enabled):
        pass


def _explain(function: Any = torch.relu, **options: Any) -> Any:
    return te.explain(function, tensor(4), **options)
