"""Examples on client pages, and cases for clients that use part of the package; one process per client."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.clients.processes import errors_of_examples, skip_unless_installed
from tests.clients.small_cases import CASES
from tests.support.pages import examples

PAGES = {
    "accelerate": ("accelerate", "transformers"),
    "lightning": ("lightning",),
    "peft": ("peft", "transformers"),
    "huggingface": ("transformers",),
}
NEEDED = {
    "nemo_automodel": ("nemo_automodel", "transformers"),
    "modelopt": ("modelopt", "omegaconf"),
    "esm": ("esm", "attr", "accelerate", "pandas"),
    "olmo_core": ("olmo_core", "cached_path", "dill"),
    "vortex": ("vortex",),
    "composer": ("composer", "torchvision"),
    "thunder": ("thunder", "looseversion", "optree"),
    "physicsnemo": ("physicsnemo", "warp", "pyvers"),
}
# The page has the clients in this order.
EXAMPLE_OF = dict(zip(NEEDED, examples("other_clients.md", "python-clients"), strict=True))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

Example = tuple[str, str, str | None]  # title, source and default device


def examples_of_page(page: str) -> list[Example]:
    """Examples on a page, which continue each other."""
    return [(f"docs/{page}.md", "\n".join(examples(f"{page}.md", "python-clients")), None)]


def examples_of_client(client: str, device: str) -> list[Example]:
    """A client's example as printed on the page, and its cases on a device."""
    cases = [
        (name, "\n".join(parts), device)
        for name, parts in CASES.items()
        if name.split()[0] == client
    ]
    return [("docs/other_clients.md", EXAMPLE_OF[client], None), *cases]


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, str]:
    """Run the examples for all selected tests in one program and return their errors."""
    programs: dict[str, list[Example]] = {}
    for item in request.session.items:
        if (
            item.path == request.path
            and isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
        ):
            page, client, device = map(item.callspec.params.get, ("page", "client", "device"))
            needed = (PAGES | NEEDED)[page or client]
            if not all(map(importlib.util.find_spec, needed)):
                continue
            if page is not None:
                programs[page] = examples_of_page(page)
            elif device == "cpu" or torch.cuda.is_available():
                programs[f"{client}-{device}"] = examples_of_client(client, device)
    return errors_of_examples(programs)


@pytest.mark.clients
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page: str, errors: dict[str, str]):
    skip_unless_installed(PAGES[page])
    ((_, source, _),) = examples_of_page(page)
    assert source and not errors[page], errors[page]


@pytest.mark.clients
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("client", NEEDED)
def test_a_client_equals_its_own_pytorch_code(client: str, device: str, errors: dict[str, str]):
    """Run the page's example as printed, then the cases on the device."""
    skip_unless_installed(NEEDED[client])
    assert len(examples_of_client(client, device)) > 1 and client in EXAMPLE_OF[client]
    name = f"{client}-{device}"
    assert not errors[name], errors[name]
