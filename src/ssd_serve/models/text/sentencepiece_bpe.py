"""SentencePiece vocabularies (BPE: Llama 2, Vicuna, Mistral) as `tokenizers` tokenizers.

Only the table of pieces is read; merges follow from it, because in such a model a piece's score is its rank.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from ssd_serve.base.errors import CheckpointError

_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class Pieces:
    """A vocabulary by id; the sets hold ids of pieces that text is not merged into."""

    names: Sequence[str]
    scores: Sequence[float]
    bytes: Collection[int]
    control: Collection[int]
    unused: Collection[int]
    user_defined: Collection[int]
    unknown: int


Scheme = Literal["always", "first", "never"]
"""Pieces of a text, between added tokens, that get a space at their beginning, as transformers does it."""


def convert(
    path: Path, *, add_bos: bool, add_eos: bool, scheme: Scheme | None = None, named: Mapping[str, str] = {}
) -> Tokenizer:
    """Build the tokenizer of a `tokenizer.model`; without `scheme`, with the ids of SentencePiece itself.

    `named` has the folder's `bos_token` and `eos_token`. Raises `CheckpointError`.
    """
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model: {error}") from error
    ids = range(model.get_piece_size())
    pieces = Pieces(
        names=[model.id_to_piece(i) for i in ids],
        scores=[model.get_score(i) for i in ids],
        bytes={i for i in ids if model.is_byte(i)},
        control={i for i in ids if model.is_control(i)},
        unused={i for i in ids if model.is_unused(i)},
        user_defined=(),
        unknown=model.unk_id(),
    )
    bos, eos = (
        named.get(f"{name}_token", pieces.names[index] if index >= 0 else "")
        for name, index in (("bos", model.bos_id()), ("eos", model.eos_id()))
    )
    try:
        return build(
            pieces,
            before=[bos] if add_bos and bos in pieces.names else [],
            after=[eos] if add_eos and eos in pieces.names else [],
            prefix=scheme != "never",
            scheme=scheme,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}. Use a checkpoint that has a tokenizer.json") from error


def build(
    pieces: Pieces,
    *,
    before: list[str],
    after: list[str],
    prefix: bool = True,
    scheme: Scheme | None = None,
) -> Tokenizer:
    """Build a tokenizer that puts `before` and `after` around a text, and a space before it with `prefix`.

    Raises `CheckpointError` for a vocabulary that is not BPE with byte fallback.
    """
    special = sorted({*pieces.control, pieces.unknown})
    apart = {*special, *pieces.bytes, *pieces.unused, *pieces.user_defined}
    ranks = {
        piece: -score
        for i, (piece, score) in enumerate(zip(pieces.names, pieces.scores, strict=True))
        if i not in apart
    }
    if any(rank != int(rank) for rank in ranks.values()) or len(pieces.bytes) != 256:
        raise CheckpointError(
            "the SentencePiece vocabulary is not BPE with byte fallback; only those are supported"
        )
    tokenizer = Tokenizer(
        BPE(
            vocab={piece: i for i, piece in enumerate(pieces.names)},
            merges=_merges(ranks),
            unk_token=pieces.names[pieces.unknown],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    if scheme is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    else:
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
        )
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(decoding)
    for ids, is_special in ((special, True), (pieces.user_defined, False)):
        tokenizer.add_tokens(
            [AddedToken(pieces.names[i], normalized=False, special=is_special) for i in sorted(ids)]
        )
    if before or after:
        tokenizer.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(name, list(pieces.names).index(name)) for name in before + after],
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
