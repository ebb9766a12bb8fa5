"""Tokens of two tokenizers are mapped by meaning; a mapped draft uses its target's tokens."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ssd_serve.kernels.batch import build_batch
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.text.tokenizer import CommonTokens, Tokenizer, common_tokens
from ssd_serve.models.wrapped import MappedModel
from tests.end_to_end.tiny_pair import write_model
from tests.models.test_decoder import chunk

WORDS = ["a", "b", "\u0120a", "\u0120b", "ab", "\u0120ab"]


def written(folder: Path, backend: Backend) -> Tokenizer:
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return Tokenizer(folder)


def byte_level(folder: Path, words: list[str], special: str = "<end>") -> Tokenizer:
    backend = Backend(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special, special=True)])
    return written(folder, backend)


def pieces(folder: Path, words: list[str]) -> Tokenizer:
    backend = Backend(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return written(folder, backend)


def test_common_tokens_are_found_by_bytes(tmp_path: Path) -> None:
    target, draft = byte_level(tmp_path / "t", WORDS), byte_level(tmp_path / "d", WORDS[::-1])
    found = common_tokens(target, draft, 7, 7)
    assert found.ids.tolist() == [5, 4, 3, 2, 1, 0, 6]
    assert found.share == 1.0
    same = common_tokens(target, target, 7, 7)
    assert same.ids.tolist() == same.read.tolist() == list(range(7))


def test_byte_level_and_sentencepiece_spell_alike(tmp_path: Path) -> None:
    target = byte_level(tmp_path / "t", ["a", "\u0120a", "\u010a", "\u00e9"])  # a, space a, newline, byte E9
    draft = pieces(tmp_path / "d", ["\u2581a", "<0x0A>", "a", "<0xE9>"])
    found = common_tokens(target, draft, 5, 4)
    assert found.ids.tolist() == [2, 0, 1, 3, -1]
    assert found.share == pytest.approx(4 / 5)


def test_padded_ids_are_not_common(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "t", WORDS)
    found = common_tokens(tokenizer, tokenizer, 16, 9)
    assert found.ids.tolist() == [*range(7), *[-1] * 9]
    assert found.share == 1.0


def test_missing_token_is_read_as_the_end_of_its_text(tmp_path: Path) -> None:
    target = byte_level(tmp_path / "t", WORDS)
    draft = byte_level(tmp_path / "d", ["a", "b", "\u0120"], special="<other>")
    found = common_tokens(target, draft, 7, 4)
    assert found.ids.tolist() == [0, 1, -1, -1, -1, -1, -1]
    assert found.read.tolist()[:6] == [0, 1, 0, 1, 1, 1]
    assert found.share == pytest.approx(2 / 7)


def test_mapped_model_permutes_logits(tmp_path: Path) -> None:
    write_model(tmp_path / "draft", seed=1, noise=0.0)
    own = load_model(tmp_path / "draft", ModelOptions(device="cpu", dtype="fp32", slots=64, context=None))
    vocabulary = own.facts.vocabulary
    order = np.array(random.Random(1).sample(range(vocabulary), vocabulary))
    ids = np.concatenate((order, [-1]))  # the target has one more
    mapped = MappedModel(own, CommonTokens(ids, np.maximum(ids, 0), 1.0), (3,))
    assert (mapped.facts.vocabulary, mapped.facts.eos_token_ids) == (vocabulary + 1, (3,))
    tokens = list(range(20))
    theirs = own.forward(build_batch([chunk(order[tokens].tolist(), 0, 20, range(20))])).logits
    ours = mapped.forward(build_batch([chunk(tokens, 0, 20, range(20))])).logits
    assert torch.equal(ours[:, :-1], theirs[:, torch.from_numpy(order)])
    assert bool((ours[:, -1] == -torch.inf).all())
