"""Tests of the command line: one sentence and a documented exit code for each error, and fast help."""

import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ssd_serve.app.cli import main as cli
from ssd_serve.app.cli.flags import FOREIGN
from ssd_serve.app.cli.output import as_table
from ssd_serve.app.cli.serve import address
from ssd_serve.base.errors import CheckpointError, PermissionProblemError, PortInUseError, SettingsError
from ssd_serve.base.logs import ProgressLine
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import flag_name
from ssd_serve.cluster.health import WorkerDiedError
from ssd_serve.server.http.listening import listen, listen_all

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serv"], "the command 'serv' is unknown; did you mean serve?"),
        (["x"], "the command 'x' is unknown; there are serve, run, chat, generate"),
        (["serve", "--prot", "9000"], "the flag --prot is unknown; did you mean --port?"),
        (["serve", "--por", "9000"], "the flag --por is unknown; did you mean --port?"),
        (["serve", "--emulate", "x"], "the flag --emulate is unknown; use --model-wrapper=ssd_serve.bench"),
        (["serve", "a", "b", "c"], "the argument 'c' is one too many"),
        (["serve", "a", "b", "--draft", "c"], "the draft is given twice"),
        (["serve", "--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["chat", "--temperature", "-1"], "--temperature must be 0 or more"),
        (["pull"], "required: MODEL"),
        (["serve", "a", "--target", "b"], "the target is given twice"),
        (["serve", "--port", "many"], "the flag --port: input should be a valid integer"),
        (["settings", "--port", "70000"], "the flag --port: input should be less than"),
        (["settings", "--port"], "expected one argument"),
        (["generate"], "required: text"),
        (["generate", "x", "--temperature", "-1"], "--temperature must be 0 or more"),
        (["generate", "x", "--temperature", "nan"], "--temperature must be 0 or more"),
        (["generate", "x", "--top-p", "0"], "--top-p"),
        (["generate", "x", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "x", "--seed", "-1"], "--seed"),
        (["generate", "x", "--mode", "fast"], "the flag --mode: input should be 'ar'"),
        (["generate", "x", "--target-device", "tpu"], "device 'tpu' is unknown"),
    ],
)
def test_mistakes(arguments: list[str], sentence: str, capsys: Captured, tmp_path: Path) -> None:
    if "--target-device" in arguments:
        (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
        arguments = [*arguments, "--target", str(tmp_path)]
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("ssd: ")
    assert sentence in captured.err


def test_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("SSD_PROT", "1")
    assert cli.main(["settings"]) == 2
    assert "did you mean SSD_PORT?" in capsys.readouterr().err


def test_missing_command_prints_help(capsys: Captured) -> None:
    assert cli.main([]) == 2
    assert "exit codes" in capsys.readouterr().err


def test_settings_as_table_and_as_json(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("SSD_MODE", "sd")
    monkeypatch.setenv("SSD_API_KEY", "sesame")
    assert cli.main(["settings", "--port", "81", "--no-grow-first"]) == 0
    table = capsys.readouterr().out
    for name in Settings.model_fields:
        assert f"SSD_{name.upper()} " in table
    assert "sesame" not in table
    assert cli.main(["settings", "--json", "--port", "81", "--no-grow-first"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert (rows["SSD_PORT"]["value"], rows["SSD_PORT"]["origin"]) == ("81", "flag")
    assert (rows["SSD_GROW_FIRST"]["value"], rows["SSD_GROW_FIRST"]["origin"]) == ("False", "flag")
    assert rows["SSD_MODE"]["origin"] == "variable"


def test_settings_table_fits_the_terminal() -> None:
    from ssd_serve.base.settings_sources import origins

    lines = as_table(origins(Settings(), {}), width=100).splitlines()
    assert max(len(line) for line in lines[:-1]) <= 100


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_help_lists_settings_with_choices_types_and_defaults(command: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help-all"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    words = ("--mode {ar,sd,ssd,auto}", "--port N", "(8000)", "--cache-dir PATH", "front end (each is")
    for expected in (*map(flag_name, Settings.model_fields), *words):
        assert expected in text


@pytest.mark.parametrize("flag", FOREIGN)
def test_flags_of_other_servers_get_advice(flag: str, capsys: Captured) -> None:
    assert cli.main(["serve", flag, "9"]) == 2
    assert f"{flag} is unknown; {FOREIGN[flag]}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["run"], ["chat"], []])
def test_help_fits_a_screen(command: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 60
    if command:
        assert max(map(len, text.splitlines())) <= 80
        assert {flag_name(name) for name in Settings.model_fields} <= set(text.split())


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from ssd_serve.app.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for number, _ in cli.EXIT_CODES:
        assert f" {number}  " in done.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PortInUseError("x"), 3),
        (CheckpointError("x"), 6),
        (WorkerDiedError("verifier", -9), 70),
        (WorkerDiedError("verifier", 5), 5),
        (WorkerDiedError("verifier", 1), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(_args: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_run_settings", fail)
    assert cli.main(["settings"]) == code
    quiet = isinstance(error, KeyboardInterrupt) or getattr(error, "explained", False)
    assert (capsys.readouterr().err == "") == quiet


def test_taken_port_has_exit_code_3(capsys: Captured) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 3
    assert f"port {port} on 127.0.0.1 is taken" in capsys.readouterr().err


def test_taken_metrics_port_releases_the_other_port(capsys: Captured) -> None:
    with listen("127.0.0.1", 0) as taken, listen("127.0.0.1", 0) as other:
        port, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        for _ in range(2):
            assert cli.main(["serve", "--port", str(free), "--metrics-port", str(port)]) == 3
            assert "choose another port with --metrics-port or SSD_METRICS_PORT" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="are both 8000: they must differ"):
        listen_all(Settings(metrics_port=8000))


def test_empty_api_key_is_refused(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_API_KEY", "")
    assert cli.main(["serve", "--port", "0"]) == 2
    assert "SSD_API_KEY is set but empty" in capsys.readouterr().err


def test_invalid_keys_file_is_refused(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("anna\n")
    assert cli.main(["serve", "--port", "0", "--api-keys-file", str(tmp_path / "keys")]) == 2
    assert "(SSD_API_KEYS_FILE): line 1: a line is: name key" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may listen on every port")
def test_privileged_port_is_refused() -> None:
    with pytest.raises(PermissionProblemError, match="1024"):
        listen("127.0.0.1", 80)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_foreign_address_is_refused(host: str) -> None:
    with pytest.raises(SettingsError, match="SSD_HOST"):
        listen(host, 0)


def test_wildcard_addresses_are_shown_as_loopback() -> None:
    with listen("0.0.0.0", 0) as everywhere:
        assert address(everywhere) == f"http://127.0.0.1:{everywhere.getsockname()[1]}"
    if socket.has_ipv6:
        with listen("::1", 0) as six:
            assert address(six).startswith("http://[::1]:")


def test_closed_stdout_is_no_error() -> None:
    command = f"{sys.executable} -m ssd_serve settings | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("VARIABLE")


def test_progress_without_a_terminal_is_plain_lines(capsys: Captured) -> None:
    line = ProgressLine()
    for text in ("loading", "loading: 1 MB", "loading: 2 MB", "", "measuring"):
        line.show(text)
    line.clear()
    assert capsys.readouterr().err == "loading\nmeasuring\n"


def test_progress_on_a_terminal_shows_the_time_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    line = ProgressLine(stream)
    for text in ("loading [a]", "measuring", "measuring: 2 MB/s"):
        line.show(text)
        time.sleep(0.3)
    line.clear()
    assert all(text in stream.getvalue() for text in ("loading [a]", "measuring: 2 MB/s", "0:00:00"))


def test_broken_bench_package_leaves_other_commands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("bench", "recipes"):
        monkeypatch.setitem(sys.modules, f"ssd_serve.{room}.commands", None)
    assert cli.main(["settings"]) == 0
    for words in (["bench", "modes"], ["recipe", "ballast"]):
        with pytest.raises(ImportError, match=r"\.commands"):
            cli.main(words)


def test_flags_of_other_servers_are_accepted(capsys: Captured) -> None:
    words = ["-m", "/t", "-md", "/d", "-tp", "2", "--max-model-len", "512", "-np", "3", "--alias", "mine"]
    assert cli.main(["settings", "--json", *words, "--dtype", "bfloat16"]) == 0
    told = json.loads(capsys.readouterr().out)
    names = ("TARGET", "DRAFT", "TENSOR_PARALLEL", "CONTEXT", "MAX_RUNNING", "SERVED_MODEL_NAME", "DTYPE")
    assert [told[f"SSD_{name}"]["value"] for name in names] == ["/t", "/d", "2", "512", "3", "mine", "bf16"]


def test_config_file_is_below_flags_and_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "ssd.yaml"
    file.write_text("port: 1\nmax-running: 5\nmode: sd\ndraft: [ngram, suffix]\ngrow_first: false\n")
    monkeypatch.setenv("SSD_MODE", "ar")
    assert cli.main(["settings", "--json", "--config", str(file), "--port", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {name: (told[f"SSD_{name}"]["value"], told[f"SSD_{name}"]["origin"]) for name in ("PORT", "MODE")}
    assert found == {"PORT": ("2", "flag"), "MODE": ("ar", "variable")}
    assert (told["SSD_MAX_RUNNING"]["value"], told["SSD_MAX_RUNNING"]["origin"]) == ("5", "file")
    assert (told["SSD_DRAFT"]["value"], told["SSD_GROW_FIRST"]["value"]) == ("ngram,suffix", "False")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "there is no setting prot; did you mean port?"),
        ("port: many", "port of the configuration file: input should be a valid integer"),
        ("- port", "must be a mapping"),
        ("port: [", "is no YAML"),
        ("port: {a: 1}", "must be one value"),
        ("max-running: 1\nmax_running: 2", "given twice"),
        ("!!python/object:os.system {}", "is no YAML"),
    ],
)
def test_invalid_config_file_is_refused(text: str, words: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "ssd.yaml").write_text(text)
    assert cli.main(["settings", "--config", str(tmp_path / "ssd.yaml")]) == 2
    assert words in capsys.readouterr().err


def test_version_prints_packages_and_cores(capsys: Captured) -> None:
    assert cli.main(["version"]) == 0
    short = capsys.readouterr().out
    assert cli.main(["version", "--full"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert short.strip() == f"ssd {told['version']}"
    assert told["packages"]["torch"]
    assert told["cores"] >= 1


def test_pull_of_the_embedded_model(capsys: Captured) -> None:
    assert cli.main(["pull", "embedded"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "config.json").is_file()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_have_commands_and_flags(shell: str, capsys: Captured) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "serve run chat generate" in script
    assert ("-l draft-width" if shell == "fish" else "--draft-width") in script
    assert not re.search(r"\bworker\b", script)


def test_bash_completion_completes_words(tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "complete.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _ssd; echo ${{COMPREPLY[@]}}"
        command = ["bash", "-c", f"source {script}; compopt() {{ :; }}; {line}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert completed("ssd", "ser") == ["serve"]
    assert completed("ssd", "serve", "--draft-w") == ["--draft-width"]
    assert completed("ssd", "version", "--f") == ["--full"]
