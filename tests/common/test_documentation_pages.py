"""Messages name pages by their address if the installed distribution has one, otherwise by their path."""

from __future__ import annotations

import importlib
from email.message import Message

import pytest

from transformer_engine.common import documentation


@pytest.fixture(autouse=True)
def fresh_address():
    documentation._repository.cache_clear()
    yield
    documentation._repository.cache_clear()


def with_urls(monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
    """Replace the metadata of the installed distribution."""
    message = Message()
    for url in urls:
        message["Project-URL"] = url
    monkeypatch.setattr(documentation, "metadata", lambda name: message)


def test_a_published_wheel_names_the_address_of_a_page(monkeypatch: pytest.MonkeyPatch):
    with_urls(
        monkeypatch, "Issues, https://git.example/te/issues", "Repository, https://git.example/te"
    )
    assert documentation.page("support") == "https://git.example/te/blob/main/docs/support.md"
    with pytest.raises(
        AttributeError, match=r"https://git\.example/te/blob/main/docs/support\.md lists"
    ):
        importlib.import_module("transformer_engine.common.recipe").Nothing  # noqa: B018


def test_a_wheel_of_a_checkout_names_the_path(monkeypatch: pytest.MonkeyPatch):
    with_urls(monkeypatch)
    assert documentation.page("export") == "docs/export.md"


def test_without_an_installed_distribution_the_path_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> Message:
        raise documentation.PackageNotFoundError(name)

    monkeypatch.setattr(documentation, "metadata", missing)
    assert documentation.page("support") == "docs/support.md"
