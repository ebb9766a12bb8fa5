"""Masks of a tree's rows, against a matcher that reads every path from the beginning."""

import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from ssd_serve.base.errors import GrammarError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.hub import embedded_folder
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.sampling.choice import apply_request_masks, sample
from ssd_serve.sampling.grammar import Grammars, GrammarState, Masks, check_grammar
from ssd_serve.sampling.native_choice import NativeChoice
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.rows import SamplingRows
from tests.examples import examples

TARGET: Path = embedded_folder("target")
TOKENIZER = Tokenizer(TARGET)
VOCABULARY = 4100
"""A little more than the tokenizer has, as models often do."""
GRAMMARS = Grammars(TOKENIZER.to_json, VOCABULARY, TOKENIZER.eos_token_ids)
PERSON = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
END = TOKENIZER.eos_token_ids[0]
TEXT = TOKENIZER.encode('{"name": "Ada", "age": 36}', add_special_tokens=False)


def lark(rules: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": rules}]})


def grammar_of_rules(count: int) -> str:
    rules = [f"a{each}: a{each + 1}" for each in range(count)]
    return lark("\n".join(["start: a0", *rules, f'a{count}: "q"']))


def grammar_of_references(count: int) -> str:
    chain = {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(count)}
    return LLMatcher.grammar_from_json_schema(
        {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"type": "null"}}}
    )


def allowed(mask: Masks) -> set[int]:
    return {token for token in range(32 * mask.shape[-1]) if mask.reshape(-1)[token >> 5] >> (token & 31) & 1}


def fresh(output: list[int]) -> set[int] | None:
    """Tokens allowed after this output by a fresh matcher; None if it does not match."""
    try:
        return allowed(GRAMMARS.start(PERSON, output).masks())
    except GrammarError:
        return None


def test_grammar_allows_only_end_tokens_after_a_complete_text() -> None:
    state = GRAMMARS.start(PERSON)
    for token in TEXT:
        assert token in allowed(state.masks())
        assert state.consume([token]) == 1
    assert allowed(state.masks()) == set(TOKENIZER.eos_token_ids)
    assert state.consume([END]) == 1
    assert not state.error


@given(st.data())
def test_grammar_mask_of_each_node_is_that_of_its_path(data: st.DataObject) -> None:
    begun = data.draw(st.integers(0, len(TEXT)))
    output = TEXT[:begun]
    state = GRAMMARS.start(PERSON, output)
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(0, 10))):
        parent = data.draw(st.integers(-1, len(tokens) - 1))
        path = paths[1 + parent]
        following = TEXT[begun + len(path)] if begun + len(path) < len(TEXT) else END
        token = data.draw(st.sampled_from([following, following, 17, TEXT[0]]))
        tokens.append(token)
        parents.append(parent)
        paths.append([*path, token])
    masks = state.masks(tokens, parents)
    assert masks.shape == (1 + len(tokens), -(-VOCABULARY // 32))
    for path, mask in zip(paths, masks, strict=True):
        expected = fresh([*output, *path]) if END not in path else None
        if expected is not None:
            assert allowed(mask) == expected
    assert allowed(state.masks()) == fresh(output)


OPTIONAL = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"b": {"type": "integer"}, "c": {"type": "integer"}}},
            "d": {"type": "integer"},
        },
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": r"[ \n]{0,9}"},
    }
)


def behind(output: list[int]) -> set[int]:
    return allowed(GRAMMARS.start(OPTIONAL, output).masks())


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(12), deadline=None)
def test_earlier_trees_do_not_change_grammar_masks(random: Random) -> None:
    output: list[int] = []
    state = GRAMMARS.start(OPTIONAL)
    for _ in range(6):
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = [[]]
        for _ in range(12):
            parent = random.randrange(-1, len(tokens))
            following = sorted(behind([*output, *paths[1 + parent]]) - {END})
            if following:
                tokens.append(random.choice(following))
                parents.append(parent)
                paths.append([*paths[1 + parent], tokens[-1]])
        masks = state.masks(tokens, parents)
        for path, mask in zip(paths, masks, strict=True):
            assert allowed(mask) == behind([*output, *path])
        walked = random.choice(paths)
        assert state.consume(walked) == len(walked)
        output += walked


def test_grammar_state_copies_are_independent() -> None:
    one = GRAMMARS.start(PERSON, TEXT[:2])
    other = one.copy()
    one.consume(TEXT[2:5])
    assert allowed(other.masks()) == fresh(TEXT[:2])


