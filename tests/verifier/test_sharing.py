"""Tests of concurrent requests with a common prefix: it is computed once, and no output changes."""

from collections.abc import Iterator
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.base.messages import (
    Choice,
    Refused,
    RequestOptions,
    SamplingParameters,
    Submit,
    SubmitChoices,
)
from ssd_serve.verifier.control.wait import FixedSteps
from ssd_serve.verifier.engine import Engine
from tests.examples import examples
from tests.fakes import Case, FakeModel, make_engine, run
from tests.verifier.drafter_factory import connect_inline

LENGTH = 120
PROMPT = tuple(1 + (7 * place * place + place) % 39 for place in range(LENGTH))


def choices(count: int, common: int = LENGTH) -> list[Submit]:
    """Requests of one prompt (or of one beginning), with seeds and temperatures of their own."""
    return [
        Submit(
            number,
            (*PROMPT[:common], *(1 + ((place + 1) * (number + 2)) % 39 for place in range(LENGTH - common))),
            SamplingParameters(temperature=(0.0, 0.7, 1.0, 1.5)[number % 4], max_tokens=20, ignore_eos=True),
            number,
        )
        for number in range(count)
    ]


def speculating(case: Case) -> tuple[Engine, FakeModel]:
    engine, model = make_engine(case)
    connect_inline(engine, case)
    return engine, model


def prefill_tokens(model: FakeModel) -> int:
    """Rows computed at positions before the prompts' last."""
    return sum(position < LENGTH - 1 for position in model.positions)


@pytest.mark.parametrize(
    ("chunk", "common", "slots"), [(16, LENGTH, 4096), (50, 80, 300), (1000, LENGTH, 300), (50, 20, 4096)]
)
def test_output_equals_that_of_single_requests(chunk: int, common: int, slots: int) -> None:
    submits = choices(6, common)
    alone, _ = make_engine(Case(drafter="none", slots=4096, prefix=False, max_running=1))
    expected = run(alone, submits)
    engine, _ = speculating(Case(slots=slots, prefill_chunk=chunk, policy=lambda: FixedSteps(3)))
    found = run(engine, submits)
    assert {n: o.tokens for n, o in found.items()} == {n: o.tokens for n, o in expected.items()}
    assert engine.scheduler.prefix is not None
    assert engine.scheduler.pool.used == engine.scheduler.prefix.size


@pytest.mark.parametrize("chunk", [16, 1000])
def test_choices_compute_their_prompt_once(chunk: int) -> None:
    engine, model = speculating(Case(slots=4096, prefill_chunk=chunk, policy=lambda: FixedSteps(3)))
    outputs = run(engine, choices(4))
    assert LENGTH - 1 <= prefill_tokens(model) <= LENGTH + 3 * 15  # fewer than 16 tokens are not waited for
    cached = [outputs[number].figures.cached_prompt_tokens for number in range(4)]
    assert cached[0] == 0
    assert min(cached[1:]) > LENGTH - 17
    engine, model = speculating(Case(slots=4096, prefill_chunk=1000, policy=lambda: FixedSteps(3)))
    run(engine, choices(4, common=80))
    assert prefill_tokens(model) == 80 + 4 * 39


@pytest.mark.parametrize("chunk", [16, 1000])
def test_requests_of_other_salts_share_no_prefix(chunk: int) -> None:
    engine, model = speculating(Case(slots=4096, prefill_chunk=chunk, policy=lambda: FixedSteps(3)))
    salted = [
        msgspec.structs.replace(submit, options=RequestOptions(salt=(b"a", b"b")[number % 2]))
        for number, submit in enumerate(choices(4))
    ]
    outputs = run(engine, salted)
    cached = [outputs[number].figures.cached_prompt_tokens for number in range(4)]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > LENGTH - 17
    assert prefill_tokens(model) >= 2 * (LENGTH - 1)
    assert {n: o.tokens for n, o in outputs.items()} == {
        n: o.tokens for n, o in run(make_engine(Case(slots=4096, prefix=False))[0], choices(4)).items()
    }
    later = run(engine, [msgspec.structs.replace(choices(1)[0], request=9)])
    assert later[9].figures.cached_prompt_tokens == 0
    again = run(
        engine, [msgspec.structs.replace(choices(1)[0], request=10, options=RequestOptions(salt=b"a"))]
    )
    assert again[10].figures.cached_prompt_tokens == LENGTH - 1


