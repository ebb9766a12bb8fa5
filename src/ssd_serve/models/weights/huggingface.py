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
        from ssd_serve.models.text.added_tokens import add_tokens, check_marks, special_tokens
        from ssd_serve.models.text.chat import find_templates

        settings, config = _optional(path / "tokenizer_config.json"), _optional(path / "config.json")
        tokens, templates = special_tokens(path, settings), find_templates(path, settings)
        named = {name: token.content for name, token in tokens.items()}
        backend = _backend(path, settings, named)
        add_tokens(backend, path, settings, tokens)
        try:
            check_marks(backend, named, "".join(templates.values()), config.get("vocab_size"))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        ends = eos_ids(config, _optional(path / "generation_config.json"))
        return TokenizerParts(backend, named, templates, ends)

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
MEDUSA = HuggingFaceFolder(("medusa_lm_head.safetensors", "medusa_lm_head.safetensors.index.json"))
MEDUSA_PICKLE = HuggingFaceFolder(("medusa_lm_head.pt", "medusa_lm_head.pt.index.json"))
HYDRA_PICKLE = HuggingFaceFolder(("hydra_lm_head.pt", "hydra_lm_head.pt.index.json"))


def _optional(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}


def _backend(folder: Path, settings: Json, named: Mapping[str, str]) -> Backend:
    if (path := folder / "tokenizer.json").is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions
            raise CheckpointError(f"cannot read {path}: {error}") from error
    if (path := folder / "tokenizer.model").is_file():
        from ssd_serve.models.text.sentencepiece_bpe import Scheme, convert

        add_bos, add_eos = settings.get("add_bos_token", True), settings.get("add_eos_token", False)
        scheme: Scheme = "always" if settings.get("legacy") else "first"
        if settings.get("add_prefix_space") is False:
            scheme = "never"
        return convert(path, add_bos=bool(add_bos), add_eos=bool(add_eos), scheme=scheme, named=named)
    raise CheckpointError(f"{folder} has no tokenizer; looked for tokenizer.json and tokenizer.model")
