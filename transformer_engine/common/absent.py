"""Errors for absent names of the original: `import` and `from ... import` report the reason and the replacement.

Python raises its own message for a failed import and drops the message from a module's `__getattr__`. Two hooks replace
it: a finder at the end of `sys.meta_path` (`import transformer_engine.paddle`), and a `__getattr__` that recognizes
`from module import name`. All other look-ups behave as without the hooks: `hasattr` sees an AttributeError, `find_spec`
returns None, and callers catch the same exception types. Another finder loads modules that have moved.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from opcode import opmap
from types import ModuleType
from typing import Any, NoReturn

from .._version import __version__
from .documentation import page

FRAMEWORKS = ("transformer_engine.pytorch", "transformer_engine.jax")
PACKAGES = ("transformer_engine", "transformer_engine_torch", "transformer_engine_jax")

# Reason and replacement for absent names of the original. A key covers the names that start with it; a key with a
# wildcard covers the names that it matches in whole.
ABSENT = {
    **dict.fromkeys(
        (
            "transformer_engine.jax.MajorShardingType",
            "transformer_engine.jax.ShardingResource",
            "transformer_engine.jax.ShardingType",
        ),
        "of the original's first versions; name the axes of the mesh in a MeshResource",
    ),
    "transformer_engine.jax.cpp_extensions.[!B]*Primitive": "a JAX primitive of the original's custom calls; call the "
    "functions of transformer_engine.jax.cpp_extensions, and disable kernels with NVTE_JAX_CUSTOM_CALLS",
    "transformer_engine.jax.quantize.?*QuantizeConfig": "one settings class per recipe; "
    "get_quantize_config_with_recipe returns a QuantizeConfig for every recipe",
    "transformer_engine.jax.quantize.*_padding_*_scale_inv": "scale_inv is stored without padding; leave the call "
    "out, or call the functions of quantize.helper",
    "transformer_engine_jax.get_*_workspace_size*": "sizes the scratch buffers of the original's custom calls; XLA "
    "allocates those of the functions in transformer_engine.jax.cpp_extensions",
    "transformer_engine_jax.*pack_*": "packs the binary descriptor of one of the original's custom calls; pass the "
    "settings as arguments of the functions in transformer_engine.jax.cpp_extensions",
    "transformer_engine_jax.*cgemm_communicator*": "the communicator of the original's collective products; call "
    "transformer_engine.jax.cpp_extensions.collective_gemm_bootstrap",
    **dict.fromkeys(
        ("transformer_engine_jax.ep_*", "transformer_engine_jax.*_ep_*"),
        "the communicator of the original's expert parallelism; call transformer_engine.jax.ep.ep_bootstrap",
    ),
    "transformer_engine.jax.moe.record_ep_bootstrap_signature_for_moe": "te.moe.moe does not read the settings of "
    "ep_bootstrap; leave it out",
    "transformer_engine.jax.update_fp8_metas": "of the original's first versions; the gradient of the collection of "
    "scales is its next value, see te.update_collections",
    "transformer_engine.jax.moe.PermutationBackend": "there is one implementation of the permutation; leave the "
    "argument out",
    "transformer_engine.tensorflow": "discontinued by the original; use transformer_engine.pytorch, or .jax",
    "transformer_engine.paddle": "discontinued by the original; use transformer_engine.pytorch, or .jax",
    "transformer_engine.common.load_framework_extension": "no shared library has to be loaded; import the framework's "
    "package, transformer_engine.pytorch or transformer_engine.jax",
    **dict.fromkeys(
        (
            "transformer_engine.pytorch.custom_recipes.utils",
            "transformer_engine.pytorch.custom_recipes.reference_utils",
        ),
        "helpers of the original's reference quantizers; use torch's functions, and those of "
        "custom_recipes.reference_nvfp4",
    ),
    "transformer_engine.pytorch.custom_recipes": "an example of the original; pass recipe.CustomRecipe a function "
    "built from custom_recipes.quantizer_factories, and from te.HybridQuantizer if the products of a layer differ",
    **dict.fromkeys(
        (
            "transformer_engine.pytorch.attention.FlashAttention",
            "transformer_engine.pytorch.attention.FusedAttention",
            "transformer_engine.pytorch.attention.UnfusedDotProductAttention",
        ),
        "te.DotProductAttention chooses its backend; te.explain reports it",
    ),
    "transformer_engine.pytorch.attention.dot_product_attention.utils.FusedAttentionParams": "the arguments of one "
    "library call; pass AttentionParams to transformer_engine_torch.get_fused_attn_backend",
    "transformer_engine.pytorch.attention.get_alibi": "pass te.DotProductAttention "
    'core_attention_bias_type="alibi", with alibi_slopes or without',
    "transformer_engine.pytorch.dot_product_attention": "the package is transformer_engine.pytorch.attention."
    "dot_product_attention; use te.DotProductAttention and te.InferenceParams",
    "transformer_engine_torch.te_general_grouped_gemm_discrete_*": "an earlier name; call "
    "te_general_grouped_gemm_for_discrete_in or te_general_grouped_gemm_for_discrete_out",
    "transformer_engine_torch.grouped_mlp_experimental": "parts of a kernel for Blackwell; use te.ops.GroupedLinear "
    "and a scaled activation in a te.ops.Sequential",
    **dict.fromkeys(
        (
            "transformer_engine.pytorch.attention.dot_product_attention.context_parallel.AttnFuncWithCP*",
            "transformer_engine.pytorch.attention.dot_product_attention.context_parallel.get_seq_chunk_ids_*",
            "transformer_engine.pytorch.attention.dot_product_attention.context_parallel.reorder_seq_chunks_*",
        ),
        "an internal step of the original's context parallelism; pass cp_group to te.DotProductAttention, or call its "
        "set_context_parallel_group",
    ),
    "transformer_engine.pytorch._extra_state.CheckpointExtraStatePolicy": "the original's choice of extra state "
    "that is unpickled; it is read through an allow-list, see should_load_extra_state_pickle",
    **dict.fromkeys(
        (
            "transformer_engine.pytorch.module._common.can_reconstruct_wgrad_input_from_original",
            "transformer_engine.pytorch.module._common.set_quantizer_usage_for_wgrad_all_gather",
        ),
        "an internal step of the original's layers; set the usages of a quantizer with set_usage()",
    ),
    "transformer_engine.pytorch.module.base.fill_userbuffers_buffer_for_all_gather": "a step of userbuffers; layers "
    "gather by themselves, see te.initialize_ub",
    "transformer_engine.pytorch.module._split_quantization": "a part of the original's GroupedLinear; call "
    "transformer_engine_torch.split_quantize",
    "transformer_engine.pytorch.distributed.use_reentrant_activation_recompute": "a flag of the original's checkpoint; "
    "pass use_reentrant to te.checkpoint",
    "transformer_engine.pytorch.cpu_offload_v1.is_current_layer_offloaded": "a flag of the original's first offload; "
    "call is_cpu_offload_enabled",
    "transformer_engine.pytorch.utils.mark_grouped_tensor": "an annotation for the original's offload of groups; leave "
    "the call out",
    "transformer_engine.pytorch.dynamo.custom_op": "a part of the original's support of torch.compile; layers compile "
    "without it",
    "transformer_engine.common._get_shared_object_file": "there is no shared library; leave the call out",
}


def sentence(name: str) -> str:
    """Error message for an absent dotted name: the reason and the replacement."""
    reason = _find_reason(name)
    if reason is not None:
        return f"{name} is not in this package, {__version__}: {reason}"
    parent, _, last = name.rpartition(".")
    module = sys.modules.get(parent)
    public = (
        []
        if module is None
        else [candidate for candidate in dir(module) if not candidate.startswith("_")]
    )
    same = [candidate for candidate in public if candidate.lower() == last.lower()]
    close = same or difflib.get_close_matches(last, public, n=1, cutoff=0.75)
    near = close[0] if close else None
    suggestion = f"did you mean {near!r}? " if near else ""
    return (
        f"{parent} has no {last!r} in this package, {__version__}; {suggestion}{page('support')} lists the "
        f"supported features, and dir({parent}) the names"
    )


def _find_reason(name: str) -> str | None:
    """Text of the row that covers a name, or of a row for the same framework with the same last part."""
    for start, words in ABSENT.items():
        if f"{name}.".startswith(f"{start}.") or fnmatchcase(name, start):
            return words
    parent, _, last = name.rpartition(".")
    # The original exports a name from more modules than its row gives, and moved some between releases.
    for start, words in ABSENT.items():
        framework = ".".join(start.split(".")[:2])
        if fnmatchcase(last, start.rpartition(".")[2]) and parent.startswith(framework):
            return words
    return None


def install_getters(package: str) -> None:
    """Install a `getter` as `__getattr__` in every imported module of a package.

    Modules that are imported later call `install_getter`.
    """
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{package}.") and "__getattr__" not in vars(module):
            vars(module)["__getattr__"] = getter(name)


def install_getter(module: str, late: Mapping[str, Callable[[], Any]] | None = None) -> None:
    """Install a `getter` as `__getattr__` in one module that is being imported.

    An assignment in the module would be visible to type checkers, which then accept every name. A module declares the
    names in `late` under `if TYPE_CHECKING`.
    """
    vars(sys.modules[module])["__getattr__"] = getter(module, late)


def getter(
    module: str, late: Mapping[str, Callable[[], Any]] | None = None
) -> Callable[[str], Any]:
    """The `__getattr__` of a module; `late` maps names to functions that create their values on first use."""
    late = late or {}

    def __getattr__(name: str) -> Any:
        if name in late:
            return late[name]()
        submodule = _submodule(module, name)
        return (
            _raise_missing(module, name, _imports(sys._getframe(1)))
            if submodule is None
            else submodule
        )

    return __getattr__


def _submodule(package: str, name: str) -> ModuleType | None:
    """Import a public module of a framework's package when it is first used as an attribute, without an import.

    The original imports more modules with the package, and programs rely on it: MaxText reads
    `transformer_engine.jax.flax.module` after `import transformer_engine.jax`.
    """
    parent = sys.modules.get(package)
    if (
        name.startswith("_")
        or not package.startswith(FRAMEWORKS)
        or not hasattr(parent, "__path__")
    ):
        return None
    path = f"{package}.{name}"
    if find_spec(path) is None:
        return None
    try:
        return import_module(path)
    except ImportError as error:  # an optional library is missing: `hasattr` returns False
        raise AttributeError(
            f"{path} cannot be imported: {error}", name=name, obj=parent
        ) from error


def _raise_missing(module: str, name: str, imported: bool) -> NoReturn:
    """Raise ImportError for an import statement and AttributeError for any other look-up."""
    source = sys.modules.get(module)
    if name.startswith("__"):  # looked up in every module by Python and its tools
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=source)
    message = sentence(f"{module}.{name}")
    if imported:
        raise ImportError(message, name=module, path=getattr(source, "__file__", None))
    raise AttributeError(message, name=name, obj=source)


def _imports(frame: Any) -> bool:
    """Whether a frame's current instruction is the second half of `from module import name`."""
    code, position = frame.f_code.co_code, frame.f_lasti
    while position >= 0 and code[position] == opmap["EXTENDED_ARG"]:
        # Python 3.10 reports the prefix of an instruction, later releases the instruction.
        position += 2
    return position >= 0 and code[position] == opmap["IMPORT_FROM"]


