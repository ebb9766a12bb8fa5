"""Every experiment has a command line: its flags, and one sentence with an exit code for a mistake."""

from importlib import import_module
from pathlib import Path

import pytest

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
