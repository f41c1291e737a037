"""value = get(name): every NVTE_* and TE_* environment variable in one table, typed and explained.

Every call to `get` reads the variable, so that a change takes effect in the next call. The recipes read their variables
once, at import; so is `TE_FAST`. The description of a variable without effect begins with "Accepted" and names the
alternative. Longer than other files because it holds the whole table.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Value = bool | int | str | None

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Variable:
    """One environment variable. `kind` is bool, int or str; `choices` are the valid texts, None accepts every text."""

    name: str
    kind: type
    default: Value
    meaning: str
    choices: tuple[str, ...] | None = None

    def parse(self, text: str) -> Value:
        """Parse a text to its typed value; every whole number but 0 switches a flag on, as in NVIDIA's engine.

        Raises:
            ValueError: The variable cannot have this value.
        """
        if self.kind is bool:
            if text.strip().lower() in _TRUE:
                return True
            if text.strip().lower() in _FALSE:
                return False
            try:
                return int(text) != 0
            except ValueError:
                raise ValueError(
                    f"{self.name}={text!r} is not a flag: 0, 1, true, false, yes, no, on or off; set one or unset it"
                ) from None
        if self.kind is int:
            try:
                return int(text)
            except ValueError:
                raise self._invalid(text, "an integer") from None
        if self.choices is not None and text not in self.choices:
            raise self._invalid(
                text, "one of " + ", ".join(repr(choice) for choice in self.choices)
            )
        return text

    def _invalid(self, text: str, allowed: str) -> ValueError:
        return ValueError(f"{self.name}={text!r} is not {allowed}; set it to {allowed} or unset it")


def _flag(name: str, default: bool | None, meaning: str) -> Variable:
    return Variable(name, bool, default, meaning)


def _number(name: str, default: int, meaning: str) -> Variable:
    return Variable(name, int, default, meaning)


def _text(
    name: str, default: str | None, meaning: str, choices: tuple[str, ...] | None = None
) -> Variable:
    return Variable(name, str, default, meaning, choices)


_RECIPE = (
    _flag(
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
        False,
        "Default of Float8CurrentScaling.use_power_2_scales.",
    ),
    _flag(
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", False, "Default of Float8BlockScaling.use_f32_scales."
    ),
    _flag("NVTE_NVFP4_DISABLE_RHT", False, "Default of NVFP4BlockScaling.disable_rht."),
    _flag(
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
        False,
        "Default of NVFP4BlockScaling.disable_stochastic_rounding.",
    ),
    _flag(
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
        False,
        "Default of NVFP4BlockScaling.disable_2d_quantization.",
    ),
    _flag(
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
        False,
        "Default of NVFP4BlockScaling.row_scaled_activation.",
    ),
    _text(
        "NVTE_NVFP4_4OVER6",
        "none",
        "Default of NVFP4BlockScaling.nvfp4_4over6: the tensors whose blocks may map their maximum to 4.",
        ("none", "weights", "activations", "all"),
    ),
    _text(
        "NVTE_NVFP4_4OVER6_E4M3_USE_256",
        "all",
        "Default of NVFP4BlockScaling.nvfp4_4over6_e4m3_use_256: tensors with block scales up to 256, not 448.",
        ("none", "weights", "activations", "all"),
    ),
    _text(
        "NVTE_NVFP4_4OVER6_ERR_MODE",
        "MAE",
        "Default of NVFP4BlockScaling.nvfp4_4over6_err_mode: the error that each block minimizes.",
        ("MAE", "MSE"),
    ),
    _flag(
        "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH",
        False,
        "1: 4over6 measures errors in units of the second-level scale, without multiplying every code by it.",
    ),
    _text(
        "NVTE_BACKWARD_OVERRIDE",
        None,
        "Default of every recipe's backward_override.",
        ("high_precision", "dequantized"),
    ),
)

_QUANTIZATION = (
    _flag(
        "NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION",
        False,
        "1: FP8 products in the forward pass of transformer_engine.jax add partial sums in float32; the backward "
        "pass always does.",
    ),
    _flag(
        "TE_EMULATE",
        None,
        "1: emulate formats that the hardware does not support; unset: only on a machine without a GPU.",
    ),
    _text(
        "NVTE_JAX_CUSTOM_CALLS",
        None,
        "JAX: true or false for all kernels, or Name=false,.. with primitive names of the original.",
    ),
    _flag(
        "TE_JAX_KERNELS",
        False,
        "1: JAX programs traced on a machine without a GPU contain Triton kernels for CUDA, for export.",
    ),
    _flag(
        "NVTE_FP8_AUTO",
        False,
        "1: compute a product without quantization if quantizing its operands takes longer than FP8 saves.",
    ),
    _flag(
        "NVTE_UNFUSED_FP8_UPDATE",
        False,
        "1: the delayed-scaling update rolls all histories, also for tensors that were not quantized.",
    ),
    _flag(
        "NVTE_STRICT_EXTRA_STATE",
        False,
        "1: strict loading of a state dict requires its extra states.",
    ),
    _flag(
        "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE",
        False,
        "Accepted; module extra state is always read through an allow-list, so no permission is needed.",
    ),
)

_ATTENTION = (
    _number(
        "TE_ATTENTION_LOG_EVERY",
        0,
        "n: every n-th attention of a Hugging Face model logs the counters; 0: no log.",
    ),
    _flag("NVTE_FLASH_ATTN", True, "0: never choose a flash-attention backend."),
    _flag("NVTE_FLASH_ATTN_V2", True, "0: never choose flash-attention 2."),
    _flag("NVTE_FLASH_ATTN_V3", True, "0: never choose flash-attention 3."),
    _flag("NVTE_FLASH_ATTN_V4", True, "0: never choose flash-attention 4."),
    _flag("NVTE_FUSED_ATTN", True, "0: never choose the fused attention backend."),
    _flag(
        "NVTE_UNFUSED_ATTN",
        True,
        "0: never choose the attention written in plain PyTorch operations.",
    ),
    _text(
        "NVTE_FUSED_ATTN_BACKEND",
        None,
        "Forces the kind of fused attention: 1 for 16 bit, 2 for FP8 (0, short sequences, is accepted).",
        ("0", "1", "2"),
    ),
    _flag(
        "NVTE_FUSED_ATTN_USE_FAv2_BWD",
        False,
        "Accepted; the backward pass uses the backend of its forward pass.",
    ),
    _flag(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        True,
        "0: only backends whose results are bitwise repeatable; see te.deterministic().",
    ),
    _flag(
        "NVTE_APPLY_QK_LAYER_SCALING",
        False,
        "Accepted; attention scores are float32 and need no division by the layer number.",
    ),
    _flag(
        "NVTE_MASKED_SOFTMAX_FUSION",
        True,
        "Accepted; scale, mask of bool or uint8 and softmax are one operation.",
    ),
    _flag(
        "NVTE_UnfusedDPA_Emulate_FP8",
        False,
        "Accepted; FP8 attention without a supporting kernel is always emulated.",
    ),
    _flag(
        "NVTE_FP8_DPA_BWD",
        None,
        "1: the backward pass of FP8 attention is FP8 too; 0: in high precision; unset: the faster of the two.",
    ),
    _flag(
        "NVTE_DPA_FP8CS_O_in_F16",
        True,
        "Accepted; the output of FP8 attention is rounded to FP8, also under current scaling.",
    ),
    _text(
        "NVTE_DPA_FP8_RECIPE",
        "",
        "Recipe for attention only; empty: the recipe of the surrounding autocast.",
        ("", "F16", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"),
    ),
    _flag(
        "NVTE_DPA_FP8_RECIPE_DPA", False, "fp8_dpa of the recipe that NVTE_DPA_FP8_RECIPE names."
    ),
    _flag(
        "NVTE_DPA_FP8_RECIPE_MHA", False, "fp8_mha of the recipe that NVTE_DPA_FP8_RECIPE names."
    ),
    _text(
        "NVTE_DPA_FP8_FORMAT",
        "HYBRID",
        "fp8_format of the recipe that NVTE_DPA_FP8_RECIPE names.",
        ("HYBRID", "E4M3", "E5M2"),
    ),
    _text(
        "NVTE_DPA_FP8DS_AMAX_ALGO",
        "most_recent",
        "amax_compute_algo of the attention recipe when it is DelayedScaling.",
        ("most_recent", "max"),
    ),
    _number(
        "NVTE_DPA_FP8DS_AMAX_HISTLEN",
        1,
        "amax_history_len of the attention recipe when it is DelayedScaling.",
    ),
    _flag(
        "NVTE_DPA_FP8DS_REDUCE_AMAX",
        True,
        "reduce_amax of the attention recipe when it is DelayedScaling.",
    ),
    _flag(
        "TE_CUDNN_PLAN_CACHE",
        True,
        "1: store cuDNN's attention plans in files under TE_CACHE_DIR, for later processes.",
    ),
    _flag(
        "NVTE_BATCH_MHA_P2P_COMM",
        False,
        "Accepted; it does not change the communication of context parallelism.",
    ),
    _flag("NVTE_DEBUG", False, "1: log the choice of attention backends."),
    _number("NVTE_DEBUG_LEVEL", 0, "Detail of that log: 0 warnings, 1 choices, 2 every reason."),
)

_LAYERS = (
    _flag(
        "NVTE_TORCH_COMPILE",
        True,
        "0: `pytorch.jit.jit_fuser` leaves functions uncompiled; only the caller's torch.compile compiles layers.",
    ),
    _flag(
        "NVTE_BIAS_GELU_NVFUSION", True, "Accepted; the matrix product before GELU adds the bias."
    ),
    _flag(
        "NVTE_BIAS_DROPOUT_FUSION",
        True,
        "Accepted; bias, dropout and residual addition of TransformerLayer are separate operations.",
    ),
    _flag(
        "NVTE_GEMM_GELU_FUSION",
        False,
        "Accepted; LayerNormMLP itself chooses whether a product computes GELU in its epilogue.",
    ),
    _number(
        "NVTE_FWD_LAYERNORM_SM_MARGIN",
        0,
        "fwd_ln_sm_margin of norms created later; no kernel uses it.",
    ),
    _number(
        "NVTE_BWD_LAYERNORM_SM_MARGIN",
        0,
        "bwd_ln_sm_margin of norms created later; no kernel uses it.",
    ),
    _number(
        "NVTE_INF_LAYERNORM_SM_MARGIN",
        0,
        "inf_ln_sm_margin of norms created later; no kernel uses it.",
    ),
    _flag(
        "NVTE_AUTOTUNE",
        False,
        "1: time cuBLASLt's algorithms once per shape and store the choice in a file, as te.autotune() does.",
    ),
    _number("NVTE_EXT_MARGIN_SM", 0, "Accepted; matrix products leave no SMs free."),
    _flag(
        "NVTE_NORM_FWD_USE_CUDNN",
        False,
        "Accepted; each device has one implementation of the norms.",
    ),
    _flag(
        "NVTE_NORM_BWD_USE_CUDNN",
        False,
        "Accepted; each device has one implementation of the norms.",
    ),
    _flag(
        "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE",
        False,
        "Accepted; the 1 of a zero-centered norm weight is added in float32.",
    ),
    _flag(
        "NVTE_USE_CUTLASS_GROUPED_GEMM",
        None,
        "0: GroupedLinear computes one group after another, with the bits of Linear; 1: all groups at once, also on a "
        "CPU; unset: at once on a GPU.",
    ),
    _flag(
        "NVTE_CUTLASS_GROUPED_GEMM_WARN_FALLBACK",
        False,
        "Accepted; no grouped product warns of a fallback.",
    ),
    _flag(
        "NVTE_GROUPED_LINEAR_SINGLE_PARAM",
        False,
        "1: enable single_grouped_weight and _bias of GroupedLinear.",
    ),
    _flag(
        "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", False, "Former name of use_grouped_tensor."
    ),
    _flag("NVTE_CUTEDSL_FUSED_GROUPED_MLP", False, "Accepted; this fusion is not implemented."),
    _flag("NVTE_FUSED_MLA_Q_UPROJ", False, "Accepted; this fusion is not implemented."),
    _flag(
        "NVTE_CPU_OFFLOAD_V1",
        False,
        "1: get_cpu_offload_context returns the original's first interface.",
    ),
    _flag(
        "NVTE_NVTX_ENABLED",
        False,
        "1: `pytorch.utils.nvtx_range_push` and its context manager mark ranges for profilers; layers mark none.",
    ),
    _number("NVTE_PRINT_LAYER_NUMBER", 1, "Accepted; nothing is logged per layer."),
    _number("NVTE_PRINT_RANK", 0, "Accepted; nothing is logged per rank."),
)

_PLATFORM = (
    _text(
        "NVTE_PLUGIN",
        None,
        "Name of a module that transformer_engine.pytorch imports first, and whose load_plugins() it calls. The "
        "extension is then also importable as transformer_engine_torch_nv, if the plugin puts a module of its own into "
        "sys.modules. DotProductAttention does not call flash_attention and get_attention_backend of that module, "
        "which is a RuntimeWarning, as is a failure.",
    ),
    _flag(
        "NVTE_ENABLE_CUTEDSL_BACKEND", False, "Accepted; MXFP8 casts have one kernel, in Triton."
    ),
    _text(
        "NVTE_COMPILE_OP_SIDE_EFFECTS",
        None,
        "Accepted; operators declare their writes to torch.compile.",
    ),
    _flag(
        "NVTE_JAX_EP_NCCL_COMM_FROM_XLA",
        False,
        "Accepted; expert parallelism uses XLA's collectives.",
    ),
    _text(
        "TE_CHECK",
        "0",
        "1: also check sequence lengths, positions, pages and labels on a GPU, without waiting for it; a later "
        "call or te.check() raises the error. 2: each call waits and raises its own error. On a CPU all are checked. "
        "1 and 2: ranks compare their settings in every step, not only in the first.",
        ("0", "1", "2"),
    ),
    _flag(
        "TE_FAST",
        True,
        "0: layers and operations run step by step, without the code that exists for host time alone; read once, at "
        "import.",
    ),
    _flag(
        "TE_BACKWARD_THREADS",
        False,
        "1: run backward passes on torch's threads; unset: in a process with one GPU, on the calling thread.",
    ),
    _text(
        "TE_CACHE_DIR",
        None,
        "Folder for cached measurements and plans; unset: transformer_engine in XDG_CACHE_HOME or ~/.cache.",
    ),
    _text("NVTE_FRAMEWORK", None, "Accepted; PyTorch is imported if it is installed."),
    _flag("NVTE_PROJECT_BUILDING", False, "Accepted; the package loads no shared objects."),
    _flag(
        "NVTE_DISABLE_TRITON_AUTOTUNING",
        False,
        "Accepted; tile sizes of Triton kernels come from tables.",
    ),
    _flag("NVTE_USE_PYTORCH_TRITON", False, "Accepted; both frameworks use the installed triton."),
    _text(
        "NVTE_JAX_CUSTOM_CALLS_RE", None, "Accepted; name the primitives in NVTE_JAX_CUSTOM_CALLS."
    ),
    _flag(
        "NVTE_JAX_ALL_REDUCE_IN_FP32",
        False,
        "Accepted; XLA inserts the sums over devices, in the dtype of the summed values.",
    ),
    _flag(
        "NVTE_FUSED_RING_ATTENTION_USE_SCAN", False, "Accepted; the steps of a ring are unrolled."
    ),
    _flag(
        "NVTE_JAX_ENFORCE_V2_GROUPED_GEMM",
        False,
        "Accepted; the grouped product has one implementation.",
    ),
    _flag("NVTE_USE_FAST_MATH", False, "Accepted; arithmetic is IEEE everywhere."),
    _flag("NVTE_DISABLE_NVRTC", False, "Accepted; nothing is compiled with NVRTC."),
    _flag("NVTE_UB_WITH_MPI", False, "Accepted; overlap uses torch.distributed, not MPI."),
    _flag("NVTE_UBDEBUG", False, "Accepted; communication overlap has no debug mode."),
    _flag("NVTE_AG_P2P_MULTI_ATOMIC", False, "Accepted; products have no atomic counters."),
    _flag("NVTE_RS_STRIDED_ATOMIC", False, "Accepted; products have no atomic counters."),
    _flag("NVTE_ENABLE_NVSHMEM", False, "Accepted; NVSHMEM is not used."),
    _number("NVTE_EP_HANDLE_CACHE_SIZE", 0, "Accepted; expert parallelism has no handle cache."),
    _number("NVTE_TENSOR_HANDLE_POOL_SIZE_MB", 20, "Accepted; tensors have no handles in a pool."),
    _number(
        "NVTE_GROUPED_TENSOR_HANDLE_POOL_SIZE_MB",
        20,
        "Accepted; tensors have no handles in a pool.",
    ),
    _flag(
        "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE",
        False,
        "Accepted; norms are not computed by cuDNN.",
    ),
    _flag("NVTE_DEBUG_NUMERICS", False, "Accepted; te.observe reports statistics of tensors."),
    _flag(
        "NVTE_JAX_ENFORCE_TRITON_AUTOTUNING",
        False,
        "Accepted; tile sizes of Triton kernels come from tables.",
    ),
    _number(
        "NVTE_RADIX_TOPK_THRESHOLD", 16, "Accepted; the choice of experts has one implementation."
    ),
    _number(
        "NVTE_ONNX_KVCACHE_MAX_SEQ_LEN",
        128,
        "Accepted; an export to ONNX has no cache of keys and values.",
    ),
)

GROUPS: dict[str, tuple[Variable, ...]] = {
    "recipes": _RECIPE,
    "quantization": _QUANTIZATION,
    "attention": _ATTENTION,
    "layers": _LAYERS,
    "platform": _PLATFORM,
}
VARIABLES: dict[str, Variable] = {v.name: v for group in GROUPS.values() for v in group}


def variable(name: str) -> Variable:
    """Get a variable's table row; raise ValueError for a name that is not in the table."""
    try:
        return VARIABLES[name]
    except KeyError:
        raise ValueError(
            f"{name!r} is not in the table of environment variables; add it to common/env.py"
        ) from None


