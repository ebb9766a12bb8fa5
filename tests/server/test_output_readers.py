"""Tests of output readers: text, thinking and tool calls, at any split of the output."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.sampling.thinking import starts_in_thinking
from ssd_serve.server.openai.message import MessageRules
from ssd_serve.server.openai.output_readers import (
    FORMATS,
    CallArguments,
    CallStart,
    Event,
    Text,
    Thinking,
    format_of,
)

TOOLS = ("weather", "add")
WEATHER = '{"city": "Köln \\"}{[", "days": [1, {"x": 2}]}'
ADD = '{"a": 1, "b": 2}'


def joined(events: list[Event]) -> list[Event]:
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, CallStart):
            found.append(event)
        elif type(last) is type(event) and not isinstance(last, CallStart) and last is not None:
            found[-1] = type(event)(last.text + event.text)
        else:
            found.append(event)
    return found


def read(rules: MessageRules, pieces: list[str]) -> list[Event]:
    reader = rules.reader()
    told = [event for piece in pieces for event in reader.push(piece)]
    return joined(told + reader.finish())


def calls(rules: MessageRules, text: str) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for event in read(rules, [text]):
        if isinstance(event, CallStart):
            found.append((event.name, None))
        elif isinstance(event, CallArguments):
            found[-1] = (found[-1][0], json.loads(event.text))
    return found


BOTH = [("weather", json.loads(WEATHER)), ("add", json.loads(ADD))]
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>\n'
    f'<tool_call>\n{{"arguments": {ADD}, "name": "add"}}\n</tool_call>',
    "llama3": f'{{"name": "weather", "parameters": {WEATHER}}}; '
    f'{{"type": "function", "name": "add", "parameters": {ADD}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WEATHER}}}, '
    f'{{"name": "add", "arguments": {ADD}}}]',
}
NEWER_MISTRAL = f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{WEATHER}[TOOL_CALLS]add{ADD}"


@pytest.mark.parametrize(
    ("name", "text"),
    [*WRITTEN.items(), ("mistral", NEWER_MISTRAL), ("llama3", "<|python_tag|>" + WRITTEN["llama3"])],
)
def test_tool_call_formats_are_parsed(name: str, text: str) -> None:
    assert calls(MessageRules(name, TOOLS), text) == BOTH
    assert calls(MessageRules(name, TOOLS, parallel=False), text) == BOTH[:1]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', {}),
        ("llama3", '{"name": "add"}', {}),
        ("mistral", '[TOOL_CALLS][{"name": "add"}]', {}),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ("mistral", '[TOOL_CALLS]{"name": "add", "arguments": {"a": 1}}', {"a": 1}),
    ],
)
def test_unusual_tool_calls_are_parsed(name: str, text: str, arguments: dict[str, int]) -> None:
    assert calls(MessageRules(name, TOOLS), text) == [("add", arguments)]


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_text_before_tool_calls_is_kept(name: str) -> None:
    events = read(MessageRules(name, TOOLS), ["I look it up. \n" + WRITTEN[name] + "\n"])
    assert events[0] == Text("I look it up.")
    assert sum(isinstance(event, Text) for event in events) == 1


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    ["a < b [TOOL", '{"name": "Bob", "age": 3} is he.', "<tool_call", "  \n", "<|py"],
)
def test_incomplete_tool_call_is_text(name: str, text: str) -> None:
    assert read(MessageRules(name, TOOLS), [text]) == [Text(text)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"foo": 1}</tool_call> then'),
        ("llama3", '{"foo": 1} then'),
        ("mistral", '[TOOL_CALLS][{"foo": 1}]'),
    ],
)
def test_json_without_known_tool_is_text(name: str, text: str) -> None:
    events = read(MessageRules(name, TOOLS), [text])
    told = "".join(event.text for event in events if isinstance(event, Text))
    assert not any(isinstance(event, CallStart) for event in events)
    assert '{"foo": 1}' in told
    assert ("then" in told) == ("then" in text)


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_tool_call_keeps_partial_arguments(name: str) -> None:
    text = WRITTEN[name][: WRITTEN[name].index("days")]
    events = read(MessageRules(name, TOOLS), [text])
    assert events[0] == CallStart("weather")
    assert isinstance(events[1], CallArguments)
    assert WEATHER.startswith(events[1].text)


@pytest.mark.parametrize(
    ("thinking", "text", "events"),
    [
        (False, "<think>\nHm. \n</think>\n\nYes.", [Thinking("Hm."), Text("Yes.")]),
        (True, "Hm.</think>Yes.\n", [Thinking("Hm."), Text("Yes.\n")]),
        (True, "\nHm", [Thinking("Hm")]),
        (False, "<think>\n\n</think>\n\nYes.", [Text("Yes.")]),
        (False, " Yes <think>no</think>", [Text(" Yes <think>no</think>")]),
        (False, "<thin", [Text("<thin")]),
    ],
)
def test_thinking_is_separated_from_text(thinking: bool, text: str, events: list[Event]) -> None:
    assert read(MessageRules(thinking=thinking), [text]) == events


def test_tool_calls_in_thinking_are_thinking() -> None:
    rules = MessageRules("hermes", TOOLS, thinking=True)
    thought, *others = read(rules, [f"{WRITTEN['hermes']}</think>{WRITTEN['hermes']}"])
    assert thought == Thinking(WRITTEN["hermes"])
    assert sum(isinstance(event, CallStart) for event in others) == 2


@pytest.mark.parametrize(
    ("prompt", "thinking"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("user: Hi", False)]
)
def test_prompt_may_open_thinking(prompt: str, thinking: bool) -> None:
    assert starts_in_thinking(prompt) is thinking


PIECES = st.sampled_from(
    [
        *WRITTEN.values(),
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
        *('{"name": "add"', '"arguments": ', WEATHER, "}", "]", ";", ",", "{", "[", '"', "\\", ":", " \n"),
        *("words", "weather"),
    ]
)


@given(
    st.sampled_from([None, *FORMATS]),
    st.sampled_from([None, False, True]),
    st.booleans(),
    st.lists(PIECES, max_size=8).map("".join),
    st.data(),
)
def test_readers_are_independent_of_text_splits(
    name: str | None, thinking: bool | None, parallel: bool, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    rules = MessageRules(name, TOOLS, parallel, thinking)
    whole = read(rules, [text])
    assert read(rules, pieces) == whole
    assert read(rules, list(text)) == whole


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{% if x %}[TOOL_CALLS]{% endif %}", "mistral"),
        ('<|start_header_id|> ... {"name": ..., "parameters": ...} <|python_tag|>', "llama3"),
        ("{{ messages }}", None),
    ],
)
def test_chat_template_selects_tool_format(template: str, name: str | None) -> None:
    assert format_of(template) == name