# Old path of a module that has moved: its present path. The modules of a package move with it.
moved: dict[str, str] = {"transformer_engine.cli": "transformer_engine_tools"}


class _MovedLoader:
    """Loads the module of another path, which keeps its name and its spec."""

    def __init__(self, path: str) -> None:
        self.path = path

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.path)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importlib has replaced it


class MovedFinder:
    """The first finder, which loads modules from their present paths.

    Later finders would search the `__path__` of the moved package, and load its modules again under their old
    names.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a module that has moved, or None."""
        if not name.startswith(PACKAGES):
            return None
        old, rest = name, ""
        while old not in moved:
            old, _, last = old.rpartition(".")
            if not old:
                return None
            rest = f".{last}{rest}"
        present = moved[old] + rest
        if rest and find_spec(present) is None:
            return None
        return ModuleSpec(name, _MovedLoader(present))  # pyright: ignore[reportArgumentType]


class Finder:
    """The last finder, which reports modules that all other finders miss."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None, or raise ModuleNotFoundError if the caller imports the module instead of looking for it."""
        asker = sys._getframe(2).f_code.co_name if name.startswith(PACKAGES) else ""
        if asker != "_find_and_load_unlocked" or name.partition(".")[0] not in PACKAGES:
            return None
        raise ModuleNotFoundError(sentence(name), name=name)


def install() -> None:
    """Add the finders to both ends of `sys.meta_path`, once per process."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())
        sys.meta_path.append(Finder())