def get(name: str) -> Value:
    """Typed value of the variable, or its default if the variable is unset."""
    row = variable(name)
    # Every supported compiler can trace this. Frequent callers cache their decision under generation().
    text = os.environ.get(name)
    return row.default if text is None else row.parse(text)


def check_all() -> None:
    """Raise ValueError for the first table variable that has an invalid value."""
    for name in VARIABLES:
        get(name)


def texts(names: tuple[str, ...]) -> tuple[str | None, ...]:
    """Texts of variables, None if unset, as the key for a cached decision."""
    return tuple(map(os.environ.get, names))


# With private attributes that typeshed does not declare.
_environment: Any = os.environ


def watch(name: str) -> Callable[[], str | bytes | None]:
    """Build a reader for a variable's text, None if it is unset, for a key that every call builds.

    It takes 50 ns, os.environ.get 1.2 us.
    """
    variable(name)
    if not FAST:
        return lambda: os.environ.get(name)
    texts = _environment._data
    key = os.environ.encodekey(name)
    return lambda: texts.get(key)  # no compiler traces a partial of texts.get


def watch_in_eager_mode(name: str) -> Callable[[], str | bytes | None]:
    """`watch` for callers that have already tested whether a compiler is tracing: 20 ns."""
    if not FAST:
        return watch(name)
    variable(name)
    return functools.partial(_environment._data.get, os.environ.encodekey(name))


