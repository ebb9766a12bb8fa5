"""The weight format GGUF: one file, the parts of a split one, or a folder that holds one."""

from collections.abc import Mapping
from contextlib import ExitStack
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
    from ssd_serve.models.weights.checkpoint import Checkpoint
    from ssd_serve.models.weights.quantization import Fp8Scheme


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """`WeightFormat` of GGUF; tensors are widened when they are read."""

    def recognises(self, path: Path) -> bool:
        return path.is_file() if path.suffix == SUFFIX else path.is_dir() and any(path.glob(f"*{SUFFIX}"))

    def config(self, path: Path) -> tuple[Json, Json]:
        metadata, tensors = read_metadata(path)
        try:
            return config_of(metadata, tensors, _rope_factors(path))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def tokenizer(self, path: Path) -> TokenizerParts:
        try:
            return tokenizer_of(read_metadata(path)[0])
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def open(self, path: Path, stack: ExitStack, *, allow_pickle: bool) -> Mapping[str, Tensors]:  # noqa: ARG002
        from ssd_serve.models.weights.gguf.tensors import open_tensors

        return open_tensors(path, stack)

    def matrices(self, checkpoint: "Checkpoint", scheme: "Fp8Scheme | None") -> Matrices:  # noqa: ARG002
        from ssd_serve.models.weights.matrices import MatrixReader

        return MatrixReader(checkpoint, None)

    def multiplies(self, scheme: "Fp8Scheme | None", device: str) -> bool:  # noqa: ARG002
        return False


GGUF = GgufFormat()


def _rope_factors(path: Path) -> tuple[float, ...] | None:
    for each in files_of(path):
        with GgufFile(each) as file:
            if (stored := file.tensors.get(ROPE_FACTORS)) is not None:
                if stored.kind is not GGMLQuantizationType.F32:
                    raise CheckpointError(f"{ROPE_FACTORS} is {stored.kind.name}; supported is F32")
                return tuple(file.rows(stored).copy().view(np.float32).reshape(-1).tolist())
    return None
