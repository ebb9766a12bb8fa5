"""Tests of benchmark prompts: taken from real files, and never a text that loops."""

import pytest

from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.bench.prompts import (
    NEW_TOKENS,
    Prompt,
    choose,
    held_out_prompts,
    repeated_share,
    without_loops,
)
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.corpus import standard_library

FINE, LOOP = list(range(NEW_TOKENS)), [1, 2, 3] * (NEW_TOKENS // 3)
POOL = [Prompt(f"file {number}", (number,), number) for number in range(100)]


def test_prompts_are_places_in_held_out_files_every_48_tokens() -> None:
    folder = resolve_model(EMBEDDED, "target")
    tokenizer = Tokenizer(folder)
    pool = held_out_prompts(folder, tokenizer)
    assert pool == held_out_prompts(folder, tokenizer)
    files = {prompt.path for prompt in pool}
    assert {prompt.path for prompt in pool[: len(files)]} == files
    assert all(96 <= len(prompt.tokens) <= 288 for prompt in pool)
    assert len({prompt.seed for prompt in pool}) == len(pool)
    (path, *_) = files
    text = tokenizer.encode((standard_library() / path).read_text(encoding="utf-8"))
    own = [prompt for prompt in pool if prompt.path == path]
    assert len(own) == len(range(96, len(text) - NEW_TOKENS, NEW_TOKENS))
    places = range(96, len(text), NEW_TOKENS)
    assert {prompt.tokens for prompt in own} <= {tuple(text[max(0, end - 288) : end]) for end in places}


def test_loops_are_left_out_and_tuning_has_prompts_of_its_own() -> None:
    found = choose(POOL, 4, 2, lambda some: [LOOP if each.seed % 2 else FINE for each in some])
    assert [prompt.seed for prompt in found.tuning] == [0, 2]
    assert [prompt.seed for prompt in found.prompts] == [4, 6, 8, 10]
    assert found.left_out == 0.5


def test_where_too_few_are_left_it_is_said_and_no_loop_fills_up() -> None:
    with pytest.raises(UserError, match="of 100 prompts 10 have continuations that do not loop, and 12 are"):
        choose(POOL, 8, 4, lambda some: [LOOP if each.seed % 10 else FINE for each in some])


def test_after_a_few_prompts_one_way_may_loop() -> None:
    some = POOL[:4]
    assert without_loops(some, {"ar": [FINE] * 4, "ssd": [FINE, FINE, LOOP, FINE]}) == [0, 1, 3]
    with pytest.raises(SsdError, match="the text after file 1 is a loop"):
        without_loops(some, {"ar": [FINE, LOOP, FINE, FINE], "ssd": [FINE, FINE, LOOP, FINE]})
    with pytest.raises(SsdError, match="is a loop"):
        without_loops(POOL[:1], {"ar": [LOOP]})
    many = [LOOP] * 3 + [FINE] * 27
    assert without_loops(POOL[:30], {"ar": many}) == list(range(3, 30))


def test_how_repetitive_a_text_is() -> None:
    assert repeated_share(FINE) == 0.0
    assert repeated_share(LOOP) == pytest.approx(38 / 41)
    assert repeated_share([1, 2, 3]) == 0.0
    assert repeated_share([*FINE[:24], *FINE[:24]]) == pytest.approx(17 / 41)
