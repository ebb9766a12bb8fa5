"""Which tokens of two tokenizers mean the same: by the bytes that they stand for, and special ones by their
names. Knows tokenizers, not models."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ssd_serve.models.text.tokenizer import Tokenizer

_MISSING = -1


@dataclass(frozen=True, slots=True)
class CommonTokens:
    """What a target's tokens are to a draft. `ids` int64 [target's vocabulary]: the draft's ids, -1 where it
    has no such token; `read` likewise, with something close in those places. `share`: of the target's tokens,
    how many the draft has."""

    ids: npt.NDArray[np.int64]
    read: npt.NDArray[np.int64]
    share: float


def common_tokens(
    target: Tokenizer, draft: Tokenizer, target_vocabulary: int, draft_vocabulary: int
) -> CommonTokens:
    """Vocabularies are those of the models' matrices, which may be padded. A token that the draft does not
    have is read as the last token of its text there."""
    known = {meaning: token for token, meaning in draft.meanings().items() if token < draft_vocabulary}
    wanted = {token: meaning for token, meaning in target.meanings().items() if token < target_vocabulary}
    ids = np.full(target_vocabulary, _MISSING, dtype=np.int64)
    for token, meaning in wanted.items():
        ids[token] = known.get(meaning, _MISSING)
    read = np.maximum(ids, 0)
    unknown = [token for token in wanted if ids[token] == _MISSING]
    for token in unknown:
        inside = draft.encode(target.decode([token], skip_special_tokens=False), add_special_tokens=False)
        if inside and inside[-1] < draft_vocabulary:
            read[token] = inside[-1]
    return CommonTokens(ids, read, 1 - len(unknown) / max(1, len(wanted)))
