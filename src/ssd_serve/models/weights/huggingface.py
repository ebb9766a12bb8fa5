"""Folders in the Hugging Face layout: `config.json`, safetensors or pickles, `tokenizer.json` or `.model`.

Free of torch until weights are opened.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import Json, eos_ids, read_json
from ssd_serve.models.weights.formats import Matrices, Tensors, TokenizerParts

if TYPE_CHECKING:
    from ssd_serve.models.weights.checkpoint import Checkpoint
    from ssd_serve.models.weights.quantization import Fp8Scheme

_SPACE = "▁"
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
        from ssd_serve.models.text.chat import find_template

        settings = _optional(path / "tokenizer_config.json")
        return TokenizerParts(
            _backend(path, settings),
            _special_tokens(path, settings),
            find_template(path, settings),
            eos_ids(_optional(path / "config.json"), _optional(path / "generation_config.json")),
        )

    def open(self, path: Path, stack: ExitStack, *, allow_pickle: bool) -> Mapping[str, Tensors]:
        from ssd_serve.models.weights.checkpoint import open_shards

        return open_shards(path, self.files, stack, allow_pickle=allow_pickle)

    def matrices(self, checkpoint: "Checkpoint", scheme: "Fp8Scheme | None") -> Matrices:
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
        add_bos, add_eos = settings.get("add_bos_token", True), settings.get("add_eos_token", False)
        return convert_sentencepiece(path, add_bos=bool(add_bos), add_eos=bool(add_eos))
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


def convert_sentencepiece(path: Path, *, add_bos: bool, add_eos: bool) -> Backend:
    """Build the tokenizer of a `tokenizer.model` (SentencePiece, BPE: Llama 2, Vicuna, Mistral).

    Only the piece table is read; merges follow from it, because in such a model a piece's score is its rank.
    Raises `CheckpointError` for a model that is not BPE with byte fallback.
    """
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model: {error}") from error
    pieces = [model.id_to_piece(index) for index in range(model.get_piece_size())]
    special = [i for i in range(len(pieces)) if model.is_control(i) or model.is_unknown(i)]
    bytes_ = {i for i in range(len(pieces)) if model.is_byte(i)}
    ranks = {
        piece: -model.get_score(i)
        for i, piece in enumerate(pieces)
        if i not in bytes_ and not model.is_control(i) and not model.is_unknown(i) and not model.is_unused(i)
    }
    if any(rank != int(rank) for rank in ranks.values()) or len(bytes_) != 256:
        raise CheckpointError(
            f"{path} is not a BPE model with byte fallback; only those are read from tokenizer.model. "
            "Use a checkpoint that has a tokenizer.json"
        )
    unknown = pieces[model.unk_id()]
    tokenizer = Backend(
        BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=_merges(ranks),
            unk_token=unknown,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(pieces[i], normalized=False, special=True) for i in special])
    bos, eos = model.bos_id(), model.eos_id()
    before = [pieces[bos]] if add_bos and bos >= 0 else []
    after = [pieces[eos]] if add_eos and eos >= 0 else []
    if before or after:
        tokenizer.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(name, pieces.index(name)) for name in before + after],
        )
    return tokenizer


def _merges(ranks: dict[str, float]) -> list[tuple[str, str]]:
    found: list[tuple[float, str, str]] = []
    for piece, rank in ranks.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ranks and right in ranks:
                found.append((rank, left, right))
    found.sort(key=lambda merge: (merge[0], ranks[merge[1]], ranks[merge[2]]))
    return [(left, right) for _, left, right in found]
