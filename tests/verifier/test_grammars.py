"""Outputs that must match something, in the engine: the same with any drafts, and where they go on."""

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.errors import GrammarError
from ssd_serve.messages import Refused, Submit
from ssd_serve.sampling.grammar import Grammars, GrammarState, Masks
from ssd_serve.verifier.engine import Engine
from tests.fakes import EOS, HELLO, VOCABULARY, Case, make_core, make_engine, mixed_requests, run

WORDS = -(-VOCABULARY // 32)
TIRED = "tired"
"""A grammar that can be followed for a while only."""


def may_come(output: Sequence[int]) -> set[int]:
    """What the grammar of these tests has behind an output: about a third of the tokens, and later an end."""
    some = {token for token in range(1, VOCABULARY) if (5 * token + sum(output)) % 3 == 0}
    return some | ({EOS} if len(output) > 6 else set())


class Counting(GrammarState):
    """Knows its whole output, so that nothing can be forgotten."""

    def __init__(self, output: Sequence[int], patience: int) -> None:
        self.output = list(output)
        self._patience = patience

    @property
    def trouble(self) -> str:
        return "too tired" if len(self.output) > self._patience else ""

    def take(self, tokens: Sequence[int]) -> int:
        for place, token in enumerate(tokens):
            if token not in may_come(self.output):
                return place
            self.output.append(token)
        return len(tokens)

    def masks(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> Masks:
        outputs = [self.output]
        for token, parent in zip(tokens, parents, strict=True):
            outputs.append([*outputs[1 + parent], token])
        masks = np.zeros((len(outputs), WORDS), dtype=np.uint32)
        for mask, output in zip(masks, outputs, strict=True):
            for token in may_come(output):
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        return masks.view(np.int32)


class CountingGrammars(Grammars):
    def __init__(self) -> None:
        super().__init__(str, VOCABULARY, (EOS,))

    def begin(self, grammar: str, output: Sequence[int] = ()) -> GrammarState:
        if grammar == "wrong":
            raise GrammarError("this is no grammar")
        state = Counting((), patience=9 if grammar == TIRED else 1000)
        if state.take(output) < len(output):
            raise GrammarError("the output so far does not match")
        return state


def house(drafted: bool, case: Case | None = None) -> Engine:
    engine, _ = make_engine(case or Case())
    engine.grammars = CountingGrammars()
    if drafted:
        engine.drafters.connect(InlineChannel(make_core(Case()), HELLO), synchronous=True)
    return engine


def asked(grammar: str = "any", count: int = 12) -> list[Submit]:
    """Every other request must match it; none forbids its end."""
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


@pytest.mark.parametrize("case", [Case(), Case(slots=160)], ids=["roomy", "preempted"])
def test_speculation_changes_nothing_and_every_output_matches(case: Case) -> None:
    plain, drafted = run(house(False), asked()), run(house(True, case), asked())
    assert {number: each.tokens for number, each in drafted.items()} == {
        number: each.tokens for number, each in plain.items()
    }
    assert any(each.figures.accepted for each in drafted.values())
    for submit in asked():
        if submit.parameters.grammar:
            output = list(plain[submit.request].tokens)
            assert Counting((), 1000).take(output) == len(output)


def test_an_output_goes_on_in_its_grammar() -> None:
    submit = asked()[1]
    whole = run(house(False), [submit])[submit.request].tokens
    rest = run(house(True), [replace(submit, output=whole[:4])])[submit.request].tokens
    assert (*whole[:4], *rest) == whole


def test_what_cannot_be_followed_is_refused() -> None:
    submit = asked()[1]
    engine = house(False)
    wrong = replace(submit, parameters=replace(submit.parameters, grammar="wrong"))
    assert engine.submit(wrong) == Refused(submit.request, "this is no grammar", "grammar")
    other = replace(submit, output=(EOS,))
    assert isinstance(engine.submit(other), Refused)
    engine.grammars = None
    assert isinstance(engine.submit(submit), Refused)
    assert not engine.busy


def test_a_grammar_that_becomes_too_much_work_ends_its_text_alone() -> None:
    """The others go on; nothing is left of it."""
    submits = [each for each in asked(TIRED) if each.parameters.max_tokens > 20]
    engine = house(True)
    outputs = run(engine, submits)
    plain = run(house(False), submits)
    tired = [each.request for each in submits if each.parameters.grammar]
    assert "error" in {outputs[number].reason for number in tired}
    for number, output in plain.items():
        if number not in tired:
            assert outputs[number].tokens == output.tokens
