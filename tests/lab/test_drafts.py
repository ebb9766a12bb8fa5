"""Ways to draft, and what answers and counters tell of them."""

from pathlib import Path

import pytest

from lab.drafts.experiment import left_out, rows_of
from lab.drafts.figures import Counters, figures_of
from lab.drafts.report import table
from lab.drafts.ways import HEAD, LOOKUP, MODEL, Drafts, llama_ways, our_ways, words
from lab.page_blocks import drafts
from ssd_serve.bench.peers.client import Sample
from ssd_serve.bench.peers.ways import LLAMA, OURS, PLAIN, Pair, Peers, Place, Way

PLACE = Place(Peers(llama_server=Path("/llama")), Pair(Path("/t"), Path("/d")), (0, 1), Path("/work"))
DRAFTS = Drafts(Path("/d"), Path("/h"))
PAGE = """
ssd_spec_decode_num_drafts_per_pos_total{position="0"} 10
ssd_spec_decode_num_drafts_per_pos_total{position="1"} 4
ssd_spec_decode_num_accepted_tokens_per_pos_total{position="0"} 8
ssd_spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1
ssd_speculation_cache_hits_total 6
ssd_speculation_cache_misses_total 2
ssd_draft_expansions_total 50
ssd_spec_decode_num_drafts_total 10
ssd_engine_wait_seconds_total 0.02
ssd_draft_expansions_awaited_total 20
"""


def option(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


@pytest.mark.parametrize(
    ("mode", "draft", "runs"),
    [
        (PLAIN, "none", "ar"),
        ("model inline", "/d", "sd"),
        ("head beside", "/h", "ssd"),
        ("first layers beside", "self:2", "ssd"),
        ("lookup inline", "ngram", "sd"),
        ("head and lookup inline", "/h,ngram", "sd"),
    ],
)
def test_our_ways_are_servers(mode: str, draft: str, runs: str) -> None:
    way = Way(OURS, mode)
    assert way in our_ways(DRAFTS)
    line = words(way, PLACE, 7, DRAFTS)
    assert (option(line, "--draft"), option(line, "--mode")) == (draft, runs)
    assert ("--draft-device" in line) == (runs == "ssd")
    assert "--no-speculation-may-stop" in line


def test_on_emulated_devices_nothing_but_the_device_differs() -> None:
    way = Way(OURS, "model inline")
    plain, emulated = (words(way, PLACE, 7, Drafts(Path("/d"), table=table)) for table in (None, "mi300x"))
    assert "mi300x" in option(emulated, "--model-wrapper")
    assert "--model-wrapper" not in plain


def test_without_a_head_there_are_no_ways_of_one() -> None:
    without = Drafts(Path("/d"))
    assert not [way for way in our_ways(without) if HEAD in way.mode]
    assert HEAD not in llama_ways(without, 2)


def test_llama_cpp_gets_the_same_head_and_lookup() -> None:
    ways = llama_ways(DRAFTS, 2)
    assert set(ways) == {PLAIN, MODEL, HEAD, LOOKUP}
    head = words(ways[HEAD][0], PLACE, 7, DRAFTS)
    assert (option(head, "--spec-type"), option(head, "-md")) == ("draft-eagle3", "/h-bf16.gguf")
    assert option(words(ways[MODEL][0], PLACE, 7, DRAFTS), "--spec-type") == "draft-simple"
    assert option(words(ways[LOOKUP][0], PLACE, 7, DRAFTS), "--spec-type") == "ngram-simple"


def test_counters_are_those_of_a_while() -> None:
    told = (Counters.read(PAGE) - Counters()).told()
    assert told == {
        "acceptance_by_depth": [0.8, 0.25, None, None, None, None, None, None],
        "ready_share": 0.75,
        "overlap": 0.6,
        "wait_ms_per_round": 2.0,
    }
    assert (Counters.read(PAGE) - Counters.read(PAGE)).told()["overlap"] is None


def sample(seconds: float, accepted: int = 0, ids: tuple[int, ...] = tuple(range(20))) -> Sample:
    return Sample(21, 20, seconds / 4, 3 * seconds / 4, drafted=2 * accepted, accepted=accepted, ids=ids)


def test_a_round_commits_one_token_of_the_target_and_what_was_accepted() -> None:
    found = figures_of([sample(1.0, 10), sample(1.0, 0)], None)
    assert found["tokens_per_s"] == 21.0
    assert found["tokens_per_round"] == round(40 / 30, 3)
    assert found["accepted_share"] == 0.5


def test_rows_compare_on_the_texts_that_do_not_loop() -> None:
    plain, model, both = Way(OURS, PLAIN), Way(OURS, "model inline"), Way(OURS, "model and lookup inline")
    other, plain_other = Way(LLAMA, MODEL, 4, cores=2, draft_cores=2), Way(LLAMA, PLAIN, cores=2)
    texts = [tuple(range(start, start + 20)) for start in range(8)]
    loops = (1,) * 20
    found = {
        plain: [*(sample(2.0, ids=text) for text in texts), sample(2.0, ids=loops)],
        model: [sample(1.0, 10)] * 9,
        both: [sample(0.5, 15)] * 9,
        other: [sample(1.5, 10)] * 9,
        plain_other: [sample(3.0)] * 9,
    }
    rows = rows_of({"device": "this machine", "kind": "code", "temperature": 0.0}, found, {})
    assert {row["texts"] for row in rows} == {8}
    ratios = {(row["engine"], row["way"]): row["ratios"] for row in rows}

    def mean(engine: str, way: str, other: str) -> object:
        held = ratios[engine, way]
        assert isinstance(held, dict)
        return round(held[other]["mean"], 3)

    assert mean(OURS, "model inline", PLAIN) == 2.0
    assert mean(OURS, "model and lookup inline", MODEL) == 2.0
    assert mean(LLAMA, MODEL, PLAIN) == 2.0
    assert mean(LLAMA, MODEL, OURS) == round(1 / 1.5, 3)
    assert "model and lookup" in table({"results": rows})


def test_an_engine_that_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    (reason,) = left_out(Peers()).values()
    assert "--install llama.cpp" in reason
    assert left_out(PLACE.peers) == {}
    result = {"results": [], "left_out": {LLAMA: reason}}
    for text in (table(result), drafts(result)):
        assert f"llama.cpp is not measured: {reason}" in text


def test_nothing_is_said_where_all_texts_loop() -> None:
    rows = rows_of({"kind": "data"}, {Way(OURS, PLAIN): [sample(1.0, ids=(1,) * 20)]}, {})
    assert rows == [{"kind": "data", "texts": 0, "loops_left_out": 1}]
