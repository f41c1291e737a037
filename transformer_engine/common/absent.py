"""Names of the original that are not here: `import` and `from .. import` say what is missing and what to use.

Python keeps its own words for a failed import and drops those of a module's `__getattr__`. Two places have ours heard
all the same: a finder that is asked last (`import transformer_engine.debug`), and a `__getattr__` that sees that it is
`from module import name` that asks. Everybody else is answered as ever: `hasattr` by an AttributeError, `find_spec` by
None, and what an `except ImportError` or `except ModuleNotFoundError` of a caller catches is what it was.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from opcode import opmap
from typing import Any, NoReturn

from .._version import __version__

PACKAGES = ("transformer_engine", "transformer_engine_torch", "transformer_engine_jax")

# What the original has and this package lacks, by the beginning of its name: what it is, and what to use.
ABSENT = {
    "transformer_engine.debug": "the original's inspection of tensors; use te.observe (docs/observe.md)",
    **dict.fromkeys(
        (
            "transformer_engine.jax.MajorShardingType",
            "transformer_engine.jax.ShardingResource",
            "transformer_engine.jax.ShardingType",
        ),
        "of the original's first versions; name the axes of the mesh in a MeshResource",
    ),
    "transformer_engine.jax.ep.EpLayerConfig": "ep_bootstrap answers the EpConfig that ep_dispatch and ep_combine take",
    "transformer_engine.jax.moe.get_moe_recv_capacity_per_rank": "te.moe.moe sizes its own buffers; leave the "
    "capacity out",
    "transformer_engine.jax.moe.record_ep_bootstrap_signature_for_moe": "te.moe.moe needs no "
    "ep_bootstrap; leave it out",
    "transformer_engine.jax.update_fp8_metas": "of the original's first versions; scales are renewed by the gradient "
    "of their collection, see te.update_collections",
    "transformer_engine.jax.moe.PermutationBackend": "the rows of experts are put in order in one way; leave the "
    "argument out",
    "transformer_engine.tensorflow": "given up by the original; use transformer_engine.pytorch, or .jax",
    "transformer_engine.paddle": "given up by the original; use transformer_engine.pytorch, or .jax",
    "transformer_engine.common.load_framework_extension": "there is no shared library to load; import the framework's "
    "package, transformer_engine.pytorch or transformer_engine.jax",
    "transformer_engine.pytorch.custom_recipes": "examples of the original; give recipe.CustomRecipe a function of "
    "those in custom_recipes.quantizer_factories, and of te.HybridQuantizer where the products of a layer differ",
    **dict.fromkeys(
        (
            "transformer_engine.pytorch.attention.FlashAttention",
            "transformer_engine.pytorch.attention.FusedAttention",
            "transformer_engine.pytorch.attention.UnfusedDotProductAttention",
        ),
        "te.DotProductAttention chooses its backend; te.explain says which",
    ),
    "transformer_engine.pytorch.attention.get_alibi": "give te.DotProductAttention "
    'core_attention_bias_type="alibi", with alibi_slopes or without',
    "transformer_engine.pytorch.dot_product_attention": "the package is transformer_engine.pytorch.attention."
    "dot_product_attention; use te.DotProductAttention and te.InferenceParams",
    "transformer_engine.pytorch.distributed.FullyShardedDataParallel": "wrap the model in that of "
    "torch.distributed.fsdp, then call prepare_te_modules_for_fsdp",
    "transformer_engine.pytorch.ep": "expert parallelism over symmetric memory; exchange tokens with "
    "torch.distributed.all_to_all_single round te.moe_permute (docs/experts.md)",
    "transformer_engine.pytorch.export": "export to ONNX; convert the weights (docs/checkpoints.md) and export "
    "the model in torch.nn layers",
    "transformer_engine.pytorch.onnx_export": "export to ONNX; convert the weights (docs/checkpoints.md) and "
    "export the model in torch.nn layers",
    **dict.fromkeys(
        (
            "transformer_engine.pytorch.GatedDeltaNet2Attention",
            "transformer_engine.pytorch.GatedDeltaNetAttention",
        ),
        "an experimental attention of cuDNN; use a kernel of another library between te.Linear layers",
    ),
    "transformer_engine.pytorch.triton": "kernels under the original's paths; call the functions of "
    "transformer_engine.pytorch that use them",
}


def sentence(name: str) -> str:
    """What is missing and what to use, for a dotted name."""
    words = _words(name)
    if words is not None:
        return f"{name} is not in this package, {__version__}: {words}"
    place, _, last = name.rpartition(".")
    near = _near(place, last)
    suggestion = f"did you mean {near!r}? " if near else ""
    return (
        f"{place} has no {last!r} in this package, {__version__}; {suggestion}docs/support.md lists what there is, and "
        f"dir({place}) its names"
    )


def _near(place: str, name: str) -> str | None:
    """The public name of a loaded module that is spelled most like a missing one, or None."""
    module = sys.modules.get(place)
    public = [] if module is None else [known for known in dir(module) if not known.startswith("_")]
    same = [known for known in public if known.lower() == name.lower()]
    close = same or difflib.get_close_matches(name, public, n=1, cutoff=0.75)
    return close[0] if close else None


def _words(name: str) -> str | None:
    """Those of the row that a name begins with, else of one of its framework that ends as it does."""
    for start, words in ABSENT.items():
        if f"{name}.".startswith(f"{start}."):
            return words
    place, _, last = name.rpartition(".")
    # The original has a name in more modules than the one that its row gives, and more than one in older versions.
    for start, words in ABSENT.items():
        framework = ".".join(start.split(".")[:2])
        if start.endswith(f".{last}") and place.startswith(framework):
            return words
    return None


def answer_in(package: str) -> None:
    """Every module below a package that has been imported says what it lacks.

    One that is imported later says so by a `getter` of its own.
    """
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{package}.") and "__getattr__" not in vars(module):
            vars(module)["__getattr__"] = getter(name)


def getter(module: str, late: Mapping[str, Callable[[], Any]] | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of a module, some of whose names may be made when they are asked for."""
    late = late or {}

    def __getattr__(name: str) -> Any:
        return late[name]() if name in late else _refuse(module, name, _imports(sys._getframe(1)))

    return __getattr__


def _refuse(module: str, name: str, imported: bool) -> NoReturn:
    """Raise what is missing: ImportError for an import statement, AttributeError for everybody else."""
    here = sys.modules.get(module)
    if name.startswith("__"):  # Python and its tools ask every module for such names
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=here)
    words = sentence(f"{module}.{name}")
    if imported:
        raise ImportError(words, name=module, path=getattr(here, "__file__", None))
    raise AttributeError(words, name=name, obj=here)


def _imports(frame: Any) -> bool:
    """Is the instruction that runs in this frame the second half of `from module import name`?"""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


class Finder:
    """Asked last for a module of ours that no finder has found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """None, or ModuleNotFoundError where the module is being imported and not only looked for."""
        asker = sys._getframe(2).f_code.co_name if name.startswith(PACKAGES) else ""
        if asker != "_find_and_load_unlocked" or name.partition(".")[0] not in PACKAGES:
            return None
        raise ModuleNotFoundError(sentence(name), name=name)


def install() -> None:
    """Have the finder asked, once a process."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
