"""Every result says which code, command and machine it comes from."""

import json
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ssd_serve.bench import machine
from ssd_serve.bench.experiment import Report, add_experiment
from ssd_serve.bench.machine import copy_speed, processor, usable_cores
from ssd_serve.bench.provenance import DRAFTING, ENGINE, ROOT, SERVER, Start, code_of, told_arguments
from ssd_serve.cli.flags import Commands, Parser
from ssd_serve.cli.main import build_parser

SIGNED = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")


def git(folder: Path, *words: str) -> str:
    """What git prints in this folder."""
    command = ["git", "-C", str(folder), *SIGNED, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(autouse=True)
def copies_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_COPIED_BYTES", 1 << 20)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", "AMD EPYC (AVX-512 with bf16)"),
        ("flags\t\t: fpu avx2", "AMD EPYC (AVX2)"),
        ("Features\t: fp asimd", "AMD EPYC (NEON)"),
        ("", "AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart_by_their_vectors(flags: str, name: str) -> None:
    assert processor(f"processor\t: 0\nmodel name\t: AMD EPYC\n{flags}\n\nprocessor\t: 1\n") == name


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of one commit, with two rooms."""
    for room in ("kernels", "server"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "code.py").write_text("1\n", encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def taken(clone: Path, argv: Sequence[str] = (), measures: Sequence[str] = ("kernels",)) -> dict[str, object]:
    found = Start.here("ssd bench kernels", argv, measures, clone).provenance()
    assert {"cpu", "cores", "gpus"} <= set(json.loads(json.dumps(found["hardware"])))
    assert {"python", "torch", "numpy", "ssd-serve"} <= set(json.loads(json.dumps(found["versions"])))
    read: dict[str, object] = json.loads(json.dumps(found["provenance"]))
    return read


def test_code_command_time_and_load_are_told(clone: Path) -> None:
    found = taken(clone, ["--repeats", "2"])
    assert found["commit"] == git(clone, "rev-parse", "HEAD")
    assert found["dirty"] is False
    assert found["measures"] == ["kernels"]
    assert found["command"] == "ssd bench kernels --repeats 2"
    began = datetime.fromisoformat(str(found["started"]))
    assert abs((datetime.now(timezone.utc) - began).total_seconds()) < 60
    for name, least in (("load_averages", [0.0, 0.0, 0.0]), ("copy_gb_per_s", 0.0)):
        both = found[name]
        assert isinstance(both, dict)
        assert set(both) == {"before", "after"}
        assert all(each >= least for each in both.values())


@pytest.mark.parametrize(("file", "dirty"), [("kernels/code.py", True), ("server/code.py", False)])
def test_it_is_dirty_when_code_that_it_measures_is_in_no_commit(clone: Path, file: str, dirty: bool) -> None:
    (clone / file).write_text("2\n", encoding="utf-8")
    assert taken(clone)["dirty"] is dirty
    git(clone, "commit", "-qam", "second")
    assert taken(clone)["dirty"] is False


def test_a_file_that_git_does_not_know_makes_it_dirty(clone: Path) -> None:
    (clone / "kernels" / "new.py").touch()
    assert taken(clone)["dirty"] is True


def test_a_commit_that_git_cannot_read_is_not_called_clean(clone: Path) -> None:
    tree = git(clone, "rev-parse", "HEAD^{tree}")
    (clone / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    found = taken(clone)
    assert (found["code"], found["dirty"]) == ("", True)


def test_code_has_the_same_name_in_every_history(clone: Path) -> None:
    first = code_of(clone, "HEAD", ["kernels"])
    assert first
    git(clone, "commit", "-q", "--amend", "-m", "the same under another name")
    (clone / "server" / "code.py").write_text("2\n", encoding="utf-8")
    git(clone, "commit", "-qam", "elsewhere")
    assert code_of(clone, "HEAD", ["kernels"]) == first
    assert code_of(clone, "HEAD", ["kernels", "server"]) != code_of(clone, "HEAD^", ["kernels", "server"])


def test_an_installed_package_names_no_commit_of_others(clone: Path) -> None:
    found = taken(clone / "kernels")
    assert (found["commit"], found["code"], found["dirty"]) == ("", "", False)


def test_settings_from_variables_are_told_and_secrets_are_not(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_DRAFT_WIDTH", "8")
    monkeypatch.setenv("SSD_RUN_DIR", "/home/somebody/run")
    monkeypatch.setenv("SSD_API_KEY", "0123456789abcdef" * 2)
    assert taken(clone)["environment"] == {
        "SSD_DRAFT_WIDTH": "8",
        "SSD_RUN_DIR": "run",
        "SSD_API_KEY": "****",
    }


def test_a_command_is_told_without_secrets_and_folders() -> None:
    words = ["--hf-token", "hf_1234", "--cluster-key=5678", "--target", "/home/somebody/Qwen3-8B"]
    told = ["--hf-token", "****", "--cluster-key=****", "--target", "Qwen3-8B"]
    assert told_arguments([*words, "--draft=/models/tiny", "modes.json"]) == [
        *told,
        *("--draft=tiny", "modes.json"),
    ]


def test_the_copy_is_measured_in_gb_per_s() -> None:
    """Slower than a disk, or faster than any memory, would be a mistake in units."""
    assert 0.1 < copy_speed(usable_cores()) < 20_000


def test_a_result_file_has_what_was_found_and_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, file = Parser(prog="ssd bench that"), tmp_path / "new" / "that.json"
    shown = Report({"speed": 3.5}, lambda result: f"{result['speed']} on {result['hardware']}", code=4)
    add_experiment(parser, lambda _args: shown, ("kernels",))
    args = parser.parse_args(["--json", str(file)])
    assert args.run(args) == 4
    written = json.loads(file.read_text(encoding="utf-8"))
    assert set(written) == {"speed", "provenance", "hardware", "versions"}
    assert capsys.readouterr().out == f"3.5 on {written['hardware']}\n"


def bench_commands() -> dict[str, Parser]:
    """Every command of `ssd bench`."""
    root = build_parser()
    root.parse_args(["bench", "report", "x"])  # adds them
    (commands,) = (each for each in root._actions if each.dest == "command")
    choices: Commands = commands  # type: ignore[assignment]
    (inner,) = (each for each in choices.choices["bench"]._actions if each.metavar == "BENCH")
    found: dict[str, Parser] = inner.choices  # type: ignore[assignment]
    return found


def test_every_benchmark_that_writes_results_says_what_it_measures() -> None:
    for name, parser in bench_commands().items():
        if name == "report":
            continue
        run = parser.get_default("run")
        program, measures = run.args[1:]
        assert program == f"ssd bench {name}"
        assert all((ROOT / path).exists() for path in measures), measures


@pytest.mark.parametrize("paths", [DRAFTING, ENGINE, SERVER])
def test_paths_that_are_measured_exist_and_hold_no_results(paths: tuple[str, ...]) -> None:
    for path in paths:
        assert (ROOT / path).exists()
        assert not (ROOT / path).is_symlink(), f"{path}: git does not follow links"
        assert not (ROOT / path / "results").exists()
