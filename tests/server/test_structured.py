"""Tests of structured output: grammars for the engine, and rejected requests."""

import json
import re
from typing import Any

import pytest

from ssd_serve.sampling.grammar import Grammars
from ssd_serve.sampling.thinking import END as THOUGHT_ENDS
from tests.sampling.test_grammar import END, GRAMMARS, TOKENIZER, VOCABULARY
from tests.server.fakes import ByteTokenizer, tokens
from tests.server.running_server import RunningServer, post, running_server
from tests.server.template_reader import TemplateReader

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"}],
    "triggers": ["<function="],
}
WAYS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ['{"b": [1, {}]}', "{}"], ["[1]", "{} "]),
    ({"response_format": NAMED}, ['{"a": 5}', '{\n  "a": -1\n}'], ['{"a": "x"}', "{}", '{"a": 5, "b": 1}']),
    ({"json_schema": SCHEMA}, ['{"a": 5}'], ["{}"]),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ['{"a":5}'], ['{ "a":5}']),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["5"]),
    ({"structured_outputs": {"regex": r"a/b+\d"}}, ["a/bb7"], ["ab7", "a/b"]),
    ({"structured_outputs": {"choice": ["yes", 'a "no"']}}, ["yes", 'a "no"'], ["ye", "no"]),
    ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/+'}}, ["x12"], ["x"]),
    ({"grammar": 'root ::= "x" [0-9]+'}, ["x12"], ["x"]),
    ({"structured_outputs": {"structural_tag": TAGS}}, ["", "so"], ["<function=g"]),
    (
        {"response_format": TAGS},
        ["so", 'so <function=f>{"a": 5}</function> and'],
        ["so <function=g>", 'so <function=f>{"a": 5}'],
    ),
]


def matches(grammar: str, text: str, grammars: Grammars = GRAMMARS) -> bool:
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), END]
    return grammars.start(grammar).consume(tokens) == len(tokens)


async def asked_grammar(server: RunningServer, path: str, **fields: Any) -> str:
    await post(server, path, **fields)
    return server.engine.submits()[-1].parameters.grammar


@pytest.mark.parametrize(("fields", "right", "wrong"), WAYS)
async def test_structured_output_fields_become_grammars(
    fields: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    async with running_server(lambda _: tokens([97, 0])) as server:
        grammar = await asked_grammar(server, CHAT, messages=ASK, **fields)
        assert await asked_grammar(server, COMPLETIONS, prompt="Hi", **fields) == grammar
    assert all(matches(grammar, text) for text in right)
    assert not any(matches(grammar, text) for text in wrong)


async def test_no_grammar_for_text_format_and_tools_that_may_be_called() -> None:
    async with running_server(lambda _: tokens([97, 0]), tokenizer=Hermes()) as server:
        assert await asked_grammar(server, CHAT, messages=ASK, response_format={"type": "text"}) == ""
        assert await asked_grammar(server, CHAT, messages=ASK, tools=[function("f")]) == ""


class Thinker(ByteTokenizer):
    template = "<think></think>"


@pytest.mark.parametrize("thinking", [False, True])
async def test_structured_output_allows_thinking_first(thinking: bool) -> None:
    ask = [{"role": "user", "content": "<think>" if thinking else "Hi"}]
    async with running_server(lambda _: tokens([97, 0]), tokenizer=Thinker()) as server:
        grammar = await asked_grammar(server, CHAT, messages=ask, response_format=NAMED)
    thought = 'perhaps {"b"}?' + THOUGHT_ENDS + '\n\n{"a": 5}'
    assert matches(grammar, thought if thinking else "<think>" + thought)
    assert matches(grammar, '{"a": 5}') is not thinking
    assert not matches(grammar, thought + "}")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"json_schema": {"type": "strang"}}, "json_schema", "strang"),
        ({"json_schema": {"not": {}}}, "json_schema", '"not"'),
        ({"grammar": "start: foo"}, "grammar", "foo"),
        ({"grammar": "root ::= (("}, "grammar", "GBNF"),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex", "class"),
        ({"structured_outputs": {}}, "structured_outputs", "says nothing"),
        ({"structured_outputs": {"regex": "a"}, "json_schema": {}}, "structured_outputs.regex", "one of"),
        ({"response_format": {**TAGS, "triggers": ["<x"]}}, "structural_tag", "no trigger"),
        ({"json_schema": {"enum": ["x" * 70_000]}}, "json_schema", "characters"),
        ({"json_schema": {}, "min_tokens": 3}, "min_tokens", "no token"),
        ({"json_schema": {}, "ignore_eos": True}, "ignore_eos", "no token"),
    ],
)
async def test_invalid_structured_output_returns_400_with_param(
    fields: dict[str, Any], param: str, words: str
) -> None:
    async with running_server(lambda _: tokens([97, 0])) as server:
        answer = await server.http.post(COMPLETIONS, json={"prompt": "Hi", **fields})
        assert not server.engine.submits()
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
    assert json.dumps(fields)[:5000] not in error["message"]


