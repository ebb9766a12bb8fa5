"""Tests of grammars in the engine: the same output with any drafts, after preemption and after a resume."""

import pytest
from msgspec.structs import replace

from ssd_serve.base.messages import Refused, RequestOptions, Submit, ThinkingBudget
from ssd_serve.verifier.engine import Engine
from tests.counting_grammar import TIRED, Counting, CountingGrammars
from tests.fakes import EOS, Case, make_engine, mixed_requests, run
from tests.verifier.drafter_factory import connect_inline


def harness(drafted: bool, case: Case | None = None) -> Engine:
    engine, _ = make_engine(case or Case())
    engine.grammars = CountingGrammars()
    if drafted:
        connect_inline(engine, Case())
    return engine


def constrained(grammar: str = "any", count: int = 12) -> list[Submit]:
    """Return requests, every other one with this grammar; none forbids its end."""
    return [
        replace(
            each,
            parameters=replace(
                each.parameters,
                grammar=grammar if place % 2 else "",
                min_tokens=0,
                ignore_eos=False,
                allowed_token_ids=None,
                bad_words=(),
            ),
        )
        for place, each in enumerate(mixed_requests(count))
    ]


@pytest.mark.parametrize("case", [Case(), Case(slots=160)], ids=["enough memory", "preempted"])
def test_grammar_output_is_lossless_and_matches(case: Case) -> None:
    plain, drafted = run(harness(False), constrained()), run(harness(True, case), constrained())
    assert {number: each.tokens for number, each in drafted.items()} == {
        number: each.tokens for number, each in plain.items()
    }
    assert any(each.figures.accepted for each in drafted.values())
    for submit in constrained():
        if submit.parameters.grammar:
            output = list(plain[submit.request].tokens)
            assert Counting((), 1000).consume(output) == len(output)


def test_thinking_budget_is_lossless() -> None:
    end = 7, 9
    submits = [
        replace(each, parameters=replace(each.parameters, thinking_budget=ThinkingBudget(place % 9, (), end)))
        for place, each in enumerate(constrained(""))
    ]
    plain, drafted = run(harness(False), submits), run(harness(True), submits)
    assert {number: each.tokens for number, each in drafted.items()} == {
        number: each.tokens for number, each in plain.items()
    }
    assert any(each.figures.accepted for each in drafted.values())
    bounded = 0
    for place, submit in enumerate(submits):
        tokens = plain[submit.request].tokens
        if len(tokens) >= place % 9 + 2 and EOS not in tokens[:-1]:
            begun = [at for at in range(len(tokens) - 1) if tokens[at : at + 2] == end]
            assert begun[0] <= place % 9
            bounded += begun[0] == place % 9
    assert bounded


def test_request_with_max_nodes_zero_verifies_no_node() -> None:
    submits = [
        replace(each, options=RequestOptions(max_nodes=0 if place % 2 else None))
        for place, each in enumerate(constrained(""))
    ]
    plain, some = run(harness(False), constrained("")), run(harness(True), submits)
    for submit in submits:
        assert some[submit.request].tokens == plain[submit.request].tokens
        assert not (submit.options.max_nodes == 0 and some[submit.request].figures.drafted)
    assert any(each.figures.drafted for each in some.values())
    assert all(each.figures.prompt_s > 0 for each in some.values())


def test_resumed_output_continues_its_grammar() -> None:
    submit = constrained()[1]
    whole = run(harness(False), [submit])[submit.request].tokens
    rest = run(harness(True), [replace(submit, output=whole[:4])])[submit.request].tokens
    assert (*whole[:4], *rest) == whole


def test_impossible_grammars_are_refused() -> None:
    submit = constrained()[1]
    engine = harness(False)
    wrong = replace(submit, parameters=replace(submit.parameters, grammar="wrong"))
    assert engine.submit(wrong) == Refused(submit.request, "structured output: this is no grammar", "grammar")
    other = replace(submit, output=(EOS,))
    assert isinstance(engine.submit(other), Refused)
    engine.grammars = None
    assert isinstance(engine.submit(submit), Refused)
    assert not engine.busy


def test_grammar_that_becomes_too_complex_ends_its_request_alone() -> None:
    submits = [each for each in constrained(TIRED) if each.parameters.max_tokens > 20]
    engine = harness(True)
    outputs = run(engine, submits)
    plain = run(harness(False), submits)
    tired = [each.request for each in submits if each.parameters.grammar]
    assert "error" in {outputs[number].reason for number in tired}
    for number, output in plain.items():
        if number not in tired:
            assert outputs[number].tokens == output.tokens
