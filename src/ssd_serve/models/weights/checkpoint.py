"""Reading weights from a Hugging Face folder: safetensors, or `.bin` where allowed; whole or sharded.

Tensors are read by name and by slice, so that a rank reads no more than its own part. Every read name is
remembered; what was never read is reported. Knows files and names; knows no architecture.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import read_json
from ssd_serve.models.hub import PICKLES
from ssd_serve.models.weights.formats import Tensors, damaged_file, format_of
from ssd_serve.models.weights.huggingface import PICKLE, SAFETENSORS

_FILES = (*SAFETENSORS.files, *PICKLE.files)
_LISTED = 8
_COMPARED_ROWS = 4096


class _SafetensorsShard:
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._file: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        part = self._file.get_slice(name)
        if not part.get_shape():  # a scalar has no slices
            return cast(torch.Tensor, self._file.get_tensor(name))
        return cast(torch.Tensor, part[rows] if columns is None else part[rows, columns])


class _TorchShard:
    def __init__(self, path: Path) -> None:
        try:
            data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files older than the zip format cannot be mapped
            data = torch.load(path, map_location="cpu", weights_only=True)
        self._data = _plain_tensors(path, data)

    def names(self) -> list[str]:
        return list(self._data)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._data[name].shape)

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        tensor = self._data[name]
        if tensor.ndim == 0:
            return tensor
        return tensor[rows] if columns is None else tensor[rows, columns]


def _plain_tensors(path: Path, data: object) -> dict[str, torch.Tensor]:
    found = cast(dict[object, object], data) if isinstance(data, dict) else {None: data}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or not _is_dense(value):
            raise CheckpointError(f"{path} holds something else than dense tensors ({name}); use safetensors")
    return cast(dict[str, torch.Tensor], found)


def _is_dense(tensor: torch.Tensor) -> bool:
    special = tensor.is_quantized or tensor.is_nested or tensor.is_meta
    return tensor.layout is torch.strided and not special


class Checkpoint:
    """Tensors of a model, by name. A context manager; tensors that were read outlive it."""

    def __init__(self, folder: Path, *, allow_pickle: bool = False, partly: bool = False) -> None:
        """`allow_pickle`: weights may be `.bin` files; `partly`: not all of them are wanted."""
        self.folder = folder
        self.format = format_of(folder)
        self._partly = partly
        self._stack = ExitStack()
        self._read: set[str] = set()
        self._bytes_read = 0
        self._comments: list[str] = []
        self._ignored: dict[str, list[str]] = {}
        try:
            self._files = dict(self.format.open(folder, self._stack, allow_pickle=allow_pickle))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def bytes_read(self) -> int:
        """Bytes of all tensors and slices that were read so far."""
        return self._bytes_read

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        self.require([name])
        return self._files[name].shape(name)

    def require(self, names: Iterator[str] | list[str]) -> None:
        """Raise one error that lists every name that is missing."""
        if missing := [name for name in names if name not in self._files]:
            raise CheckpointError(f"{self.folder} lacks {len(missing)} tensors: {shorten(missing)}")

    def read(
        self, name: str, shape: tuple[int, ...], *, rows: slice = slice(None), columns: slice | None = None
    ) -> torch.Tensor:
        """A tensor or a slice of it, in the file's dtype, on the CPU. `shape` is that of the whole tensor."""
        tensor = self.file(name, shape).read(name, rows, columns)
        self._bytes_read += tensor.nbytes
        return tensor

    def file(self, name: str, shape: tuple[int, ...] | None = None) -> Tensors:
        """The file of a tensor, which counts as read where its `shape` is given."""
        if shape is not None:
            if (found := self.shape(name)) != shape:
                raise CheckpointError(f"{self.folder}: {name} has shape {found}, config.json says {shape}")
            self._read.add(name)
        return self._files[name]

    def ignore(self, name: str, why: str = "") -> None:
        """Count a tensor as read: it is known and not needed. With `why`, `notes` says so."""
        self._read.add(name)
        if why and name in self._files:
            self._ignored.setdefault(why, []).append(name)

    def comment(self, text: str) -> None:
        """Add a sentence to `notes`."""
        self._comments.append(text)

    def notes(self) -> list[str]:
        """Sentences for the log: what about these weights is unusual, and what was not read."""
        return self._comments + [
            f"{len(names)} tensors are not read, {why}: {shorten(names)}"
            for why, names in self._ignored.items()
        ]

    def differs(self, name: str, other: str, rows: slice = slice(None)) -> bool:
        """Return True if the tensor is stored and these rows of it are not those of another one."""
        if name not in self._files:
            return False
        shape = self.shape(other)
        for start in range(*rows.indices(shape[0])[:2], _COMPARED_ROWS):
            part = slice(start, min(start + _COMPARED_ROWS, rows.indices(shape[0])[1]))
            one, two = self.read(name, shape, rows=part), self.read(other, shape, rows=part)
            if one.dtype != two.dtype or not torch.equal(one, two):
                return True
        return False

    def unread(self) -> list[str]:
        """The names of all tensors that were not read."""
        for name in self._files:
            if name.endswith(".inv_freq") and name not in self._read:
                self.ignore(name, "since they follow from config.json")
        return [name for name in self._files if name not in self._read]

    def finish(self) -> None:
        """Raise an error that lists every tensor that was not read, unless only a part was to be read."""
        if not self._partly and (unread := self.unread()):
            raise CheckpointError(
                f"{self.folder} holds {len(unread)} tensors that its architecture does not have: "
                f"{shorten(unread)}"
            )