class Hermes(ByteTokenizer):
    template = "{{ tools }} <tool_call>"


def function(name: str, **more: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


F, G = '{"name": "f", "arguments": {"a": 5}}', '{"name": "g", "arguments": {"a": 7}}'
CALL_F, CALL_G = (f"<tool_call>\n{call}\n</tool_call>" for call in (F, G))
LIST_F, LIST_G = f"[TOOL_CALLS][{F}]", f"[TOOL_CALLS][{G}]"
NAMED_G = {"type": "function", "function": {"name": "g"}}
REQUIRED, SINGLE = {"tool_choice": "required"}, {"parallel_tool_calls": False}


@pytest.mark.parametrize(
    ("template", "fields", "right", "wrong"),
    [
        ("<tool_call>", REQUIRED, [CALL_F, f"{CALL_F}\n{CALL_G}"], ["Well", f"Well {CALL_F}", ""]),
        ("<tool_call>", {**REQUIRED, **SINGLE}, [CALL_G], [f"{CALL_F}\n{CALL_G}"]),
        ("<tool_call>", {"tool_choice": NAMED_G}, [CALL_G], [CALL_F, CALL_G.replace("7", "true")]),
        ("<tool_call>", {"tool_choice": NAMED_G, "parallel_tool_calls": True}, [CALL_G], [CALL_G * 2]),
        ("[TOOL_CALLS]", REQUIRED, [LIST_F, f"[TOOL_CALLS][{F}, {G}]"], ["Well", LIST_F[:-1], f"[{F}]"]),
        ("[TOOL_CALLS]", {**REQUIRED, **SINGLE}, [LIST_G], [f"[TOOL_CALLS][{F}, {G}]", "[TOOL_CALLS][]"]),
        ("[TOOL_CALLS]", {"tool_choice": NAMED_G}, [LIST_G], [LIST_F, f"[TOOL_CALLS][{G}, {G}]"]),
    ],
)
async def test_tool_choice_forces_tool_calls(
    template: str, fields: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    async with running_server(
        lambda _: tokens([97, 0]), tokenizer=TemplateReader(template + "{{ tools }}")
    ) as server:
        tools = [function("f"), function("g")]
        grammar = await asked_grammar(server, CHAT, messages=ASK, tools=tools, **fields)
    assert [matches(grammar, text) for text in right] == [True] * len(right)
    assert [matches(grammar, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    ("template", "right", "wrong"),
    [
        ("<tool_call>", f"I call. {CALL_F}", f"I call. {CALL_F.replace('5', 'null')}"),
        ("<|python_tag|>", F.replace("arguments", "parameters"), F),
        ("[TOOL_CALLS]", f"So: {LIST_F}", LIST_F.replace("5", "null")),
    ],
)
async def test_strict_tools_constrain_calls(template: str, right: str, wrong: str) -> None:
    async with running_server(
        lambda _: tokens([97, 0]), tokenizer=TemplateReader(template + "{{ tools }}")
    ) as server:
        grammar = await asked_grammar(server, CHAT, messages=ASK, tools=[function("f", strict=True)])
    assert matches(grammar, "No call.")
    assert matches(grammar, right)
    assert not matches(grammar, wrong)


LINKED = {
    "type": "object",
    "properties": {"first": {"$ref": "#/$defs/Link"}},
    "required": ["first"],
    "additionalProperties": False,
    "$defs": {
        "Link": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/Link"}},
            "required": ["n"],
            "additionalProperties": False,
        }
    },
}


async def test_tool_schema_references_are_relocated() -> None:
    class Thinking(Hermes):
        template = "{{ tools }} <tool_call><think></think>"

    tools = [function("f", parameters=LINKED), function("g", parameters=LINKED)]
    linked = F.replace('{"a": 5}', '{"first": {"n": 1, "next": {"n": 2}}}')
    for tokenizer in (Hermes(), Thinking()):
        async with running_server(lambda _: tokens([97, 0]), tokenizer=tokenizer) as server:
            grammar = await asked_grammar(server, CHAT, messages=ASK, tools=tools, tool_choice="required")
        assert matches(grammar, CALL_F.replace(F, linked))
        assert not matches(grammar, CALL_F.replace(F, linked.replace('"n": 2', '"m": 2')))


async def test_strict_tool_does_not_constrain_other_tools() -> None:
    odd = {"type": "object", "not": {}}
    tools = [function("f", strict=True), function("g", parameters=odd)]
    async with running_server(lambda _: tokens([97, 0]), tokenizer=Hermes()) as server:
        grammar = await asked_grammar(server, CHAT, messages=ASK, tools=tools)
        strict = [function("f", strict=True, parameters=odd), function("g")]
        answer = await server.http.post(CHAT, json={"messages": ASK, "tools": strict})
    assert matches(grammar, CALL_F)
    assert matches(grammar, CALL_G)
    assert not matches(grammar, CALL_F.replace("5", "null"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def test_deeply_nested_schema_returns_400() -> None:
    deep = '{"items":' * 3000 + "{}" + "}" * 3000
    named = f'{{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}'
    async with running_server(lambda _: tokens([97, 0]), tokenizer=Hermes()) as server:
        for field, value in (("json_schema", deep), ("response_format", named)):
            body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'
            answer = await server.http.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text
        assert (await server.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"response_format": NAMED}, "tools"),
        ({"response_format": NAMED, "tool_choice": "required"}, "tools"),
        ({"tools": [function("f", strict=True, parameters={"not": {}})]}, "tools"),
    ],
)
async def test_unsatisfiable_tool_choice_returns_400(fields: dict[str, Any], param: str) -> None:
    async with running_server(lambda _: tokens([97, 0]), tokenizer=Hermes()) as server:
        body = {"messages": ASK, "tools": [function("f")], **fields}
        answer = await server.http.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


class MistralNames(ByteTokenizer):
    template = "{{ tools }} [TOOL_CALLS]f[ARGS]{}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [MARKS[text]] if text in MARKS else super().encode(text, add_special_tokens)


MARKS = {"[TOOL_CALLS]": 4096, "[ARGS]": 4097}


def marked_grammars() -> Grammars:
    told = json.loads(TOKENIZER.to_json())
    for mark, token in MARKS.items():
        told["added_tokens"].append({**told["added_tokens"][0], "id": token, "content": mark})
    return Grammars(lambda: json.dumps(told), VOCABULARY, TOKENIZER.eos_token_ids)


def matches_marked(grammar: str, text: str) -> bool:
    parts = re.split(r"(\[TOOL_CALLS\]|\[ARGS\])", text)
    encoded = [
        [MARKS[part]] if part in MARKS else TOKENIZER.encode(part, add_special_tokens=False)
        for part in parts
        if part
    ]
    tokens = [*(token for part in encoded for token in part), END]
    return marked_grammars().start(grammar).consume(tokens) == len(tokens)


NAMED_CALL_F, NAMED_CALL_G = '[TOOL_CALLS]f[ARGS]{"a": 5}', '[TOOL_CALLS]g[ARGS]{"a": 7}'


async def test_mistral_marks_are_special_tokens_in_grammar() -> None:
    async with running_server(lambda _: tokens([97, 0]), tokenizer=MistralNames()) as server:
        body = {"messages": ASK, "tools": [function("f"), function("g")]}
        forced = await asked_grammar(server, CHAT, tool_choice="required", **body)
        named = await asked_grammar(server, CHAT, tool_choice=NAMED_G, **body)
    assert all(matches_marked(forced, text) for text in (NAMED_CALL_F, NAMED_CALL_F + NAMED_CALL_G))
    assert not any(matches_marked(forced, text) for text in ("Well.", "", NAMED_CALL_F[:-1]))
    assert not matches(forced, NAMED_CALL_F)  # a mark spelled as text does not match
    assert [matches_marked(named, text) for text in (NAMED_CALL_G, NAMED_CALL_F)] == [True, False]


async def test_strict_tools_with_mistral_marks() -> None:
    async with running_server(lambda _: tokens([97, 0]), tokenizer=MistralNames()) as server:
        grammar = await asked_grammar(server, CHAT, messages=ASK, tools=[function("f", strict=True)])
    assert all(matches_marked(grammar, text) for text in ("No call.", NAMED_CALL_F, f"So: {NAMED_CALL_F}"))
    assert not matches_marked(grammar, NAMED_CALL_F.replace("5", "null"))
