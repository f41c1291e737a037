import builtins
import io
import os
import pickle
import struct
import sys
import time
import types
import warnings
import zipfile
from collections import OrderedDict

import pytest
import torch

from transformer_engine.common import recipe as recipes
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)
from transformer_engine.pytorch import quantization as q
from transformer_engine.pytorch.quantization import ExtraStateError

STATELESS = [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling]


class TrainingFrameworkScaling(DelayedScaling):
    def __init__(self, config):
        super().__init__(amax_history_len=config)


def meta(recipe, slots=3):
    return {
        "recipe": recipe,
        "scaling_fwd": q.RecipeState.create(
            recipe, mode="forward", num_quantizers=slots, device="cpu"
        ),
        "scaling_bwd": q.RecipeState.create(
            recipe, mode="backward", num_quantizers=2, device="cpu"
        ),
        "num_gemms": 1,
        "fp8_checkpoint": True,
        "fp8_max_fwd": 448,
        "name": ("a", [1, 2.0]),
        "fp8_group": None,
        "buffer_index_and_autocast_key": "bookkeeping",
        "global_fp8_buffer_pos_fwd_recompute": 3,
    }


def encode_state(state) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def test_delayed_scaling_round_trips_with_scales_and_histories(device):
    module = meta(DelayedScaling(amax_history_len=4, margin=1))
    for key in ("scaling_fwd", "scaling_bwd"):
        module[key].scale.uniform_()
        module[key].amax_history.uniform_()
    state = q.encode_extra_state(module)
    assert (state.dtype, state.device.type, state.dim()) == (torch.uint8, "cpu", 1)
    decoded = q.decode_extra_state(state.to(device))
    assert decoded["recipe"] == module["recipe"]
    assert decoded["extra_fp8_variables"] == {
        "num_gemms": 1,
        "fp8_checkpoint": True,
        "fp8_max_fwd": 448,
        "name": ("a", [1, 2.0]),
    }
    for direction in ("fwd", "bwd"):
        scaling = module[f"scaling_{direction}"]
        assert torch.equal(decoded[f"scale_{direction}"], scaling.scale)
        assert torch.equal(decoded[f"amax_history_{direction}"], scaling.amax_history)


def test_the_bytes_are_the_pickle_of_a_dict_that_other_readers_know():
    state = pickle.loads(bytes(q.encode_extra_state(meta(DelayedScaling())).numpy()))
    assert set(state) == {
        "recipe",
        "scale_fwd",
        "scale_bwd",
        "amax_history_fwd",
        "amax_history_bwd",
        "extra_fp8_variables",
    }


@pytest.mark.parametrize("kind", STATELESS)
def test_stateless_recipes_round_trip_with_derived_fields(kind):
    recipe = kind()
    if kind is Float8CurrentScaling:
        recipe.fp8_quant_bwd_grad = QParams(amax_epsilon=0.5)
    decoded = q.decode_extra_state(q.encode_extra_state(meta(recipe)))
    assert decoded["recipe"] == recipe
    assert not any(key.startswith(("scale", "amax")) for key in decoded)


def test_without_a_recipe_or_with_a_custom_one_the_state_is_empty():
    for module in ({}, {"recipe": CustomRecipe(qfactory=len)}):
        assert q.encode_extra_state(module).numel() == 0
    assert q.decode_extra_state(torch.empty(0, dtype=torch.uint8)) is None
    assert q.decode_extra_state(None) is None
    assert q.decode_extra_state(io.BytesIO()) is None


def test_callables_of_a_recipe_are_not_stored():
    recipe = DelayedScaling(
        amax_compute_algo=lambda history: history[0], scaling_factor_compute_algo=max
    )
    assert q.decode_extra_state(q.encode_extra_state(meta(recipe)))["recipe"] == DelayedScaling()


def test_an_imported_subclass_is_read_as_its_public_base():
    state = encode_state({"recipe": TrainingFrameworkScaling(7)})
    assert q.decode_extra_state(state)["recipe"] == DelayedScaling(amax_history_len=7)