def generation() -> int:
    """Number that changes whenever a variable that the package reads has changed; part of cache keys.

    os.environ reports no writes, so each call reads it: 0.4 us while no variable is set, 1 us otherwise.
    """
    global _texts, _generation
    texts = () if _none_is_set(_names) else tuple(map(_stored_text, _names))
    if texts != _texts:
        _texts = texts
        _generation += 1
    return _generation


def _readers(fast: bool) -> tuple[frozenset[Any], Callable[..., bool], Callable[..., Any]]:
    """Names of the variables that have an effect, the test that none is set, and the text reader.

    The os.environ interface converts each name, and raises and catches a KeyError for an unset variable. Reading its
    private dict saves 7 % of a small FP8 Linear's host time (193 us instead of 209) and 4 % of a TransformerLayer's
    (`benchmarks/fast_pieces.py`).
    """
    names = frozenset(
        v.name
        for v in VARIABLES.values()
        if not v.meaning.startswith("Accepted") and v.name != "TE_FAST"
    )
    if not fast:
        return names, lambda names: names.isdisjoint(os.environ), os.environ.get
    data: dict[Any, Any] = _environment._data
    stored = frozenset(map(os.environ.encodekey, names))
    return stored, data.keys().isdisjoint, data.get


def renew() -> None:
    """Change generation(), so that decisions keyed by it are repeated."""
    global _generation
    _generation += 1


def use_series(series: int) -> None:
    """Continue generation() in another series of numbers, so that the decisions of both series stay cached."""
    global _generation
    _generation = (_generation & (_SERIES - 1)) + series * _SERIES


def flag(name: str) -> bool:
    """Value of a boolean variable; False if it is unset and has no default."""
    return bool(get(name))


def keep_cublas_repeatable() -> None:
    """Set a fixed cuBLAS workspace size, which torch requires for deterministic results, unless one is set."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def cache_directory() -> Path:
    """The user's cache folder: TE_CACHE_DIR, or the XDG convention.

    The caches hold GPU kernel plans, which exist on Linux alone, where `platformdirs` returns the same folder.
    """
    chosen = get("TE_CACHE_DIR")
    if chosen:
        return Path(str(chosen)).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "transformer_engine"


# Whether the code that exists for host time alone runs; see `pytorch/fast`.
FAST: bool = flag("TE_FAST")

_names, _none_is_set, _stored_text = _readers(FAST)
_texts: tuple[Any, ...] = ()
_generation = 0
_SERIES = 1 << 60  # more than any number of changes
