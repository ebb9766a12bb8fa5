"""The tokenizer wrapper: folders, identity, chat templates (against transformers), errors, no torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ssd_serve.base.errors import CheckpointError, RequestError
from ssd_serve.models.text.tokenizer import Tokenizer

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('bad role') }}{% endif %}
[{{ message.role }}] {{ message.content | trim }}{{ message | tojson }}
{% if loop.last and not extra %}{% break %}{% endif %}
{% endfor %}
{% if tools is none and documents is none %}no tools{% endif %}
{% if add_generation_prompt %}[assistant] {% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"""
MESSAGES = [{"role": "system", "content": " Be <brief>. "}, {"role": "user", "content": "naïve 你好?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a byte-level tokenizer, a template and a configuration."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(["some text to learn from " * 3], trainer)
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE,
    })  # fmt: skip
    write(tmp_path / "config.json", {"eos_token_id": [7, 8]})
    write(tmp_path / "generation_config.json", {"eos_token_id": 9})
    return tmp_path


def write(path: Path, data: dict[str, Any]) -> None:
    """Write JSON."""
    path.write_text(json.dumps(data), encoding="utf-8")


def test_text_and_back(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    text = "some text, longer than four tokens: 你好</s>"
    ids = tokenizer.encode(text)
    assert ids[-1] == tokenizer.token_id("</s>")
    assert tokenizer.decode(ids) == text.removesuffix("</s>")
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode([*ids, 100_000]) == tokenizer.decode(ids)
    assert tokenizer.eos_token_ids == (7, 8, 9, 1)


def test_bytes_of_tokens_join_to_those_of_the_text(folder: Path) -> None:
    tokenizer, text = Tokenizer(folder), " naïve 你好 🎉👩‍👩‍👧 text\n"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert b"\xf0" in map(tokenizer.token_bytes, ids)
    assert (tokenizer.token_bytes(1), tokenizer.token_bytes(100_000)) == (b"</s>", b"")
    assert tokenizer.special_token_ids == {0, 1}


def test_stream(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("a 🎉 b")
    stream = tokenizer.stream(context=tokenizer.encode("before"))
    assert "".join([*map(stream.push, ids), stream.flush()]) == "a 🎉 b"


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_chat_template_renders_as_in_transformers(folder: Path, prompt: bool, extra: bool) -> None:
    ours = Tokenizer(folder)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt, extra=extra)
    assert ours.apply_chat_template(MESSAGES, prompt, extra=extra) == expected


def test_template_file_wins(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!{{ strftime_now('%Y')|length }}")
    assert Tokenizer(folder).apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!4"


def test_template_error_is_a_request_error(folder: Path) -> None:
    with pytest.raises(RequestError, match="bad role") as caught:
        Tokenizer(folder).apply_chat_template([{"role": "tool", "content": ""}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_templates_are_sandboxed(folder: Path, source: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(RequestError):
        Tokenizer(folder).apply_chat_template(MESSAGES)


def test_no_template(folder: Path) -> None:
    write(folder / "tokenizer_config.json", {})
    tokenizer = Tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="has no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_identity(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = Tokenizer(folder).vocabulary_hash()
    assert len(first) == 64
    other = tmp_path_factory.mktemp("other")
    data = json.loads((folder / "tokenizer.json").read_text())
    write(other / "tokenizer.json", data)
    assert Tokenizer(other).vocabulary_hash() == first
    vocabulary = data["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    write(other / "tokenizer.json", data)
    assert Tokenizer(other).vocabulary_hash() != first


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "cannot read"),
        ("tokenizer.model", "nonsense", "not a SentencePiece model"),
        ("nothing", "", "has no tokenizer"),
        ("tokenizer_config.json", "[]", "does not hold a JSON object"),
    ],
)
def test_damaged_folders(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(tmp_path)


def test_damaged_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="chat template is damaged"):
        Tokenizer(folder)


def test_needs_no_torch() -> None:
    code = (
        "import sys, ssd_serve.models.text.tokenizer, ssd_serve.models.hub; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