def test_states_of_the_first_versions_mean_delayed_scaling():
    old = {
        "scale_fwd": torch.full((3,), 2.0),
        "scale_inv_fwd": torch.full((3,), 0.5),
        "amax_history_fwd": torch.ones(2, 3),
        "extra_fp8_variables": {
            "num_gemms": 1,
            "global_fp8_buffer_pos_fwd_recompute": 5,
            "recipe": "no",
        },
    }
    buffer = io.BytesIO()
    torch.save(old, buffer)
    archive = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    for state in (encode_state(old), buffer, archive):
        decoded = q.decode_extra_state(state)
        assert decoded["recipe"] == DelayedScaling()
        assert set(decoded) == {"recipe", "scale_fwd", "amax_history_fwd", "extra_fp8_variables"}
        assert decoded["extra_fp8_variables"] == {"num_gemms": 1}
        assert decoded["scale_fwd"].tolist() == [2.0] * 3


def test_an_archive_with_a_recipe_is_read_and_validated():
    buffer = io.BytesIO()
    torch.save({"recipe": DelayedScaling(fp8_format=Format.E4M3)}, buffer)
    assert q.decode_extra_state(buffer)["recipe"] == DelayedScaling(fp8_format=Format.E4M3)
    broken = DelayedScaling()
    vars(broken)["amax_history_len"] = -1  # an assignment would raise an error
    buffer = io.BytesIO()
    torch.save({"recipe": broken}, buffer)
    with pytest.raises(ExtraStateError, match="amax_history_len=-1"):
        q.decode_extra_state(buffer)


