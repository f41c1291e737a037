"""Module settings: properties backed by one frozen record, which a write replaces."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch

from transformer_engine.pytorch.module.config import Config, configure_class, early

writes: list[tuple[str, object]] = []


def note(module, name, value):
    writes.append((name, value))


@dataclass(frozen=True, eq=False)
class InnerConfig(Config):
    scale: float = 1.0


@configure_class(InnerConfig, written=note)
class Inner(torch.nn.Module):
    def __init__(self, scale=1.0):
        early_scale = early(self, "scale")
        super().__init__()
        self._config = InnerConfig(scale=scale if early_scale is None else early_scale)


@dataclass(frozen=True, eq=False)
class OuterConfig(Config):
    scale: float = 1.0
    depth: int = 1


@configure_class(OuterConfig, fixed=frozenset({"depth"}), handed_down={"scale": ("inner.scale",)})
class Outer(torch.nn.Module):
    def __init__(self, scale=1.0, depth=1):
        super().__init__()
        self._config = OuterConfig(scale=scale, depth=depth)
        self.inner = Inner(scale)


def test_a_write_replaces_the_record():
    module = Inner(2.0)
    before = module._config
    module.scale = 3.0
    assert (module.scale, before.scale) == (3.0, 2.0)
    assert module._config is not before
    with pytest.raises(FrozenInstanceError):
        before.scale = 4.0


def test_the_same_value_again_keeps_the_record():
    module = Inner(2.0)
    before, value = module._config, module.scale
    module.scale = value
    assert module._config is before


def test_a_write_before_the_constructor_is_kept_for_it():
    class Theirs(Inner):
        def __init__(self):
            self.scale = 5.0
            self.config = {"their": "own"}
            super().__init__()

    module = Theirs()
    assert module.scale == 5.0 and module.config == {"their": "own"}


def test_reading_a_setting_before_construction_raises_attribute_error():
    assert not hasattr(Inner.__new__(Inner), "scale")


def test_a_write_reaches_the_children_and_the_hook():
    module = Outer(1.0)
    writes.clear()
    module.scale = 7.0
    assert module.inner.scale == 7.0 and writes == [("scale", 7.0)]


def test_settings_that_determine_the_children_are_fixed():
    module = Outer(depth=2)
    module.depth = 2
    with pytest.raises(AttributeError, match=r"depth=3.* make another one"):
        module.depth = 3
    assert module.depth == 2


@pytest.mark.parametrize(
    "repeated", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_has_independent_settings(repeated):
    module = Outer(1.0)
    other = repeated(module)
    other.scale = 9.0
    assert (module.scale, other.scale) == (1.0, 9.0)


def test_a_record_with_field_equality_is_rejected():
    @dataclass(frozen=True)
    class Compared(Config):
        scale: float = 1.0

    with pytest.raises(TypeError, match="eq=False"):
        configure_class(Compared)
