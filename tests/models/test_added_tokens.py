"""Tokenizer folders as they exist: the ids and texts of transformers' AutoTokenizer, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.text.tokenizer import Tokenizer

START, END, TOOL = "<|im_start|>", "<|im_end|>", "<tool_call>"
TEXTS = [
    "a model that reads",
    f"{START}user\nHi there{END}\n{START}assistant\n{TOOL} x{TOOL}",
    f" {END} two  spaces {TOOL}\nnaïve 🎉 é<pad>",
    "</s> z<s>",
    "",
]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BEGINS = {**NAMED, "add_bos_token": True}


def entry(content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    return {
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    } | {
        "special": special,
        **flags,
    }


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, int]]:
    """The content of `tokenizer.model` and `tokenizer.json`, each with its number of ids."""
    folder = tmp_path_factory.mktemp("vocabularies")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(__file__).read_text(encoding="utf-8").splitlines()),
        model_prefix=str(folder / "spm"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        character_coverage=0.99,
        pad_id=-1,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
    )
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({sign: place for place, sign in enumerate([*signs, *NAMED.values()])}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    backend.add_tokens([AddedToken(each, special=True) for each in NAMED.values()])
    return {
        "tokenizer.model": ((folder / "spm.model").read_bytes(), 400),
        "tokenizer.json": (backend.to_str().encode(), len(signs) + 3),
    }


def shapes(first: int) -> dict[str, dict[str, Any]]:
    """Folders by name: their files besides the vocabulary, which ends before the id `first`."""
    ids = {START: first, END: first + 1, TOOL: first + 2}
    decoder = {str(first + place): entry(each, each != TOOL) for place, each in enumerate(ids)}
    listed = {"added_tokens_decoder": decoder}
    settings, extra = "tokenizer_config.json", {"additional_special_tokens": [START, END]}
    return {
        "added_tokens_decoder": {settings: {**BEGINS, **listed}},
        "decoder wins over added_tokens.json": {
            settings: {**BEGINS, **listed},
            "added_tokens.json": {TOOL: first},
        },
        "added_tokens.json": {settings: BEGINS, "added_tokens.json": ids},
        "special by settings": {settings: {**BEGINS, **extra}, "added_tokens.json": ids},
        "special by map": {
            settings: BEGINS,
            "added_tokens.json": ids,
            "special_tokens_map.json": {**NAMED, **extra},
        },
        "map alone": {
            settings: {"add_bos_token": True},
            "special_tokens_map.json": {**NAMED, "eos_token": entry(END), "pad_token": "<pad>"},
        },
        "map wins over settings": {settings: BEGINS, "special_tokens_map.json": {**NAMED, "eos_token": END}},
        "stripped spaces": {
            settings: {
                **BEGINS,
                "added_tokens_decoder": {
                    str(first): entry(END, lstrip=True, rstrip=True),
                    str(first + 1): entry("zzq"),
                },
            }
        },
        "named extra": {
            settings: {**BEGINS, "extra_special_tokens": {"image_token": START}, "turn_token": END}
        },
        "legacy": {settings: {**BEGINS, **listed, "legacy": True}},
        "not legacy": {settings: {**BEGINS, **listed, "legacy": False}},
        "no prefix": {settings: {**BEGINS, **listed, "legacy": False, "add_prefix_space": False}},
        "ends": {settings: {**BEGINS, "add_eos_token": True}},
        "neither begins nor ends": {settings: {**NAMED, "add_bos_token": False, "add_eos_token": False}},
        "another end": {settings: {**BEGINS, **listed, "eos_token": END}},
    }


def write(folder: Path, vocabulary: str, data: bytes, files: dict[str, Any]) -> None:
    (folder / vocabulary).write_bytes(data)
    kind = "LlamaTokenizer" if vocabulary == "tokenizer.model" else "PreTrainedTokenizerFast"
    files = {"config.json": {"model_type": "llama"}, **files}
    files["tokenizer_config.json"] = {"tokenizer_class": kind, **files.get("tokenizer_config.json", {})}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("vocabulary", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("shape", shapes(0))
def test_folders_give_the_ids_of_transformers(
    tmp_path: Path, vocabularies: dict[str, tuple[bytes, int]], vocabulary: str, shape: str
) -> None:
    data, size = vocabularies[vocabulary]
    write(tmp_path, vocabulary, data, shapes(size)[shape])
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for text in TEXTS:
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
        for skip in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert theirs.eos_token_id in ours.eos_token_ids
    assert ours.vocabulary == len(theirs)


def test_begin_token_is_the_default_of_sentencepiece_folders(
    tmp_path: Path, vocabularies: dict[str, tuple[bytes, int]]
) -> None:
    write(tmp_path, "tokenizer.model", vocabularies["tokenizer.model"][0], {})
    assert Tokenizer(tmp_path).encode("a model")[0] == 1  # as documented; transformers 5.23 leaves it out


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": {"eos_token": END}, "config.json": {"vocab_size": 259}}, "would end"),
        (
            {"tokenizer_config.json": {"chat_template": CHATML}, "added_tokens.json": {END: 259}},
            r"no tokens of the model: <\|im_start\|>; get",
        ),
        ({"added_tokens.json": {END: 300}}, "has the id 300 in its files and 259 in its vocabulary"),
        ({"added_tokens.json": {END: "x"}}, "lists of added tokens are damaged"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"300": {}}}},
            "lists of added tokens are damaged",
        ),
        ({"tokenizer_config.json": {"added_tokens_decoder": [1]}}, "lists of added tokens are damaged"),
    ],
)
def test_folders_that_contradict_themselves_are_refused(
    tmp_path: Path, vocabularies: dict[str, tuple[bytes, int]], files: dict[str, Any], message: str
) -> None:
    write(tmp_path, "tokenizer.json", vocabularies["tokenizer.json"][0], files)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(tmp_path)


def test_marks_that_are_all_text_are_served(
    tmp_path: Path, vocabularies: dict[str, tuple[bytes, int]]
) -> None:
    files = {"tokenizer_config.json": {"eos_token": "</s>", "chat_template": CHATML}}
    write(tmp_path, "tokenizer.json", vocabularies["tokenizer.json"][0], files)
    assert Tokenizer(tmp_path).has_chat_template
