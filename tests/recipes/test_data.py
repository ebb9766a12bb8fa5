"""Texts become tokens in parts, and training sees every one of them."""

import numpy as np

from ssd_serve.recipes.corpus import SourceFile
from ssd_serve.recipes.data import encode, encode_in_parts, parts
from ssd_serve.recipes.tokenizer import train_tokenizer

FILE = SourceFile("a.py", "def one():\n    return 1\n\n\ndef two(text):\n    return text\n" * 60)


def test_parts_are_the_text_cut_after_line_ends_or_indentation() -> None:
    cut = parts(FILE)
    assert "".join(cut) == FILE.text
    assert cut == parts(FILE)
    ends = {part[-1] for part in cut if part}
    assert ends == {"\n", " "}
    assert 5 <= len(cut) <= 30  # one of 24 of its 360 lines


def test_a_document_in_parts_has_tokens_that_end_where_a_part_does() -> None:
    tokenizer = train_tokenizer([FILE.text], 300)
    (whole,), (divided,) = encode([FILE], tokenizer), encode_in_parts([FILE], tokenizer)
    assert tokenizer.decode(divided.ids.tolist()) == tokenizer.decode(whole.ids.tolist()) == FILE.text
    assert divided.ids[0] == whole.ids[0] == 0
    assert np.count_nonzero(divided.ids == 0) == 1
    assert len(divided.ids) > len(whole.ids)
