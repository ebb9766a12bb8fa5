"""The command line of `ssd bench peers`, as far as it goes without measuring."""

import json
from pathlib import Path

import pytest

from ssd_serve.bench.peers import installation
from ssd_serve.cli.main import main


@pytest.fixture(autouse=True)
def _nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(installation, "INSTALLED", tmp_path / "nowhere")


def test_a_dry_run_tells_how_long_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def dry(*words: str) -> int:
        file = tmp_path / "dry.json"
        assert main(["bench", "peers", "--dry-run", "--json", str(file), *words]) == 0
        minutes = json.loads(file.read_text(encoding="utf-8"))["minutes"]
        assert f"about {minutes} minutes in all" in capsys.readouterr().out
        return int(minutes)

    assert dry("--launches", "1", "--prompts", "2") < dry("--launches", "6") < dry("--launches", "12")
    (tmp_path / "llama-server").touch()
    more = ("--llama-server", str(tmp_path / "llama-server"))
    assert dry() < dry(*more)
    assert dry("--peers", "transformers", *more) == dry(), "whoever is not wanted is not counted"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--cores", "0"), "needs two cores"),
        (("--minutes", "5"), "--minutes needs --work"),
        (("--llama-server", "/no/such/server"), "there is no /no/such/server"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peers", *words]) != 0
    assert reason in capsys.readouterr().err
