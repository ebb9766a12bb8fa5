"""Named chat templates, chosen as transformers chooses; tools for templates that take none."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from ssd_serve.base.errors import CheckpointError, RequestError
from ssd_serve.models.text.chat import ChatTemplate, takes_tools
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.models.weights.gguf.tokenizer import tokenizer_of
from ssd_serve.server.openai.output_readers import CallArguments, CallStart, HermesReader

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
NAMES = {"default": "d", "tool_use": "t {{ tools }}", "rag": "r {{ documents }}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = Backend(
        models.BPE({sign: id for id, sign in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config.json", {"model_type": "llama"})
    return tmp_path


def write(folder: Path, name: str, data: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(data), encoding="utf-8")


def place(folder: Path, where: str) -> None:
    """Store the named templates as a list, as files, or as files that replace entries of a list."""
    listed = [
        {"name": name, "template": source if where == "list" else "old"} for name, source in NAMES.items()
    ]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write(folder, "tokenizer_config.json", settings | ({} if where == "files" else {"chat_template": listed}))
    if where != "list":
        more = folder / "additional_chat_templates"
        more.mkdir()
        for name, source in NAMES.items():
            file = folder / "chat_template.jinja" if name == "default" else more / f"{name}.jinja"
            file.write_text(source)


@pytest.mark.parametrize("where", ["list", "files", "both"])
@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_templates_are_chosen_as_in_transformers(
    folder: Path, where: str, name: str | None, tools: list[Any] | None
) -> None:
    place(folder, where)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template([USER], chat_template=name, tools=tools, tokenize=False)
    ours = Tokenizer(folder)
    if tools is not None and name in ("default", "rag"):
        assert expected in ours.apply_chat_template([USER], chat_template=name, tools=tools)
    else:
        assert ours.apply_chat_template([USER], chat_template=name, tools=tools) == expected
    assert ours.chat_template(name, tools is not None) == NAMES[name or ("tool_use" if tools else "default")]


def test_conversation_without_template_of_its_name_is_refused(folder: Path) -> None:
    write(
        folder,
        "tokenizer_config.json",
        {"chat_template": [{"name": "tool_use", "template": "t {{ tools }}"}]},
    )
    tokenizer = Tokenizer(folder)
    assert tokenizer.apply_chat_template([USER], tools=[TOOL]).startswith("t [")
    for name in (None, "rag", "{{ 1 }}"):
        with pytest.raises(RequestError, match=r"names one of the model's templates \(tool_use\)") as caught:
            tokenizer.apply_chat_template([USER], chat_template=name)
        assert caught.value.field == "chat_template"
    write(folder, "tokenizer_config.json", {"chat_template": [{"name": "default"}]})
    with pytest.raises(CheckpointError, match="a name and a template in each entry"):
        Tokenizer(folder)


def test_gguf_file_has_named_templates() -> None:
    key, backend = "tokenizer.chat_template", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    found = tokenizer_of({**backend, "tokenizer.ggml.tokens": ["a"], key: "d", f"{key}.tool_use": "t"})
    assert found.chat_templates == {"default": "d", "tool_use": "t"}


def test_templates_that_take_tools_are_known() -> None:
    assert takes_tools("{% if tools %}{{ tools | tojson }}{% endif %}")
    assert takes_tools("{%- set given = tools or [] %}{% generation %}{% endgeneration %}{% break %}")
    assert not takes_tools("{# tools #}{% set tools = [] %}{{ messages[0].tools }} tools {{ 'tools' }}")
    assert not takes_tools("{% if")


WRITTEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
STRICT = (
    """{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}
{%- endif %}{% endfor %}"""
    + WRITTEN
)


@pytest.mark.parametrize("source", [WRITTEN, STRICT])
@pytest.mark.parametrize("system", [False, True])
def test_tools_of_templates_without_tools_are_text(source: str, system: bool) -> None:
    asked = [*[{"role": "system", "content": "Be kind."}] * system, USER]
    called: dict[str, Any] = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]}
    results: list[dict[str, Any]] = [
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "tool", "content": None},
    ]
    template = ChatTemplate(source, {})

    def prompt(**more: Any) -> str:
        return template.render([*asked, called, *results, USER], add_generation_prompt=False, **more)

    if system and source == STRICT:
        with pytest.raises(RequestError, match="no system"):
            prompt(tools=[TOOL])
        return
    text = prompt(tools=[TOOL])
    first = text[: text.index("I look.")]
    assert json.dumps(TOOL) in first
    assert first.startswith("<system>" if source == WRITTEN else "<user>")
    assert ("<system>Be kind.\n\nYou can call" in text) == system
    assert "<user><tool_response>\nrain\n</tool_response>\n<tool_response>\n\n</tool_response>\nHi" in text
    assert prompt().count("You can call") == 0
    reader = HermesReader({"weather"})
    events = [*reader.push(text[text.index("I look.") :]), *reader.finish()]
    calls = "".join(
        f"{each.name}:"
        if isinstance(each, CallStart)
        else each.text
        if isinstance(each, CallArguments)
        else ""
        for each in events
    )
    assert calls == 'weather:{"city": "Köln"}' * 2
