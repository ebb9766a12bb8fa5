"""Folders in the Hugging Face layout: `config.json`, safetensors or pickles, `tokenizer.json` or `.model`.

Free of torch until weights are opened.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as Backend

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import Json, eos_ids, read_json
from ssd_serve.models.weights.formats import Matrices, Tensors, TokenizerParts

if TYPE_CHECKING:
    from ssd_serve.kernels.native.library import NativeLibrary
    from ssd_serve.models.weights.checkpoint import Checkpoint
    from ssd_serve.models.weights.quantization import Fp8Scheme

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class HuggingFaceFolder:
    """`WeightFormat` of folders that hold one of `files`: the whole weights, or the index of their shards."""

    files: tuple[str, str]

    def recognises(self, path: Path) -> bool:
        return any((path / file).is_file() for file in self.files)

    def config(self, path: Path) -> tuple[Json, Json]:
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path} has no config.json; is it a model folder in the Hugging Face layout?"
            )
        return read_json(path / "config.json"), _optional(path / "generation_config.json")

    def tokenizer(self, path: Path) -> TokenizerParts:
        from ssd_serve.models.text.chat import find_templates

        settings = _optional(path / "tokenizer_config.json")
        return TokenizerParts(
            _backend(path, settings),
            _special_tokens(path, settings),
            find_templates(path, settings),
            eos_ids(_optional(path / "config.json"), _optional(path / "generation_config.json")),
        )

    def open(self, path: Path, stack: ExitStack, *, allow_pickle: bool) -> Mapping[str, Tensors]:
        from ssd_serve.models.weights.checkpoint import open_shards

        return open_shards(path, self.files, stack, allow_pickle=allow_pickle)

    def matrices(
        self,
        checkpoint: "Checkpoint",
        scheme: "Fp8Scheme | None",
        native: "NativeLibrary | None" = None,  # noqa: ARG002
    ) -> Matrices:
        from ssd_serve.models.weights.matrices import MatrixReader

        return MatrixReader(checkpoint, scheme)

    def multiplies(self, scheme: "Fp8Scheme | None", device: str) -> bool:
        from ssd_serve.models.weights.matrices import multiplied_format

        return multiplied_format(scheme, device) is not None


SAFETENSORS = HuggingFaceFolder(("model.safetensors", "model.safetensors.index.json"))
PICKLE = HuggingFaceFolder(("pytorch_model.bin", "pytorch_model.bin.index.json"))


def _optional(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}


def _backend(folder: Path, settings: Json) -> Backend:
    if (path := folder / "tokenizer.json").is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions
            raise CheckpointError(f"cannot read {path}: {error}") from error
    if (path := folder / "tokenizer.model").is_file():
        from ssd_serve.models.text.sentencepiece_bpe import convert

        add_bos, add_eos = settings.get("add_bos_token", True), settings.get("add_eos_token", False)
        return convert(path, add_bos=bool(add_bos), add_eos=bool(add_eos))
    raise CheckpointError(f"{folder} has no tokenizer; looked for tokenizer.json and tokenizer.model")


def _special_tokens(folder: Path, settings: Json) -> dict[str, str]:
    """Return the named special tokens that exist; each is stored as a string or an object with `content`."""
    found: dict[str, str] = {}
    for source in (_optional(folder / "special_tokens_map.json"), settings):
        for name in _NAMED:
            value = source.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
    return found
