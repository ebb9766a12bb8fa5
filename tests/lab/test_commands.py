"""Every experiment has a command line: its flags, one sentence with an exit code for a mistake, and a result
file that says where it comes from."""

import json
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.provenance import ROOT
from ssd_serve.cli.flags import Parser
from ssd_serve.errors import SettingsError

LAB = Path(__file__).parents[2] / "lab"
NAMES = sorted(file.parent.name for file in LAB.glob("*/__main__.py"))


def test_there_are_experiments() -> None:
    assert {"ablate", "channels", "faults", "host", "packed", "soak"} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_help_names_the_command_and_its_result_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        import_module(f"lab.{name}.__main__").main(["--help"])
    told = capsys.readouterr().out
    assert told.startswith(f"usage: python -m lab.{name} ")
    assert "--json" in told


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_flag_is_a_mistake(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module(f"lab.{name}.__main__").main(["--jsn", "x"]) == SettingsError.exit_code
    assert f"python -m lab.{name}: the flag --jsn is unknown; did you mean --json?" in capsys.readouterr().err


def test_an_experiment_may_have_minutes_without_sittings(capsys: pytest.CaptureFixture[str]) -> None:
    """Not those of `--work`."""
    assert import_module("lab.soak.__main__").main(["--minutes", "-1"]) == SettingsError.exit_code
    assert "--minutes must be greater than 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_says_which_code_it_measures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves it to one place to run it and to write what came out."""
    module, asked = import_module(f"lab.{name}.__main__"), list[Sequence[str]]()

    def instead(parser: Parser, run: object, measures: Sequence[str], argv: Sequence[str]) -> int:
        assert run is module._run
        assert (parser.prog, argv) == (f"python -m lab.{name}", [])
        asked.append(measures)
        return 7

    monkeypatch.setattr(module, "run_experiment", instead)
    assert module.main([]) == 7
    assert asked[0][0] == f"lab/{name}"
    assert all((ROOT / path).exists() and not (ROOT / path).is_symlink() for path in asked[0])


def test_a_result_says_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "that.json"
    parser = experiment_parser("that", "a test")
    assert run_experiment(parser, lambda _: Report({"a": 1}), ["kernels"], ["--json", str(file)]) == 0
    written = json.loads(file.read_text(encoding="utf-8"))
    assert set(written) == {"a", "provenance", "hardware", "versions"}
    assert written["provenance"]["command"] == "python -m lab.that --json that.json"


def test_nothing_else_writes_results() -> None:
    """Who wants a file of results goes through `run_experiment` or `add_experiment`."""
    files = [*LAB.rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    callers = {
        file.name for file in files if re.search(r"(?<![\w.])show\(", file.read_text(encoding="utf-8"))
    }
    assert callers == {"document.py", "experiment.py"}
