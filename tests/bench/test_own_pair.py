"""Anybody's own pair: prompts by its own tokenizer, and what is refused before anything is loaded."""

import argparse
import json
from pathlib import Path

import pytest

from ssd_serve.base.engine_settings import EMBEDDED
from ssd_serve.base.errors import PairMismatchError, UserError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.own_pair import check_in_process, prompts_of
from ssd_serve.bench.pair_flags import add_pair, pair_settings
from ssd_serve.models.text.tokenizer import Tokenizer
from tests.end_to_end.tiny_pair import write_pair

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def settings(target: object, draft: object) -> Settings:
    return Settings(target=str(target), draft=str(draft))


def test_prompts_without_a_file_are_sources_in_the_pairs_own_tokens(pair: Pair) -> None:
    prompts = prompts_of(settings(*pair), None, count=5, tokens=400)
    assert len({prompt.tokens for prompt in prompts}) == 5
    assert max(len(prompt.tokens) for prompt in prompts) <= 512 - 400
    assert Tokenizer(pair[0]).decode(prompts[0].tokens).isascii()


def test_prompts_of_a_file_are_in_the_pairs_own_tokens(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"question": f"How many, {number}?"}) + "\n" for number in range(9)))
    prompts = prompts_of(settings(*pair), file, count=4, tokens=10)
    told = [Tokenizer(pair[0]).decode(prompt.tokens) for prompt in prompts]
    assert told == [f"How many, {number}?" for number in range(4)]


@pytest.mark.parametrize(
    ("draft", "tokens", "message"),
    [
        (EMBEDDED, 8, "have different tokenizers: choose a draft model of the target's family"),
        (None, 512, "has no room for 512 new tokens"),
        (None, 505, "can take 1 to 7 beside the new tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    pair: Pair, tmp_path: Path, draft: str | None, tokens: int, message: str
) -> None:
    file = tmp_path / "asked.txt"
    file.write_text("How many ducks?\n")
    with pytest.raises(UserError, match=message):
        prompts_of(settings(pair[0], draft or pair[1]), file, count=1, tokens=tokens)


def test_a_target_without_a_draft_is_refused(pair: Pair) -> None:
    with pytest.raises(PairMismatchError, match="nothing drafts for this target"):
        prompts_of(Settings(target=str(pair[0]), mode="ar"), None, count=1, tokens=1)  # type: ignore[arg-type]


def test_ranks_are_measured_on_servers(pair: Pair) -> None:
    check_in_process(settings(*pair))
    with pytest.raises(UserError, match="`ssd bench ssd-table` measures ranks, on real servers"):
        check_in_process(settings(*pair).model_copy(update={"tensor_parallel": 2}))
    with pytest.raises(PairMismatchError, match="have different tokenizers"):
        check_in_process(settings(pair[0], EMBEDDED))


def test_a_pair_is_two_words_or_none() -> None:
    parser = argparse.ArgumentParser()
    add_pair(parser)
    assert pair_settings(parser.parse_args([])).target == EMBEDDED
    own = pair_settings(parser.parse_args(["one", "two"]))
    assert (own.target, own.draft) == ("one", "two")
    with pytest.raises(UserError, match="a pair has a draft too: give it behind one"):
        pair_settings(parser.parse_args(["one"]))
