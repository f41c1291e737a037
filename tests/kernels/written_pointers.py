"""Which pointers a launch's kernel writes, read from the code that Triton generates, unoptimised."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from transformer_engine.common.kernels.launch import Launch

_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "u8", "int32": "i32"}
_TYPES |= {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5", None: "fp32"}
# Tensor descriptor operations, whose first operand is the pointer or its tensor's descriptor.
_DESCRIPTORS = ("tt.make_tensor_descriptor", "tt.descriptor_load", "tt.descriptor_store")
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
# An argument's address, or one that was loaded from the tensor there.
_Reach = tuple[str, bool]


class Pointers(NamedTuple):
    """Arguments that a kernel writes, reads addresses from, or writes through loaded addresses."""

    written: set[str]
    tables: set[str]
    written_through: set[str]


def triton_code(launch: Launch, inputs: Sequence[str | None]) -> str:
    """Triton's own code for a launch; inputs are their types, None where one is not given."""
    names = launch.kernel.arg_names
    outputs = [None if output is None else f"*{_TYPES[output.dtype]}" for output in launch.outputs]
    args = (*inputs, *outputs)
    assert len(inputs) == launch.inputs, (launch.kernel.fn.__name__, launch.inputs, inputs)
    numbers = [_scalar_type(number) for number in launch.scalars]
    signature = dict(
        zip(names, [*args, *numbers, *["constexpr"] * len(launch.constants)], strict=True)
    )
    constants = dict(
        zip(names[len(names) - len(launch.constants) :], launch.constants, strict=True)
    )
    constants |= {name: None for name, kind in signature.items() if kind is None}
    signature |= dict.fromkeys(constants, "constexpr")
    target = GPUTarget("cuda", 90, 32)
    backend = triton.compiler.make_backend(target)
    options = backend.parse_options({"num_warps": launch.warps, "sanitize_overflow": False})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = (GluonASTSource if launch.kernel.is_gluon() else ASTSource)(
        launch.kernel, signature, constants, {}
    )
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    result = backend.gluon_to_ttgir if launch.kernel.is_gluon() else backend.make_ttir
    return str(result(module, {}, options, 90))


def _scalar_type(number: float) -> str:
    if isinstance(number, float):
        return "fp32"
    return "i32" if -(1 << 31) <= number < 1 << 31 else "i64"


def find_pointers(code: str) -> Pointers:
    """Trace every pointer that the code stores to back to its possible arguments."""
    by_engine: set[str] = set()
    if "ttng.tensormap_create" in code:
        by_engine = _copy_engine_targets(code)
        if "tt.store" not in code:
            return Pointers(by_engine, set(), set())
    flow = _Flow(code)
    reach: dict[str, set[_Reach]] = {name: {(name[1:], False)} for name in flow.arguments}
    changed = True
    while changed:
        changed = False
        for result, operand, loads in flow.edges:
            results = {(name, loaded or loads) for name, loaded in reach.get(operand, ())}
            recognized = reach.setdefault(result, set())
            if not results <= recognized:
                recognized |= results
                changed = True
    written: set[str] = by_engine
    through: set[str] = set()
    for pointer in flow.stored:
        assert reach.get(pointer), f"{pointer} comes from no argument"
        for name, loaded in reach[pointer]:
            (through if loaded else written).add(name)
    return Pointers(
        written, {name for value in flow.addresses for name, _ in reach[value]}, through
    )


def _copy_engine_targets(code: str) -> set[str]:
    """Arguments whose tensor maps are copy targets; warp-specialized parts receive maps as arguments."""
    assert not re.search(r"tt\.call|scf\.while", code), "it has regions whose maps are not followed"
    source: dict[str, str] = {}
    handed: list[str] = []
    written: set[str] = set()
    for line in code.splitlines():
        if result := re.search(r"ttng\.tensormap_create (%[\w.-]+), %(\w+),", line):
            source[result[1]] = result[2]
        elif result := re.search(
            r"(%[\w.-]+) = ttng\.reinterpret_tensor_descriptor (%[\w.-]+)", line
        ):
            source[result[1]] = source[result[2]]
        elif result := re.search(r"ttg\.warp_specialize\((.*?)\)", line):
            handed = _VALUE.findall(result[1])
        elif result := re.search(r"^\s*partition\d+\((.*?)\) num_warps", line):
            inner = re.findall(r"(%\w+): ", result[1])
            source |= {
                name: source[value]
                for name, value in zip(inner, handed, strict=True)
                if value in source
            }
        elif result := re.search(r"ttng\.async_tma_copy_local_to_global (%[\w.-]+)\[", line):
            written.add(source[result[1]])
    assert written or "tt.store" in code, "nothing is stored"
    return written


