"""Provider: a library as data, with a builder for each case family that it supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import torch

from ..cases import Case
from ..measure import Effort, Figures


class Measurable(Protocol):
    """The result of a builder."""

    def measured(self, backward: bool, device: torch.device, effort: Effort) -> Figures:
        """Measure a forward pass, or a forward and a backward pass."""
        ...


# Returns None for a case that the library lacks in a family that it supports.
Builder = Callable[[Case, torch.device], Any]
B = TypeVar("B", bound=Builder)


class Builders(dict[str, Builder]):
    """{family: builder}, filled by the builders themselves: `@BUILDERS.of("layer", "layer_small")`."""

    def of(self, *families: str) -> Callable[[B], B]:
        def register(build: B) -> B:
            self.update(dict.fromkeys(families, build))
            return build

        return register


@dataclass(frozen=True)
class Provider:
    """A library that builds workloads.

    Attributes:
        name: Column name in reports, and value for the key "provider" in files.
        recipes: Recipes for its modules; a library without quantization has "bf16".
        builders: Builders by family.
        module: Module that must be importable.
        remedy: Command that installs it.
        gpu_only: Why it does not run on a CPU.
        quantizations: Recipes for the family quantize.
        unsupported_reason: Returns another reason why it cannot run on a device, if it is installed.
        on_request: Measured only if it is named.
    """

    name: str
    recipes: tuple[str, ...]
    builders: Mapping[str, Builder]
    module: str | None = None
    remedy: str = ""
    gpu_only: str | None = None
    quantizations: tuple[str, ...] = ()
    unsupported_reason: Callable[[torch.device], str | None] = lambda device: None
    on_request: bool = False

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Reason why the provider cannot run here, or None."""
        if self.module is not None and find_spec(self.module) is None:
            return f"not installed; {self.remedy}"
        if self.gpu_only is not None and device.type != "cuda":
            return self.gpu_only
        return self.unsupported_reason(device)

    def workload(self, case: Case, device: torch.device) -> Measurable | None:
        """Build the workload of a case, or return None if the provider lacks it."""
        build = self.builders.get(case.family)
        takes = self.quantizations if case.family == "quantize" else self.recipes
        if build is None or case.recipe not in takes:
            return None
        return build(case, device)