def test_output_that_does_not_match_the_grammar_is_refused() -> None:
    with pytest.raises(GrammarError, match="does not match"):
        GRAMMARS.start(PERSON, [TEXT[0], TEXT[0]])


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (LLMatcher.grammar_from_regex("(["), "unclosed character class"),
        (lark("start: foo"), "unknown name"),
        (LLMatcher.grammar_from_json_schema({"type": "strang"}), "strang"),
        ("no grammar at all", "no grammar"),
        (grammar_of_rules(3_000), "rules"),
        (grammar_of_references(1_500), "nested"),
        (lark(f'start: {" ".join(["a?"] * 9_000)}\na: "q"'), "too big"),
        (LLMatcher.grammar_from_json_schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "anyOf"),
    ],
)
def test_invalid_grammar_is_refused_with_its_reason(grammar: str, words: str) -> None:
    for check in (check_grammar, GRAMMARS.compile):
        with pytest.raises(GrammarError, match=re.escape(words)):
            check(grammar)
    assert not GRAMMARS.is_compiled(grammar)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (lark("start: start"), "no text"),
        (LLMatcher.grammar_from_json_schema({"$ref": "#"}), "no text"),
        (LLMatcher.grammar_from_regex("a?" * 1_100), "takes too long"),
    ],
)
def test_grammar_without_any_text_or_too_slow_is_refused(grammar: str, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        GRAMMARS.compile(grammar)


def test_grammar_error_messages_are_short() -> None:
    with pytest.raises(GrammarError) as error:
        check_grammar(LLMatcher.grammar_from_regex("(" * 900))
    assert len(str(error.value)) < 500


def test_grammar_cache_evicts_the_least_recently_used() -> None:
    grammars = Grammars(TOKENIZER.to_json, VOCABULARY, TOKENIZER.eos_token_ids)
    many = [LLMatcher.grammar_from_regex(f"a{{{n}}}") for n in range(1, 80)]
    for each in many:
        grammars.start(each)
    assert sum(map(grammars.is_compiled, many)) == 64
    grammars.start(many[0])
    assert grammars.is_compiled(many[0])


def rows_of(state: GrammarState, temperature: float, logprobs: int | None = None) -> SamplingRows:
    tokens, parents = TEXT[1:4], (-1, 0, 1)
    return SamplingRows(
        SamplingParameters(temperature=temperature, top_k=3, logprobs=logprobs),
        9,
        40,
        tokens=tokens,
        parents=parents,
        depths=(1, 2, 3),
        masks=state.masks(tokens, parents),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen(native: NativeLibrary, temperature: float) -> None:
    state = GRAMMARS.start(PERSON, TEXT[:1])
    masked, free = rows_of(state, temperature, logprobs=5), SamplingRows(SamplingParameters(), 3, 8)
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn((5, VOCABULARY), generator=generator)
    noise = NoiseRows(VOCABULARY, 64)
    by_torch = sample(logits, [free, masked], noise)
    compiled = sample(logits, [free, masked], noise, NativeChoice(native))
    assert by_torch.choices == compiled.choices
    assert by_torch.choices[0] == sample(logits[:1], [free], noise).choices[0]
    assert masked.masks is not None
    for choice, mask, logprobs in zip(compiled.choices[1:], masked.masks, compiled.logprobs[1:], strict=True):
        assert choice in allowed(mask)
        assert logprobs is not None
        assert {token for token, _ in logprobs.top} <= allowed(mask)


def test_rows_without_grammar_are_not_masked() -> None:
    logits = torch.zeros((1, VOCABULARY))
    assert apply_request_masks(logits, [SamplingRows(SamplingParameters(), 3, 8)]) is logits
    single = rows_of(GRAMMARS.start(PERSON, TEXT[:1]), 1.0).split()
    assert [each.masks is not None and each.masks.shape[0] for each in single] == [1, 1, 1, 1]
    masks = [each.masks for each in single if each.masks is not None]
    state = GRAMMARS.start(PERSON, TEXT[:1])
    assert np.array_equal(np.concatenate(masks), state.masks(TEXT[1:4], (-1, 0, 1)))


def test_missing_llguidance_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_serve.sampling.grammar.find_spec", lambda _: None)
    for check in (check_grammar, Grammars(TOKENIZER.to_json, VOCABULARY, ()).compile):
        with pytest.raises(GrammarError, match=r"ssd-serve\[structured\]"):
            check(PERSON)