@given(st.lists(st.tuples(st.sampled_from([b"", b"a", b"b"]), st.sampled_from([20, 50, 90])), max_size=6))
@settings(max_examples=examples(20), deadline=None)
def test_prefix_cache_reuse_is_bounded_by_the_salts_own_prompts(kinds: list[tuple[bytes, int]]) -> None:
    whole = choices(1)[0]
    submits = [
        msgspec.structs.replace(
            whole,
            request=number,
            prompt=(*PROMPT[:common], *(1 + (place * (number + 3)) % 39 for place in range(40))),
            parameters=SamplingParameters(temperature=0.0, max_tokens=4, ignore_eos=True),
            options=RequestOptions(salt=salt),
        )
        for number, (salt, common) in enumerate(kinds)
    ]
    engine, _ = speculating(Case(slots=4096, prefill_chunk=50, policy=lambda: FixedSteps(3)))
    first = run(engine, submits)
    for number, submit in enumerate(submits):
        others = [each.prompt for each in submits if each.options == submit.options and each is not submit]
        most = max((common_prefix(submit.prompt, each) for each in others), default=0)
        assert first[number].figures.cached_prompt_tokens <= most
    again = run(engine, [msgspec.structs.replace(each, request=100 + each.request) for each in submits])
    for number, submit in enumerate(submits):
        assert again[100 + number].figures.cached_prompt_tokens == len(submit.prompt) - 1
        assert again[100 + number].tokens == first[number].tokens


def common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def test_abort_of_the_prefilling_request_keeps_the_others() -> None:
    engine, model = speculating(Case(slots=4096, prefill_chunk=50, policy=lambda: FixedSteps(3)))
    expected = run(make_engine(Case(drafter="none", slots=4096, prefix=False))[0], choices(4))
    found = run(engine, choices(4), lambda step: engine.abort(0) if step == 1 else None)
    assert sorted(found) == [1, 2, 3]
    assert all(found[number].tokens == expected[number].tokens for number in found)
    assert prefill_tokens(model) <= LENGTH + 2 * 15


class CountingPrompt(tuple[int, ...]):
    __slots__ = ()
    reads: ClassVar[list[int]] = []

    def __iter__(self) -> Iterator[int]:
        self.reads.append(len(self))
        return super().__iter__()


def test_choices_share_their_prompt_and_equal_single_requests() -> None:
    parameters = SamplingParameters(
        max_tokens=20, ignore_eos=True, frequency_penalty=0.4, logit_bias={3: 1.0}, bad_words=((5,), (6, 7))
    )
    singles = [Submit(number, PROMPT, parameters, 100 + number, (9,) * number) for number in range(20)]
    expected = run(make_engine(Case(slots=4096))[0], singles)
    engine, _ = speculating(Case(slots=4096, policy=lambda: FixedSteps(3)))
    prompt = CountingPrompt(PROMPT)
    CountingPrompt.reads.clear()
    choices = tuple(Choice(each.request, each.seed, each.output) for each in singles)
    assert engine.submit_all(SubmitChoices(prompt, parameters, choices)) == []
    assert len(CountingPrompt.reads) <= 3, "its ids are checked, and counted for penalties, once"
    assert all(request.tokens.prompt is prompt for request in engine.scheduler.waiting)
    assert len({id(request.overrides) for request in engine.scheduler.waiting}) == 1
    found = run(engine, [])
    assert {n: each.tokens for n, each in found.items()} == {n: each.tokens for n, each in expected.items()}


def test_impossible_prompt_is_refused_for_each_choice() -> None:
    engine, _ = speculating(Case(max_running=1, max_waiting=2))
    choices = tuple(Choice(number, number) for number in range(4))
    kinds = {
        "prompt": ((1, 40), SamplingParameters()),
        "max_tokens": ((1, 2), SamplingParameters(max_tokens=5000)),
    }
    for field, (prompt, parameters) in kinds.items():
        answers = engine.submit_all(SubmitChoices(prompt, parameters, choices))
        assert [(each.request, each.field) for each in answers if isinstance(each, Refused)] == [
            (number, field) for number in range(4)
        ]
        assert not any(each.retry_after_s for each in answers if isinstance(each, Refused))
    bad = (Choice(1, 1, (99,)), Choice(2, 2), Choice(2, 2), Choice(3, 3, (5,) * 16))
    answers = engine.submit_all(SubmitChoices((1, 2), SamplingParameters(), bad))
    assert [type(each).__name__ for each in answers] == ["Refused", "Refused", "Finished"]
    assert len(engine.scheduler.waiting) == 1
