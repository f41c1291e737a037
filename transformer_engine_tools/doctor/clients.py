"""Client libraries of the engine: which are installed, how each detects it, and whether it detects this package."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from .environment import Distribution, Installation

PACKAGE = "transformer-engine"


@dataclass(frozen=True)
class Client:
    """A distribution that detects the engine without requiring it; `by` is how it does."""

    name: str
    by: str
    metadata: bool = False


# How each looks for it, as read in its published package.
CLIENTS = (
    Client("accelerate", "the module and the package's metadata", metadata=True),
    Client("lightning", "the version in the package's metadata", metadata=True),
    Client("pytorch-lightning", "the version in the package's metadata", metadata=True),
    Client("lightning-fabric", "the version in the package's metadata", metadata=True),
    Client("lightning-thunder", "the module and the package's metadata", metadata=True),
    Client("nvidia-physicsnemo", "the version in the package's metadata", metadata=True),
    Client("megatron-bridge", "the version in the package's metadata", metadata=True),
    Client("megatron-core", "__version__"),
    Client("megatron-fsdp", "__version__"),
    Client("nemo-automodel", "__version__"),
    Client("nvidia-modelopt", "__version__"),
    Client("peft", "the module"),
    Client("esm", "the module"),
    Client("ai2-olmo-core", "the module"),
    Client("mosaicml", "the module"),
    Client("vtx", "the module"),
)


def pins(distribution: Distribution) -> str | None:
    """Engine versions that a distribution requires: "" for any, None if it does not require it."""
    for line in distribution.requires:
        try:
            need = Requirement(line)
        except InvalidRequirement:  # old packages have requirements that do not follow the standard
            continue
        if canonicalize_name(need.name) == PACKAGE:
            return str(need.specifier)
    return None


def takes(specifier: str, version: str) -> bool:
    """Whether a client's specifier contains this version."""
    return Requirement(f"{PACKAGE}{specifier}").specifier.contains(
        Version(version), prereleases=True
    )


def installed(environment: Installation) -> list[tuple[str, Distribution, Client | None]]:
    """List (name, distribution, CLIENTS row) for all distributions that look for the engine or require it."""
    rows = {client.name: client for client in CLIENTS}
    return [
        (name, several[0], rows.get(name))
        for name, several in sorted(environment.distributions.items())
        if name != PACKAGE and (name in rows or pins(several[0]) is not None)
    ]
