"""The weight format GGUF: one file, the parts of a split one, or a folder that holds one."""

# ruff: noqa: ARG002 (this format ignores some arguments of the contract)
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import Json
from ssd_serve.models.weights.formats import Matrices, Tensors, TokenizerParts
from ssd_serve.models.weights.gguf.config import ROPE_FACTORS, config_of
from ssd_serve.models.weights.gguf.file import SUFFIX, GgufFile, files_of, read_metadata
from ssd_serve.models.weights.gguf.tokenizer import tokenizer_of

if TYPE_CHECKING:
    from ssd_serve.kernels.native.library import NativeLibrary
    from ssd_serve.models.weights.checkpoint import Checkpoint
    from ssd_serve.models.weights.quantization import Fp8Scheme


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """`WeightFormat` of GGUF."""

    def recognises(self, path: Path) -> bool:
        return path.is_file() if path.suffix == SUFFIX else path.is_dir() and any(path.glob(f"*{SUFFIX}"))

    def config(self, path: Path) -> tuple[Json, Json]:
        metadata, tensors = read_metadata(path)
        with _errors_of(path):
            return config_of(metadata, tensors, _rope_factors(path))

    def tokenizer(self, path: Path) -> TokenizerParts:
        metadata, _ = read_metadata(path)
        with _errors_of(path):
            return tokenizer_of(metadata)

    def open(self, path: Path, stack: ExitStack, *, allow_pickle: bool) -> Mapping[str, Tensors]:
        from ssd_serve.models.weights.gguf.tensors import open_tensors

        return open_tensors(path, stack)

    def matrices(
        self, checkpoint: "Checkpoint", scheme: "Fp8Scheme | None", native: "NativeLibrary | None" = None
    ) -> Matrices:
        from ssd_serve.models.weights.gguf.matrices import GgufMatrices

        return GgufMatrices(checkpoint, native)

    def multiplies(self, scheme: "Fp8Scheme | None", device: str) -> bool:
        return False  # packed on CPUs, but only in the dtype `auto`


GGUF = GgufFormat()


@contextmanager
def _errors_of(path: Path) -> Generator[None]:
    """Name the file in errors, and report metadata of a wrong type or value as damage."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: its metadata have a wrong type or value ({error}); get it again"
        ) from error


def _rope_factors(path: Path) -> tuple[float, ...] | None:
    for each in files_of(path):
        with GgufFile(each) as file:
            if (stored := file.tensors.get(ROPE_FACTORS)) is not None:
                if stored.kind is not GGMLQuantizationType.F32:
                    raise CheckpointError(f"{ROPE_FACTORS} is {stored.kind.name}; supported is F32")
                return tuple(file.rows(stored).copy().view(np.float32).reshape(-1).tolist())
    return None
