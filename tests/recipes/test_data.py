"""Texts become tokens in parts, and training sees every one of them."""

import json
from pathlib import Path

import numpy as np
from tokenizers import processors

from ssd_serve.recipes.corpus import SourceFile
from ssd_serve.recipes.data import Document, encode, encode_in_parts, parts, save_stream
from ssd_serve.recipes.tokenizer import train_tokenizer
from ssd_serve.recipes.workspace import Workspace

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


def test_a_text_begins_as_its_tokenizer_begins_texts() -> None:
    tokenizer = train_tokenizer([FILE.text], 300)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # which begins them with nothing
    (divided,) = encode_in_parts([FILE], tokenizer)
    assert tokenizer.decode(divided.ids.tolist()) == FILE.text
    assert 0 not in divided.ids


def test_ids_of_large_vocabularies_are_kept(tmp_path: Path) -> None:
    for largest, kept in ((65_535, np.uint16), (65_536, np.uint32)):
        save_stream([Document("a", np.array([1, largest]), 2)], tmp_path / "ids.npy")
        found = np.load(tmp_path / "ids.npy")
        assert found.tolist() == [1, largest]
        assert found.dtype == kept


def test_held_out_documents_are_also_found_where_their_lengths_are_not_told(workspace: Workspace) -> None:
    documents = [document.ids.tolist() for document in workspace.held_out()]
    assert len(documents) > 1
    summary = workspace.summary()
    del summary["held_out_lengths"]
    workspace.summary_file.write_text(json.dumps(summary))
    assert [document.ids.tolist() for document in workspace.held_out()] == documents
