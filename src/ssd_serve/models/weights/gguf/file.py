"""Reading the GGUF container: metadata and the places of tensors, checked against the size of the file.

Every length and count is compared with the bytes that are left before anything is read. A damaged or hostile
file is therefore a `CheckpointError` and not a large allocation. Free of torch. Knows no architecture.
Source: the GGUF specification, versions 2 and 3 (ggml, docs/gguf.md).
"""

import mmap
import os
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ssd_serve.base.errors import CheckpointError

SUFFIX = ".gguf"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_VERSIONS = (2, 3)
_ARRAY, _STRING = 9, 8
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Dtype of each metadata type that has a fixed size."""
_SMALLEST_ENTRY = 13
"""Bytes of the smallest metadata entry: an empty key, a type and one byte."""
_SMALLEST_TENSOR = 32
"""Bytes of the smallest description of a tensor: an empty name, one dimension, type and offset."""
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place of a tensor. `shape` is in the order of torch: the last dimension is contiguous."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    """Byte of the file at which its data begin."""
    row_bytes: int
    """Bytes of one run of the last dimension."""


class GgufFile:
    """An open GGUF file, as a context manager; `metadata` and `tensors` outlive it, data do not."""

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` for a file that is no GGUF, damaged, or of an unsupported version."""
        self.path = path
        try:
            with path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if not facts.st_size:
                    raise CheckpointError(f"{path} is empty: download it again")
                self.metadata, self.tensors = _contents(path, facts.st_mtime_ns, facts.st_size, facts.st_ino)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(BufferError):  # an error's traceback may hold a view; the map ends with it
            self._map.close()

    def rows(self, tensor: StoredTensor) -> npt.NDArray[np.uint8]:
        """Copy nothing: a view of a tensor's bytes, uint8 [rows, row_bytes]. Keep no reference to it."""
        rows = prod(tensor.shape[:-1])
        data = np.frombuffer(self._map, np.uint8, rows * tensor.row_bytes, tensor.start)
        return data.reshape(rows, tensor.row_bytes)


@lru_cache(maxsize=8)
def _contents(path: Path, *_version: int) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return metadata and tensors. A start needs them many times, and vocabularies are long."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        parser = _Parser(path, content)
        parser.parse()
    return parser.metadata, parser.tensors


class _Parser:
    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._map = content
        self._place = 0

    def parse(self) -> None:
        if bytes(self._map[:4]) != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with GGUF")
        self._place = 4
        version = self._number("<u4")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            why = "is stored with big-endian numbers" if swapped else f"has version {version}"
            raise CheckpointError(f"{self.path} {why}; supported is little-endian GGUF of version 2 and 3")
        tensors = self._count("<u8", _SMALLEST_TENSOR, "tensors")
        for _ in range(self._count("<u8", _SMALLEST_ENTRY, "metadata entries")):
            key = self._string()
            self.metadata[key] = self._value(self._number("<u4"))
        described = [self._description() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not _is_alignment(alignment):
            raise self._damaged(f"its alignment is {alignment!r}, not a power of two from 8")
        data = -(-self._place // alignment) * alignment
        for name, kind, shape, offset in described:
            if name in self.tensors:
                raise self._damaged(f"two tensors are named {name!r}")
            self.tensors[name] = self._tensor(name, kind, shape, data, offset, alignment)

    def _description(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        dimensions = self._number("<u4")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number("<u8") for _ in range(dimensions))[::-1]
        return name, self._number("<u4"), shape, self._number("<u8")

    def _tensor(
        self, name: str, number: int, shape: tuple[int, ...], data: int, offset: int, alignment: int
    ) -> StoredTensor:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type {number}, which is unknown"
            ) from None
        numbers, block = GGML_QUANT_SIZES[kind]
        if shape[-1] % numbers or not all(shape):
            raise self._damaged(f"tensor {name!r} of type {kind.name} has shape {shape}")
        row_bytes = shape[-1] // numbers * block
        start, size = data + offset, prod(shape[:-1]) * row_bytes
        if offset % alignment:
            raise self._damaged(f"tensor {name!r} begins at {offset}, which is not aligned to {alignment}")
        if start + size > len(self._map):
            raise self._damaged(
                f"tensor {name!r} ends at byte {start + size} and the file has {len(self._map)}"
            )
        return StoredTensor(name, kind, shape, start, row_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._damaged(f"a metadata entry has type {kind}")
        element = self._number("<u4")
        if element == _STRING:
            return [self._string() for _ in range(self._count("<u8", 8, "strings"))]
        if element not in _SCALARS:
            raise self._damaged(f"an array has elements of type {element}")
        dtype = np.dtype(_SCALARS[element])
        count = self._count("<u8", dtype.itemsize, "numbers")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _count(self, dtype: str, smallest: int, things: str) -> int:
        count: int = self._number(dtype)
        if count * smallest > len(self._map) - self._place:
            raise self._damaged(f"it announces {count} {things}, more than fit into it")
        return count

    def _number(self, dtype: str) -> Any:
        return np.frombuffer(self._take(np.dtype(dtype).itemsize), dtype)[0].item()

    def _string(self) -> str:
        (size,) = struct.unpack("<Q", self._take(8))
        return self._take(size).decode("utf-8", "replace")

    def _take(self, size: int) -> bytes:
        end = self._place + size
        if end > len(self._map):
            raise self._damaged(f"{size} bytes are needed at {self._place} and the file has {len(self._map)}")
        data = self._map[self._place : end]
        self._place = end
        return data

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or half downloaded ({why}); get it again")


def _is_alignment(value: int) -> bool:
    return 8 <= value <= _MAX_ALIGNMENT and value & (value - 1) == 0


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a model: the path itself, all parts of a split one, or those of a folder.

    Projectors of images (`mmproj-...`) do not count. Raises `CheckpointError` where a part is missing or a
    folder holds several models.
    """
    if path.is_dir():
        return _files_within(path)
    if (part := _SPLIT.fullmatch(path.name)) is None:
        return (path,)
    count = int(part["count"])
    names = [f"{part['stem']}-{number:05}-of-{part['count']}{SUFFIX}" for number in range(1, count + 1)]
    if missing := [name for name in names[:10_000] if not path.with_name(name).is_file()]:
        raise CheckpointError(f"{path} is split and lacks {len(missing)} of {count} files: {missing[0]} ...")
    return tuple(path.with_name(name) for name in names)


def _files_within(folder: Path) -> tuple[Path, ...]:
    models: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        part = _SPLIT.fullmatch(path.name)
        if not path.name.startswith("mmproj"):
            models.setdefault(path.name if part is None else part["stem"], path)
    if len(models) > 1:
        listed = ", ".join(path.name for path in models.values())
        raise CheckpointError(f"{folder} holds several GGUF models; name one of these files: {listed}")
    if not models:
        raise CheckpointError(f"{folder} has no GGUF file")
    return files_of(next(iter(models.values())))


def read_metadata(path: Path) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor]]:
    """Return the metadata of a model and all of its tensors, from all of its files. Reads no weights."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for each in files_of(path):
        with GgufFile(each) as file:
            metadata = {**file.metadata, **metadata}  # the first file has the model's
            tensors |= file.tensors
    if (count := metadata.get("split.tensors.count")) is not None and count != len(tensors):
        raise CheckpointError(f"{path}: its files hold {len(tensors)} tensors, the first one names {count}")
    return metadata, tensors