class _Flow:
    """Pointer data flow.

    edges       (value, its source, whether it is loaded from the source)
    stored      pointers that are stored to
    addresses   numbers that are converted to pointers
    """

    def __init__(self, code: str):
        signature = next(line for line in code.splitlines() if "tt.func" in line)
        self.arguments = re.findall(r"(%\w+): !tt\.ptr", signature)
        self._handed: list[str] = []  # to the parts of a warp-specialized kernel
        self.edges: list[tuple[str, str, bool]] = []
        self.stored: list[str] = []
        self.addresses: list[str] = []
        # For every region that encloses a line: unique names for its values, and its yields' targets.
        self._scopes: list[tuple[dict[str, str], tuple[list[str], ...]]] = [({}, ())]
        self._count = 0
        for line in code.splitlines():
            self._take(re.sub(r" loc\((?:[^()]|\([^()]*\))*\)$", "", line.strip()))
        assert self.stored, "nothing is stored"

    def _take(self, line: str) -> None:
        unknown = re.search(
            r"scf\.while(?! : \(\) -> \(\) \{)|tt\.call|tt\w*\.\w*descriptor\w*|^\^.*!tt\.ptr", line
        )
        recognized = (*_DESCRIPTORS, "ttng.reinterpret_tensor_descriptor")
        assert unknown is None or unknown[0] in recognized, f"unknown: {line}"
        head, _, body = (
            line.partition(" = ") if re.match(r"%[\w:$.-]+ = ", line) else ("", "", line)
        )
        operation = re.split(r"[\s(]", body)[0].strip('"')
        operands = [self._known(name) for name in _VALUE.findall(body)]
        results = self._defined(head)
        if operation == "scf.for":
            pairs = re.findall(r"(%[\w$.-]+) = (%[\w$.#-]+)", body)[
                1:
            ]  # the first is the loop's own number
            firsts = [self._known(first) for _, first in pairs]
            self._scopes.append(({}, ()))
            inner = [name for carried, _ in pairs for name in self._defined(carried)]
            self._scopes[-1] = (self._scopes[-1][0], (results, inner))
            for values in (results, inner):
                self.edges += [
                    (value, first, False) for value, first in zip(values, firsts, strict=False)
                ]
        elif operation == "ttg.warp_specialize":
            self._handed = operands
        elif line.startswith("partition") and line.endswith("{"):
            self._scopes.append(({}, ()))
            inner = [self._defined(name)[0] for name in re.findall(r"(%[\w$.-]+): ", line)]
            self.edges += [
                (value, first, False) for value, first in zip(inner, self._handed, strict=True)
            ]
        elif line.startswith("}"):
            _, yields = self._scopes.pop()
            if line.endswith("{"):
                self._scopes.append(({}, yields))
        elif line.endswith("{"):
            self._scopes.append(({}, (results,) if operation == "scf.if" else ()))
        elif operation == "scf.yield":
            for targets in self._scopes[-1][1]:
                self.edges += [
                    (target, value, False) for target, value in zip(targets, operands, strict=True)
                ]
        elif operation in ("tt.store", "tt.descriptor_store", "tt.atomic_rmw", "tt.atomic_cas"):
            self.stored.append(operands[0])
        elif operation == "arith.select":
            self.edges += [(results[0], operand, False) for operand in operands[1:3]]
        elif results and operands:
            if operation == "tt.int_to_ptr":
                self.addresses.append(operands[0])
            # In other operations the pointer comes from the first operand; the second is a numeric offset.
            self.edges += [
                (result, operands[0], operation in ("tt.load", "tt.descriptor_load"))
                for result in results
            ]

    def _defined(self, head: str) -> list[str]:
        """Unique names for the values that a line defines, because sibling regions reuse names."""
        name, _, count = head.partition(":")
        names = [f"{name}#{i}" for i in range(int(count))] if count else [name] if name else []
        for name in names:
            self._count += 1
            self._scopes[-1][0][name] = f"{name} {self._count}"
        return [self._scopes[-1][0][name] for name in names]

    def _known(self, name: str) -> str:
        for scope, _ in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return name
