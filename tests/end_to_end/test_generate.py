"""`ssd generate` through real processes: the same tokens in every mode, honest figures, clear errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.tiny_pair import write_pair

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def generate(pair: Pair, *arguments: str, text: str = "def f(") -> "subprocess.CompletedProcess[str]":
    target, draft = (str(folder) for folder in pair)
    command = [sys.executable, "-m", "ssd_serve", "generate", text, "--target", target, "--draft", draft]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)


def as_object(pair: Pair, *arguments: str) -> dict[str, Any]:
    done = generate(pair, "--json", "--dtype", "fp32", *arguments)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_every_mode_gives_the_same_tokens(pair: Pair) -> None:
    sampling = ("--seed", "5", "--temperature", "0.9", "--max-tokens", "48", "--budget", "8")
    results = [as_object(pair, "--mode", mode, *sampling) for mode in ("ar", "sd", "ssd")]
    assert [result["mode"] for result in results] == ["ar", "sd", "ssd"]
    assert results[0]["token_ids"] == results[1]["token_ids"] == results[2]["token_ids"]
    assert results[0]["text"] == results[2]["text"]
    assert len(results[0]["token_ids"]) == 48
    assert results[0]["finish_reason"] == "length"
    assert results[0]["tokens_per_round"] == 1.0
    assert results[0]["acceptance"] is None
    # Whether drafts pay is the cost model's decision, and so the load's: nothing is said about it here.
    assert all(result["rounds"] > 0 for result in results)


def test_statistics_line_follows_the_text(pair: Pair) -> None:
    done = generate(pair, "--mode", "ar", "--max-tokens", "8", "--seed", "7")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("[8 tokens, mode ar, seed 7, ")
    assert "tokens/s" in last
    assert "tokens a round" in last


def test_damaged_checkpoint_exits_with_code_6(pair: Pair, tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path / "damaged")
    (target / "model.safetensors").unlink()
    done = generate((target, draft), "--mode", "ar")
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr
    assert str(target) in done.stderr
