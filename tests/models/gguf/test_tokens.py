"""Token ids of a GGUF file's tokenizer equal those of transformers for the published tokenizer."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.text.tokenizer import Tokenizer as Ours
from tests.models.gguf.files import add, byte_level

ODD = [
    "Hello, world! don't you'll WE'RE he'S  it'd",
    "1234567 １２３ ٣٤٥ ½ ² x2y 3.14 1,000",
    "  leading,   inner \t\t tabs \r\n\r\n trailing   ",
    "日本語のテキスト 中文字符 한국어 العربية हिन्दी ไทย",
    "🎉👩‍👩‍👧‍👦 é e\u0301 ﬁ ﷺ \u200b\u00a0\u3000 \ufeff",
    "<|im_start|>user\n<|im_end|> <|im_start|>",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # tail\n\n\n",
    "\x00\x01 \x7f \ufffd \U0010ffff",
    "CamelCaseWords snake_case_words SHOUTING iPhone McDonald's ǅungla",
    "",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def split(pattern: str) -> dict[str, Any]:
    parts = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [parts, {**BYTES, "use_regex": False}]}


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt-2": {"pre_tokenizer": {**BYTES, "use_regex": True}},
    "smollm": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}],
        }
    },
    "llama-bpe": {"pre_tokenizer": split(LLAMA3), "ignore_merges": True},
    "qwen2": {"pre_tokenizer": split(QWEN2), "normalizer": {"type": "NFC"}},
    "tekken": {"pre_tokenizer": split(TEKKEN), "ignore_merges": True},
}
"""The parts of the `tokenizer.json` that the models of each pre-tokenizer publish."""


def published(name: str) -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*ODD, Path(__file__).read_text(encoding="utf-8")], trainer)
    backend.add_special_tokens([AddedToken(f"<|im_{each}|>", normalized=False) for each in ("start", "end")])
    data = json.loads(backend.to_str())
    parts = dict(PUBLISHED[name])
    data["model"]["ignore_merges"] = parts.pop("ignore_merges", False)
    return json.dumps({**data, **parts})


def write(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_byte_level_ids_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    source = published(name)
    (tmp_path / "tokenizer.json").write_text(source)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ours = Ours(write(tmp_path / "model.gguf", byte_level(source, name, add_bos_token=False)))
    for text in ODD:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(
            ids, clean_up_tokenization_spaces=False
        )


def test_end_tokens_are_those_named_and_the_known_ends_of_turns(tmp_path: Path) -> None:
    source = published("smollm")
    ends = json.loads(source)["added_tokens"]
    metadata = byte_level(source, "smollm", eos_token_id=3, bos_token_id=ends[0]["id"], add_bos_token=True)
    ours = Ours(write(tmp_path / "model.gguf", metadata))
    assert ours.eos_token_ids == (3, ends[1]["id"])
    assert ours.encode("a")[0] == ends[0]["id"]


def test_template_is_read_from_the_file(tmp_path: Path) -> None:
    metadata = byte_level(published("smollm"), "smollm")
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}!"
    ours = Ours(write(tmp_path / "model.gguf", metadata))
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "no-such"}, "pre-tokenizer 'no-such' is not built"),
        ({"model": "bert"}, "tokenizer 'bert' is not built"),
        ({"merges": ["a nonsense"]}, "merges do not fit"),
        ({"token_type": [1]}, "types of tokens"),
        ({"tokens": 7}, "wrong type or value"),
        ({"merges": [1, 2]}, "wrong type or value"),
    ],
)
def test_damaged_tokenizer_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    metadata = byte_level(published("smollm"), **{"pre": "smollm", **change})
    with pytest.raises(CheckpointError, match=message):
        Ours(write(tmp_path / "model.gguf", metadata))


def test_sentencepiece_ids_equal_those_of_its_model_file(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*ODD[:6], Path(__file__).read_text(encoding="utf-8")]),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ids = range(model.get_piece_size())
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids
    ]
    metadata: dict[str, Any] = {"model": "llama", "token_type": kinds, "bos_token_id": model.bos_id()}
    metadata |= {"tokens": [model.id_to_piece(i) for i in ids], "scores": [model.get_score(i) for i in ids]}
    ours = Ours(
        write(tmp_path / "model.gguf", {f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    )
    for text in ("Hello, world!", "  two  spaces", "日本 é 🎉", "x = [1, 2]\n"):
        assert ours.encode(text) == [model.bos_id(), *model.encode(text)]