def test_fields_of_other_versions_are_dropped_with_a_warning():
    recipe = DelayedScaling(margin=3)
    recipe.__dict__.update(interval=2, override_linear_precision=(False, False, True), device=None)
    with pytest.warns(UserWarning, match="unknown here: interval, override_linear_precision$"):
        assert q.decode_extra_state(encode_state({"recipe": recipe}))["recipe"] == DelayedScaling(
            margin=3
        )
    # their defaults
    recipe.__dict__.update(interval=1, override_linear_precision=(False, False, False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert q.decode_extra_state(encode_state({"recipe": recipe}))["recipe"] == DelayedScaling(
            margin=3
        )


def test_a_named_tuple_of_the_first_versions_is_read(monkeypatch):
    precision = type("_OverrideLinearPrecision", (tuple,), {"__module__": recipes.__name__})
    monkeypatch.setattr(recipes, "_OverrideLinearPrecision", precision, raising=False)
    recipe = DelayedScaling()
    recipe.__dict__["override_linear_precision"] = precision((False, True))
    with pytest.warns(UserWarning, match="override_linear_precision"):
        assert q.decode_extra_state(encode_state({"recipe": recipe}))["recipe"] == DelayedScaling()


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_of_python_3_is_read(protocol):
    data = pickle.dumps({"recipe": Float8CurrentScaling(), "scale_fwd": torch.ones(2)}, protocol)
    decoded = q.decode_extra_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert decoded["recipe"] == Float8CurrentScaling()
    assert decoded["scale_fwd"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("length", [2, 6])
def test_loading_writes_in_place_and_adjusts_the_history(length):
    saved = meta(DelayedScaling(amax_history_len=4))
    saved["scaling_fwd"].scale.fill_(3.0)
    saved["scaling_fwd"].amax_history.copy_(torch.arange(12.0).view(4, 3))
    saved["num_gemms"] = 5
    module = meta(DelayedScaling(amax_history_len=length))
    state = module["scaling_fwd"]
    addresses = state.scale.data_ptr(), state.amax_history.data_ptr()
    q.load_extra_state(q.decode_extra_state(q.encode_extra_state(saved)), module)
    assert (state.scale.data_ptr(), state.amax_history.data_ptr()) == addresses
    assert state.scale.tolist() == [3.0] * 3
    remaining = min(4, length)
    assert torch.equal(
        state.amax_history[:remaining], saved["scaling_fwd"].amax_history[:remaining]
    )
    assert not state.amax_history[remaining:].any()
    assert module["num_gemms"] == 5
    assert module["recipe"] == saved["recipe"]


def test_loading_another_number_of_quantizers_is_rejected_before_anything_changes():
    saved = meta(DelayedScaling(), slots=6)
    module = meta(DelayedScaling(margin=1))
    with pytest.raises(ExtraStateError, match=r"scale_fwd .*\(6,\); .* 3 quantizers"):
        q.load_extra_state(q.decode_extra_state(q.encode_extra_state(saved)), module)
    assert module["recipe"] == DelayedScaling(margin=1)


class Exploit:
    """Pickles as a call to any function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def _storage_exploit(payload) -> Exploit:
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return Exploit(torch.storage._load_from_bytes, buffer.getvalue())


def payloads(marker: str):
    command = f"touch {marker}"
    touch = f"open({marker!r}, 'w').close()"
    system, evaluate = Exploit(os.system, command), Exploit(builtins.eval, touch)
    yield "system", system
    yield "eval", {"recipe": evaluate}
    yield "exec", {"recipe": DelayedScaling(), "x": [({"deep": Exploit(builtins.exec, touch)},)]}
    yield "in_a_recipe", {"recipe": DelayedScaling(), "extra_fp8_variables": {"a": (1, system)}}
    yield "getattr", Exploit(getattr, DelayedScaling(), "__class__")
    yield "nested_pickle", {"recipe": Exploit(pickle.loads, pickle.dumps(system))}
    yield "storage_bytes", {"scale_fwd": _storage_exploit(system)}
    yield "torch_load", {"scale_fwd": Exploit(torch.load, marker)}
    yield "import", {"recipe": Exploit(__import__, "this")}


NAMES = [name for name, _ in payloads("unused")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["bytes", "archive", "archive_bytes"])
def test_a_hostile_pickle_is_rejected_and_runs_nothing(tmp_path, name, kind):
    marker = tmp_path / "ran"
    payload = dict(payloads(str(marker)))[name]
    if kind == "bytes":
        state = encode_state(payload)
    else:
        state = io.BytesIO()
        torch.save(payload, state)
        if kind == "archive_bytes":
            state = torch.frombuffer(bytearray(state.getvalue()), dtype=torch.uint8)
    with pytest.raises(ExtraStateError) as raised:
        q.decode_extra_state(state)
    assert len(str(raised.value)) > 20
    assert not marker.exists()


def test_the_error_names_the_rejected_function(tmp_path):
    with pytest.raises(ExtraStateError, match=r"posix\.system"):
        q.decode_extra_state(encode_state(Exploit(os.system, f"touch {tmp_path / 'ran'}")))
    assert list(tmp_path.iterdir()) == []


def test_the_test_exploit_runs_code_in_a_normal_unpickler(tmp_path):
    pickle.loads(pickle.dumps(Exploit(os.system, f"touch {tmp_path / 'ran'}")))
    assert (tmp_path / "ran").exists()


def _global(name: str, module: str = recipes.__name__) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def test_a_pickle_cannot_change_classes_or_functions():
    """BUILD with a (None, dict) state sets attributes on whatever is on the stack, classes included."""
    for target in (_global("DelayedScaling"), _global("_rebuild_tensor_v2", "torch._utils")):
        data = b"\x80\x02" + target + b"(N}" + b"X\x05\x00\x00\x00delay" + b"K\x01" + b"st" + b"b."
        before = DelayedScaling.__dict__.copy(), vars(torch._utils._rebuild_tensor_v2).copy()
        with pytest.raises(ExtraStateError):
            q.decode_extra_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        assert (
            DelayedScaling.__dict__.copy(),
            vars(torch._utils._rebuild_tensor_v2).copy(),
        ) == before


def test_a_module_is_never_imported_for_a_pickle(monkeypatch):
    module = types.ModuleType("imported_by_pickle")
    module.Scaling = type("Scaling", (DelayedScaling,), {"__module__": "imported_by_pickle"})
    monkeypatch.setitem(sys.modules, "imported_by_pickle", module)
    state = encode_state({"recipe": module.Scaling()})
    assert q.decode_extra_state(state)["recipe"] == DelayedScaling()
    monkeypatch.delitem(sys.modules, "imported_by_pickle")
    with pytest.raises(ExtraStateError, match=r"imported_by_pickle\.Scaling"):
        q.decode_extra_state(state)


def _tensor_record(storage, offset, size, stride):
    return Exploit(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, {})


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (100,), (1,)), (3, (2,), (1,)), (-1, (1,), (1,)), (0, (2,), (-1,))],
)
def test_a_tensor_outside_of_its_storage_is_rejected(offset, size, stride):
    storage = torch.storage.TypedStorage(
        wrap_storage=torch.arange(4.0).untyped_storage(), dtype=torch.float32, _internal=True
    )
    state = encode_state({"scale_fwd": _tensor_record(storage, offset, size, stride)})
    with pytest.raises(ExtraStateError, match="exceeds its storage"):
        q.decode_extra_state(state)


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0)[1::2], torch.arange(6.0).view(2, 3).T, torch.zeros(0, 3), torch.tensor(2.0)],
)
def test_tensor_views_are_read_with_their_values(tensor):
    decoded = q.decode_extra_state(
        encode_state({"scale_fwd": tensor, "amax_history_fwd": torch.nn.Parameter(tensor)})
    )
    assert torch.equal(decoded["scale_fwd"], tensor)
    assert torch.equal(decoded["amax_history_fwd"], tensor)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (torch.ones(3), "torch.float32"),
        (b"bytes", "bytes"),
        (torch.frombuffer(bytearray(b"garbage"), dtype=torch.uint8), "readable pickle"),
        (torch.frombuffer(bytearray(b"PK\x03\x04 torn"), dtype=torch.uint8), "archive"),
        (encode_state([1, 2]), "holds a list"),
        (encode_state({"recipe": 3}), "recipe is an int"),
        (encode_state({"scale_fwd": 3}), "scale_fwd is an int"),
        (encode_state({"extra_fp8_variables": 3}), "extra_fp8_variables"),
        (encode_state({"recipe": DelayedScaling}), "class"),
        (encode_state({"x": Exploit(torch.storage._load_from_bytes, "text")}), "bytes"),
        (
            encode_state(
                {"x": Exploit(torch._utils._rebuild_tensor_v2, 1, 0, (1,), (1,), False, {})}
            ),
            "made of an int",
        ),
        (encode_state({"recipe": Exploit(Format, 7)}), "7"),
    ],
)
def test_damaged_states_are_rejected_with_the_reason(state, words):
    with pytest.raises(ExtraStateError, match=words):
        q.decode_extra_state(state)


def test_a_tampered_recipe_is_validated():
    recipe = DelayedScaling()
    vars(recipe)["amax_history_len"] = -3  # an assignment would raise an error
    with pytest.raises(ExtraStateError, match="amax_history_len=-3"):
        q.decode_extra_state(encode_state({"recipe": recipe}))
    current = Float8CurrentScaling()
    vars(current)["fp8_quant_fwd_inp"] = 3
    with pytest.raises(ExtraStateError, match="not a QParams"):
        q.decode_extra_state(encode_state({"recipe": current}))


def test_a_container_that_holds_itself_is_rejected():
    loop = []
    loop.append(loop)
    with pytest.raises(ExtraStateError, match="nests objects deeper than 100"):
        q.decode_extra_state(encode_state({"x": loop}))


def test_a_storage_of_something_else_is_rejected():
    buffer = io.BytesIO()
    torch.save([1], buffer, _use_new_zipfile_serialization=False)
    with pytest.raises(ExtraStateError, match="storage is a list"):
        q.decode_extra_state(
            encode_state({"x": Exploit(torch.storage._load_from_bytes, buffer.getvalue())})
        )


def test_constructor_arguments_in_a_pickle_are_ignored():
    decoded = q.decode_extra_state(encode_state({"recipe": Exploit(DelayedScaling, "x")}))
    assert decoded["recipe"] == DelayedScaling()


def test_other_plain_containers_are_read():
    state = OrderedDict(
        recipe=DelayedScaling(), extra=OrderedDict(a={1, 2}), shape=torch.Size([2, 3])
    )
    decoded = q.decode_extra_state(encode_state(state))
    assert decoded["extra"] == {"a": {1, 2}}
    assert decoded["shape"] == torch.Size([2, 3])


def _nested(depth: int, first: object = 1) -> tuple:
    """A tuple of 2^depth leaves that shares its parts, so that its pickle is short."""
    value: tuple = (first,)
    for _ in range(depth):
        value = (value, value)
    return value


def _repeat_opcode(count: int, *opcodes: bytes) -> bytes:
    return b"\x80\x04" + opcodes[0] + opcodes[1] * count + opcodes[2]


# Bytes that cost hours, gigabytes or the process if they are read as they stand, and the words of the error.
EXPENSIVE = {
    "shared_values": (pickle.dumps({"extra_fp8_variables": {"a": _nested(60)}}), "100000 objects"),
    "shared_key": (_repeat_opcode(60, b"}K\x01", b"2\x86", b"K\x02s."), "as a key of a dict"),
    "deep_key": (_repeat_opcode(90_000, b"}K\x01", b"\x85", b"K\x02s."), "deeper than 100"),
    "deep_list": (
        _repeat_opcode(50_000, b"(d(K\x01", b"(", b"l" * 50_000 + b"s."),
        "deeper than 100",
    ),
    "many_opcodes": (_repeat_opcode(200_000, b"}K\x01", b"N0", b"0."), "more than 100000 opcodes"),
    "huge_memo": (b"\x80\x04}r\xff\xff\xff\x7f.", "numbers its objects up to 2147483647"),
    "huge_integer": (
        b"\x80\x04}\x8b" + struct.pack("<i", 100_000) + b"\x01" * 100_000 + b"K\x02s.",
        "80 bits",
    ),
    "sets_of_tuples": (b"\x80\x04\x8f(K\x01\x85\x90.", "item of a set"),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_expensive_pickles_are_rejected_in_linear_time(name):
    data, words = EXPENSIVE[name]
    start = time.perf_counter()
    with pytest.raises(ExtraStateError, match=words):
        q.decode_extra_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("kind", ["archive", "legacy file", "storage"])
def test_expensive_pickles_inside_of_torch_files_are_rejected(kind):
    buffer = io.BytesIO()
    torch.save({_nested(22): 1}, buffer, _use_new_zipfile_serialization=kind == "archive")
    state = buffer
    if kind == "storage":
        state = encode_state(
            {"scale_fwd": Exploit(torch.storage._load_from_bytes, buffer.getvalue())}
        )
    with pytest.raises(ExtraStateError, match="as a key of a dict"):
        q.decode_extra_state(state)


@pytest.mark.parametrize(("size", "stride"), [((1 << 40,), (0,)), ((4, 1 << 30), (1, 0))])
def test_a_tensor_larger_than_its_storage_is_rejected(size, stride):
    storage = torch.arange(4.0).storage()
    with pytest.raises(ExtraStateError, match="exceeds its storage"):
        q.decode_extra_state(encode_state({"scale_fwd": _tensor_record(storage, 0, size, stride)}))


def test_a_recipe_cannot_allocate_longer_histories_than_the_checkpoint_has():
    with pytest.raises(ExtraStateError, match="amax_history_len=1000000000"):
        q.decode_extra_state(encode_state({"recipe": DelayedScaling(amax_history_len=10**9)}))
    stored = {
        "recipe": DelayedScaling(amax_history_len=70_000),
        "amax_history_fwd": torch.ones(70_000, 1),
    }
    assert q.decode_extra_state(encode_state(stored))["recipe"].amax_history_len == 70_000


def test_a_compressed_archive_is_rejected():
    buffer, compressed = io.BytesIO(), io.BytesIO()
    torch.save({"scale_fwd": torch.zeros(1 << 20)}, buffer)
    with (
        zipfile.ZipFile(buffer) as archive,
        zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as smaller,
    ):
        for entry in archive.infolist():
            smaller.writestr(entry.filename, archive.read(entry))
    with pytest.raises(ExtraStateError, match="no uncompressed entry"):
        q.decode_extra_state(compressed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("archive", [True, False])
def test_files_of_both_formats_are_read_with_their_values(dtype, archive):
    scales = torch.arange(6, dtype=dtype)
    state = {
        "scale_fwd": scales[1:4],
        "amax_history_fwd": scales.view(2, 3).T,
        "recipe": DelayedScaling(),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=archive)
    decoded = q.decode_extra_state(buffer)
    assert torch.equal(decoded["scale_fwd"], scales[1:4])
    assert torch.equal(decoded["amax_history_fwd"], scales.view(2, 3).T)