def open_shards(
    folder: Path, files: tuple[str, str], stack: ExitStack, *, allow_pickle: bool
) -> dict[str, Tensors]:
    """Open the weights of a Hugging Face folder, whole or in shards; return the file of each tensor.

    Raises `CheckpointError` where files are missing, damaged, or pickles that are not allowed.
    """
    found: dict[str, Tensors] = {}
    for path, listed in _shards(folder, *files):
        shard = _open(path, stack, allow_pickle)
        names = set(shard.names())
        if lost := sorted(listed - names):
            raise CheckpointError(f"{path} lacks tensors that the index names: {shorten(lost)}")
        found.update(dict.fromkeys(names, shard))
    return found


def _open(path: Path, stack: ExitStack, allow_pickle: bool) -> Tensors:
    try:
        if path.suffix == ".safetensors":
            return _SafetensorsShard(path, stack)
        if not allow_pickle:  # even if an index names it
            raise CheckpointError(f"{path} is not safetensors; {PICKLES}")
        return _TorchShard(path)
    except CheckpointError:
        raise
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise damaged_file(path, error) from error


def _shards(folder: Path, whole: str, index: str) -> list[tuple[Path, set[str]]]:
    """Return the files of weights, each with the names that an index lists for it (none without an index)."""
    if (folder / index).is_file():
        return _indexed(folder, read_json(folder / index), index)
    if (folder / whole).is_file():
        return [(folder / whole, set())]
    raise CheckpointError(f"{folder} has no weights; looked for {', '.join(_FILES)}")


def _indexed(folder: Path, index: Mapping[str, Any], name: str) -> list[tuple[Path, set[str]]]:
    files: dict[str, set[str]] = {}
    for tensor, file in index.get("weight_map", {}).items():
        files.setdefault(file, set()).add(tensor)
    if not files:
        raise CheckpointError(f"{folder / name} has no weight_map")
    if outside := sorted(file for file in files if Path(file).name != file):
        raise CheckpointError(f"{folder / name} names files outside its folder: {shorten(outside)}")
    if missing := sorted(file for file in files if not (folder / file).is_file()):
        raise CheckpointError(
            f"{folder} is half downloaded: {len(missing)} of {len(files)} files of weights are missing: "
            f"{shorten(missing)}"
        )
    return [(folder / file, tensors) for file, tensors in sorted(files.items())]


def shorten(names: list[str]) -> str:
    """The first names of a list, for a message."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
