"""Tests of `ssd report`: it packs the output of every step, also of failed ones, and no secrets."""

import json
import os
import signal
import sys
import tarfile
import time
from pathlib import Path

import pytest

from ssd_serve.app.cli.main import build_parser
from ssd_serve.app.doctor.bug_report import (
    INTERRUPTED,
    TIMED_OUT,
    Step,
    blotted,
    known_secrets,
    steps,
    write_report,
)
from ssd_serve.base.errors import SettingsError

PROGRAM = """
import pathlib, sys
if sys.argv[1] == "fails":
    sys.exit("no: sesame")
if len(sys.argv) > 2:
    pathlib.Path(sys.argv[2]).write_text("result with sesame")
print("printed", pathlib.Path.home())
"""


def read(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found: dict[str, str] = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            found[member.name] = "" if file is None else file.read().decode()
    return found


def quiet(text: str) -> None:
    """Print nothing."""


def test_results_logs_and_exit_codes_are_packed_without_secrets(tmp_path: Path) -> None:
    todo = [
        Step("file", ("writes", "{file}"), "cuda:0"),
        Step("print", ("prints",)),
        Step("broken", ("fails",)),
    ]
    program = (sys.executable, "-c", PROGRAM)
    codes = write_report(tmp_path / "out.tar.gz", todo, ["sesame"], quiet, program)
    assert codes == {"file": 0, "print": 0, "broken": 1}
    found = read(tmp_path / "out.tar.gz")
    assert found["ssd-report/file.json"] == "result with <left out>"
    assert found["ssd-report/file.log"] == "printed <home>\n"
    assert found["ssd-report/print.json"] == "printed <home>\n"
    assert found["ssd-report/broken.log"] == "no: <left out>\n"
    assert json.loads(found["ssd-report/summary.json"]) == {
        "exit_codes": codes,
        "devices": {"file": "cuda:0", "print": None, "broken": None},
    }
    assert not any(name.endswith(".printed") for name in found)


def report(tmp_path: Path, code: str, secrets: list[str], step_s: float = 60.0) -> dict[str, str]:
    out = tmp_path / "out.tar.gz"
    write_report(out, [Step("it", ("prints",))], secrets, quiet, (sys.executable, "-c", code), step_s)
    return read(out)


def test_secrets_inside_json_and_invalid_utf8_are_replaced(tmp_path: Path) -> None:
    secret = 'pass"word\\ä'
    code = f"import json; print(json.dumps({{'key': {secret!r}}}))"
    assert json.loads(report(tmp_path, code, [secret])["ssd-report/it.json"]) == {"key": "<left out>"}
    code = "import sys; sys.stdout.buffer.write(b'before \\xff after')"
    assert report(tmp_path, code, [])["ssd-report/it.json"] == "before \ufffd after"
    code = f"import json, sys; sys.stdout.buffer.write(json.dumps([{secret!r}], ensure_ascii=False).encode())"
    assert report(tmp_path, code, [secret])["ssd-report/it.json"] == '["<left out>"]'


def test_report_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert report(tmp_path, "print('here')", [])["ssd-report/it.json"] == "here\n"


def test_hanging_step_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    found = report(tmp_path, code, [], step_s=1.0)
    assert json.loads(found["ssd-report/summary.json"])["exit_codes"] == {"it": TIMED_OUT}
    assert gone(int(found["ssd-report/it.json"]))


def gone(process: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_interrupted_report_packs_finished_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, signal, sys, time\nprint('begun', flush=True)\nif sys.argv[1] == 'hangs':\n"
    code += f"    os.kill({os.getpid()}, signal.SIGINT)\n    time.sleep(600)"
    todo = [Step("done", ("prints",)), Step("cut", ("hangs",)), Step("never", ("prints",))]
    out = tmp_path / "out.tar.gz"
    # A shell ignores the signal for background processes, and Python inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_report(out, todo, [], quiet, (sys.executable, "-c", code))
    finally:
        signal.signal(signal.SIGINT, before)
    found = read(out)
    assert found["ssd-report/done.json"] == found["ssd-report/cut.json"] == "begun\n"
    assert json.loads(found["ssd-report/summary.json"])["exit_codes"] == {"done": 0, "cut": INTERRUPTED}
    assert "ssd-report/never.json" not in found


def test_archive_folder_is_made_or_refused_before_the_first_step(tmp_path: Path) -> None:
    program = (sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')")
    todo = [Step("it", ("prints",))]
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="name another file with --out"):
        write_report(tmp_path / "file" / "out.tar.gz", todo, [], quiet, program)
    assert not (tmp_path / "ran").exists()
    out = tmp_path / "new" / "place" / "out.tar.gz"
    write_report(out, todo, [], quiet, program)
    first = sorted(read(out))
    write_report(out, todo, [], quiet, program)
    assert sorted(read(out)) == first, "an archive that was there is replaced"


def test_steps_are_commands_on_the_device() -> None:
    assert {step.name: step.device for step in steps("cuda:0", quick=False)} == {
        "settings": None,
        "doctor": None,
        "conformance": "cuda:0",
        "kernels": "cuda:0",
        "divergence": "cuda:0",
        "modes": "cuda:0",
    }
    for step in steps("cuda:0", quick=False):
        arguments = " ".join(step.arguments)
        assert ("--device cuda:0" in arguments) == (step.device is not None)
        assert callable(build_parser().parse_args(step.arguments).run)
    modes = build_parser().parse_args(steps("cuda:0", quick=False)[-1].arguments)
    assert (modes.prompts, modes.num_prompts) == (None, 4)
    quick = [step.name for step in steps("cuda:0", quick=True)]
    assert quick == ["settings", "doctor", "conformance", "kernels", "divergence"]


def test_secrets_of_settings_and_environment_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SOME_API_KEY", "from the environment")
    monkeypatch.setenv("password", "written small")
    monkeypatch.setenv("HTTPS_PROXY", "http://someone:pass%20word@proxy:3128")
    monkeypatch.setenv("http_proxy", "nobody:it@proxy")
    assert set(known_secrets(["given", "abc", None])) == {
        "given",
        "from the environment",
        "written small",
        "someone:pass%20word@",
        "pass%20word",
        "pass word",
        "nobody:it@",
    }
    assert blotted("ab abc", {"ab": "X", "abc": "Y"}) == "X Y"


def test_values_that_results_need_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "something long")
    monkeypatch.setenv("KEYBOARD_LAYOUT", "something else")
    monkeypatch.setenv("MAX_TOKEN", "1000000000")
    monkeypatch.setenv("USE_AUTH", "false")
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    assert known_secrets([None, ""]) == []
