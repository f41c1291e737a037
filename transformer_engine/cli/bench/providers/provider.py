"""Provider: a library as data, with a builder for each family of cases that it can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from ..cases import Case
from ..measure import Effort, Figures


class Measurable(Protocol):
    """What a builder makes of a case."""

    def measured(self, backward: bool, device: torch.device, effort: Effort) -> Figures:
        """The figures of a forward, or of a forward and backward, pass."""
        ...


# None: the builder's library has no such case, though it has the family.
Builder = Callable[[Case, torch.device], Any]


class Builders(dict[str, Builder]):
    """{family: builder}, filled by the builders themselves: `@BUILDERS.of("layer", "layer_small")`."""

    def of(self, *families: str) -> Callable[[Builder], Builder]:
        def register(build: Builder) -> Builder:
            self.update(dict.fromkeys(families, build))
            return build

        return register


@dataclass(frozen=True)
class Provider:
    """Builds workloads.

    name      of the column in reports and of the key "provider" in files
    recipes   of the modules that it runs; a library without quantization has "bf16"
    quantizations   of the family quantize that it has
    builders  by family
    module    what has to be importable
    remedy    the command that installs it
    gpu_only  why it does not run on a CPU
    refuses   what else speaks against a device, of a library that is installed
    on_request   measured only where it is named
    """

    name: str
    recipes: tuple[str, ...]
    builders: Mapping[str, Builder]
    module: str | None = None
    remedy: str = ""
    gpu_only: str | None = None
    quantizations: tuple[str, ...] = ()
    refuses: Callable[[torch.device], str | None] = lambda device: None
    on_request: bool = False

    def refusal(self, device: torch.device) -> str | None:
        """Why nothing of this provider is measured here; None when it is."""
        if self.module is not None and find_spec(self.module) is None:
            return f"not installed; {self.remedy}"
        if self.gpu_only is not None and device.type != "cuda":
            return self.gpu_only
        return self.refuses(device)

    def workload(self, case: Case, device: torch.device) -> Measurable | None:
        """The case as this provider runs it; None when it has no such thing."""
        build = self.builders.get(case.family)
        takes = self.quantizations if case.family == "quantize" else self.recipes
        if build is None or case.recipe not in takes:
            return None
        return build(case, device)
