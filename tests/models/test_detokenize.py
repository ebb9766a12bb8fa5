"""Streams of text: joined they are the text of all tokens, and no broken character is ever sent."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ssd_serve.models.text.sentencepiece_bpe import convert
from ssd_serve.models.text.tokenizer import DetokenizeStream

TEXT = "naïve 日本語の文字列 👩‍👩‍👧 emoji 🎉🎉, Ελληνικά; عربى\n\tend  of text — 你好，世界! "
CORPUS = ["the quick brown fox jumps over the lazy dog " * 5, "def function(value): return value\n" * 5]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Byte-level BPE that knows ASCII words only, so that all else is split over bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece BPE with byte fallback."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        minloglevel=2,
    )
    return convert(folder / "tokenizer.model", add_bos=True, add_eos=False)


def pushed(stream: DetokenizeStream, ids: Sequence[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_characters_split_over_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > len(TEXT)
    pieces = pushed(DetokenizeStream(tokenizer.decode), ids)
    assert "".join(pieces) == tokenizer.decode(ids) == TEXT
    assert not any("�" in piece for piece in pieces)
    assert pieces[-1] == ""


@given(ids=st.lists(st.integers(0, 320), max_size=40) | st.lists(st.integers(130, 260), max_size=150))
def test_any_bytes(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(pushed(DetokenizeStream(byte_level.decode), ids)) == byte_level.decode(ids)


@pytest.mark.parametrize("kind", ["nonsense", "no text"])
def test_bytes_without_text_are_not_held_forever(byte_level: Tokenizer, kind: str) -> None:
    special, byte = byte_level.token_to_id("<|end|>"), byte_level.encode("é").ids[0]
    token = special if kind == "no text" else byte
    assert token is not None
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_level.decode(list(ids))

    pieces = pushed(DetokenizeStream(decode), [token] * 400)
    assert "".join(pieces) == ("" if kind == "no text" else "�" * 400)
    assert longest < 50


def test_a_prompt_that_ends_within_a_character(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok 🎉 done").ids
    stream = DetokenizeStream(byte_level.decode, ids[:5])
    assert byte_level.decode(ids[:5]) == "ok �"
    assert "".join(pushed(stream, ids[5:])) == "🎉 done"


@given(text=st.text(max_size=40))
def test_any_text(byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_fallback.encode(text).ids
    assert "".join(pushed(DetokenizeStream(byte_fallback.decode), ids)) == byte_fallback.decode(ids)


def test_unfinished_character_comes_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok 🎉").ids[:-1]
    pieces = pushed(DetokenizeStream(byte_level.decode), ids)
    assert "".join(pieces[:-1]) == "ok "
    assert pieces[-1] == "�"


def test_skipped_tokens_have_no_text(byte_level: Tokenizer) -> None:
    end = byte_level.token_to_id("<|end|>")
    assert end is not None
    ids = byte_level.encode("the fox").ids
    pieces = pushed(DetokenizeStream(byte_level.decode), [end, *ids, end, *ids, end])
    assert "".join(pieces) == "the foxthe fox"


def test_first_word_keeps_its_space_after_a_prompt(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("the quick brown fox", add_special_tokens=False).ids
    cut = next(i for i in range(2, len(ids)) if str(byte_fallback.id_to_token(ids[i])).startswith("▁"))
    rest = "".join(pushed(DetokenizeStream(byte_fallback.decode, ids[:cut]), ids[cut:]))
    assert rest.startswith(" ")
    assert byte_fallback.decode(ids[:cut]) + rest == "the quick brown fox"


def test_sentencepiece_conversion_is_exact(tmp_path: Path, byte_fallback: Tokenizer) -> None:
    """The same ids as SentencePiece itself, for words, rare characters and spaces."""
    (tmp_path / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = convert(tmp_path / "tokenizer.model", add_bos=True, add_eos=False)
    for text in (TEXT, CORPUS[0], " leading  and trailing ", "x", "foxfoxfox def dog_dog"):
        assert tokenizer.encode(text).ids == [model.bos_id(), *model.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
