"""A `tokenizer.model` (SentencePiece, BPE: Llama 2, Vicuna, Mistral) as a `tokenizers` tokenizer.

Only the piece table is read; merges follow from it, because in such a model a piece's score is its rank.
"""

from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from ssd_serve.base.errors import CheckpointError

_SPACE = "▁"


def convert(path: Path, *, add_bos: bool, add_eos: bool) -> Tokenizer:
    """Build the tokenizer; a model that is not BPE with byte fallback is a `CheckpointError`."""
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
    tokenizer = Tokenizer(
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
