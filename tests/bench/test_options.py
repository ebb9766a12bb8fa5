"""The flags of a pair, and pairs that cannot be measured."""

import argparse
from pathlib import Path

import pytest

from ssd_serve.app.cli.main import main
from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.errors import PairMismatchError, UserError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.commands import add_commands
from ssd_serve.bench.options import add_pair, count, pair_settings, positive_or_zero
from ssd_serve.bench.workload import check_pair
from tests.end_to_end.tiny_pair import write_pair


def test_pair_needs_target_and_draft_or_neither() -> None:
    parser = argparse.ArgumentParser()
    add_pair(parser)
    assert pair_settings(parser.parse_args([])).target == EMBEDDED
    own = pair_settings(parser.parse_args(["one", "two"]))
    assert (own.target, own.draft) == ("one", "two")
    with pytest.raises(UserError, match="a pair needs a draft: give it behind one"):
        pair_settings(parser.parse_args(["one"]))


def test_pair_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    check_pair(Settings(target=str(target), draft=str(draft)))
    with pytest.raises(PairMismatchError, match="have different tokenizers"):
        check_pair(Settings(target=str(target), draft=EMBEDDED))


def test_target_with_several_ranks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "modes", "--tensor-parallel", "2"]) == UserError.exit_code
    assert "use `ssd bench serve` for ranks" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-1", "inf", "nan"])
def test_numbers_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        positive_or_zero(text)
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        count(text)


def test_llama_server_in_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_commands(parser)
    (tmp_path / "server").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    words = ["peers", "--data", str(tmp_path), "--llama-server"]
    assert parser.parse_args([*words, "./server"]).llama_server == tmp_path / "server"
    with pytest.raises(SystemExit):
        parser.parse_args([*words, "./other"])
    assert "./other is no program" in capsys.readouterr().err
