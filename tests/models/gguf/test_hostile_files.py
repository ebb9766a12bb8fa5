"""Damaged and hostile GGUF files are refused with a clear error, without large allocations."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.weights.gguf.file import GgufFile, files_of


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "a", shape: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def build(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (tensor(),),
    data: int = 64,
    version: int = 3,
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries + tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


HUGE = 2**62
HOSTILE = {
    "empty": (b"", "is empty"),
    "no magic": (b"nonsense" * 8, "does not begin with GGUF"),
    "version": (build(version=9), "has version 9"),
    "big-endian": (build(version=3 << 24), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "announces"),
    "entry count": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "announces"),
    "key length": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE) + bytes(64), "bytes are needed"),
    "string count": (build((entry("k", 9, struct.pack("<IQ", 8, HUGE)),)), "announces"),
    "number count": (build((entry("k", 9, struct.pack("<IQ", 4, HUGE)),)), "announces"),
    "nested array": (build((entry("k", 9, struct.pack("<IQ", 9, 1)),)), "elements of type 9"),
    "value type": (build((entry("k", 99, b""),)), "has type 99"),
    "alignment": (build((entry("general.alignment", 4, struct.pack("<I", 24)),)), "alignment is 24"),
    "dimensions": (build(tensors=(tensor(shape=(1,) * 5),)), "5 dimensions"),
    "no numbers": (build(tensors=(tensor(shape=(4, 0)),)), "has shape"),
    "half a block": (build(tensors=(tensor(shape=(33, 1), kind=8),)), "has shape"),
    "type": (build(tensors=(tensor(kind=4711),)), "type 4711"),
    "beyond the end": (build(tensors=(tensor(shape=(HUGE, 2)),)), "ends at byte"),
    "offset": (build(tensors=(tensor(offset=8),)), "not aligned"),
    "same name": (build(tensors=(tensor(), tensor())), "two tensors"),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_file_is_refused_without_large_allocations(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    numbers = np.arange(8, dtype="<f4")
    entries = (
        entry("text", 8, text("ä")),
        entry("flag", 7, b"\1"),
        entry("many", 9, struct.pack("<IQ2i", 5, 2, -1, 5)),
        entry("words", 9, struct.pack("<IQ", 8, 1) + text("w")),
    )
    path = tmp_path / "model.gguf"
    path.write_bytes(build(entries, data=0) + numbers.tobytes())
    with GgufFile(path) as file:
        assert file.metadata == {"text": "ä", "flag": True, "many": [-1, 5], "words": ["w"]}
        stored = file.tensors["a"]
        assert stored.shape == (2, 4)
        assert np.array_equal(file.rows(stored).copy().view("<f4"), numbers.reshape(2, 4))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_damage_is_an_error_or_a_valid_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(build((entry("text", 8, text("value")), entry("n", 4, struct.pack("<I", 7)))))
    end = data.draw(st.integers(0, len(whole)))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=3)):
        whole[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damage") / "model.gguf"
    path.write_bytes(whole[:end])
    try:
        with GgufFile(path) as file:
            assert all(each.start + each.row_bytes <= end for each in file.tensors.values())
    except CheckpointError:
        pass


def test_a_missing_part_of_a_split_file_is_named(tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00003.gguf"
    first.write_bytes(build())
    with pytest.raises(CheckpointError, match="lacks 2 of 3 files: m-00002-of-00003"):
        files_of(first)


def test_a_folder_with_several_models_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_bytes(build())
    with pytest.raises(CheckpointError, match=r"name one of these files: a\.gguf, b\.gguf$"):
        files_of(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert files_of(tmp_path) == (tmp_path / "a.gguf",)


def test_a_file_and_a_folder_resolve_as_models(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(build())
    for name in (tmp_path, tmp_path / "a.gguf"):
        assert resolve_model(str(name), "target") == name
    with pytest.raises(CheckpointError, match="no file"):
        resolve_model(str(tmp_path / "b.gguf"), "target")
