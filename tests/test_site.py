"""The documentation site builds, and each command in a document is parsed by `ssd` or checked by its kind."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ssd_serve.app.cli.flags import given_flags
from ssd_serve.app.cli.main import build_parser
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings_sources import resolve
from ssd_serve.server.openai.protocol import ChatRequest
from ssd_serve.server.openapi import OPERATIONS
from tests.deploy.files import DEPLOY, read_compose, read_objects, read_yaml
from tests.deploy.helm import CHART
from tests.generated_docs import DOCS
from tests.test_docs import DOCUMENTS, ROOT, by_path, text

Words = Sequence[str]
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_NESTED = re.compile(r"\$\(([^)]*)\)")
_ENDS = "&|;\n"
_FLAG = re.compile(r"[\s,`](--?[a-z][\w-]*)")
FLAGS = {*_FLAG.findall(text(DOCS / "cli.md")), "--help"}


def fenced_commands(document: Path) -> Iterator[list[str]]:
    """Yield the words of each command of the shell blocks, and of lines of other blocks that begin with `$ `."""
    for language, block in _FENCE.findall(text(document)):
        script = re.sub(r"(?m)(^|\s)#.*$", "", block.replace("\\\n", " "))
        if language not in ("sh", "bash", "console"):
            script = "\n".join(re.findall(r"^\$ (.*)", script, re.MULTILINE))
        yield from map(shlex.split, _NESTED.findall(script))
        lexer = shlex.shlex(_NESTED.sub("VALUE", script), posix=True, punctuation_chars=_ENDS)
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
        yield from (list(words) for ends, words in groupby(lexer, lambda word: word[0] in _ENDS) if not ends)


def check(words: Words) -> None:
    """Check a command by its program; one without a check is a KeyError."""
    start = next(
        (at for at, word in enumerate(words) if word != "export" and not re.match(r"\w+=", word)), None
    )
    if start is not None:
        CHECKS[Path(words[start]).name](words[start + 1 :])


def check_ssd(words: Words) -> None:
    resolve(given_flags(build_parser().parse_args(words)))


def check_make(words: Words) -> None:
    targets = re.findall(r"^([\w -]+):", text(ROOT / "Makefile"), re.MULTILINE)
    assert set(words) <= {name for line in targets for name in line.split()}


def check_files(words: Words) -> None:
    """Files and folders of the repository exist."""
    for name in words:
        if name.endswith((".yaml", "Dockerfile")) or re.match(r"(tests|deploy)\b", name):
            assert (ROOT / name).exists() or (DEPLOY / name).exists(), name


def check_python(words: Words) -> None:
    module = words[words.index("-m") + 1]
    assert importlib.util.find_spec(module)
    (check_ssd if module == "ssd_serve" else check_files)(words[2:])


def check_pip(words: Words) -> None:
    extras = text(ROOT / "pyproject.toml").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert set(re.findall(r"\[(\w+)\]", words[1])) <= set(re.findall(r"^(\w+) = ", extras, re.MULTILINE))


def check_curl(words: Words) -> None:
    (path,) = re.findall(r"https?://[^/]+(/\S*)", " ".join(words))
    body = words[words.index("-d") + 1] if "-d" in words else None
    assert ("get" if body is None else "post") in OPERATIONS[path].methods
    if body is not None:
        ChatRequest.model_validate_json(body)


def check_docker(words: Words) -> None:
    if words[0] == "compose":
        check_compose(words[1:])
    elif words[0] == "build":
        check_files(words)
    else:
        (image,) = [word for word in words if re.fullmatch(r"ssd-serve:(cpu|rocm|cuda)", word)]
        check_ssd(words[words.index(image) + 1 :] or ["serve"])


def check_compose(words: Words) -> None:
    options, rest = _options(words)
    services: dict[str, Any] = read_compose(options["-f"])["services"]
    profiles = {name for service in services.values() for name in service.get("profiles", ())}
    assert options.get("--profile") in {None, *profiles}
    _, names = _options(rest[1:])
    if rest[0] == "exec":
        check(names[1:])
        names = names[:1]
    assert rest[0] in ("up", "down", "exec")
    assert {name for name in names if not name.startswith("-")} <= set(services)


def _options(words: Words) -> tuple[dict[str, str], Words]:
    """Split off leading options that have a value."""
    found: dict[str, str] = {}
    while words and words[0] in ("-f", "--profile", "-e"):
        found[words[0]], words = words[1], words[2:]
    return found, words


def check_kubectl(words: Words) -> None:
    found = [each for path in (DEPLOY / "kubernetes").glob("*.yaml") for each in read_objects(text(path))]
    names = {each["metadata"]["name"] + "-serve-svc" * (each["kind"] == "RayService") for each in found}
    if words[0] == "port-forward":
        assert words[1].removeprefix("service/") in names
    elif words[0] == "create":
        assert f"'{words[3]}'" in str(found)
        assert {word.split("=")[1] for word in words[4:]} <= set(re.findall(r"'key': '([\w-]+)'", str(found)))
    else:
        assert words[:2] == ["apply", "-f"]
        check_files(words)


def check_helm(words: Words) -> None:
    assert [words[0], ROOT / words[2]] == ["install", CHART]
    values: dict[str, Any] = read_yaml("helm/ssd-serve/values.yaml")
    for name, value in (word.split("=") for word in words[3:] if word != "--set"):
        *above, last = name.split(".")
        inner = values
        for part in above:
            inner = inner[part]
        inner[last] = value
    jsonschema.validate(values, json.loads(text(CHART / "values.schema.json")))


def check_nothing(_words: Words) -> None:
    """Programs of the machine and of Ray, whose arguments are not ours."""


CHECKS: dict[str, Callable[[Words], None]] = {
    "ssd": check_ssd,
    "make": check_make,
    "curl": check_curl,
    "docker": check_docker,
    "kubectl": check_kubectl,
    "helm": check_helm,
    "pip": check_pip,
    **dict.fromkeys(("python", "python3"), check_python),
    **dict.fromkeys(("serve", "install", "cd"), check_files),
    **dict.fromkeys(("openssl", "ray", "systemctl", "ufw", "useradd"), check_nothing),
}


WRONG = """\
ssd serve --no-such-flag
ssd serve --mode fast
make nothing
curl http://127.0.0.1/v2
docker build -f no.Dockerfile
docker compose -f compose.cpu.yaml up nothing
kubectl apply -f no.yaml
helm install ssd deploy/helm/ssd-serve --set a=b
pip install ssd-serve[none]
python -m tests.nothing
unknown program"""


@pytest.mark.slow
def test_site_builds_with_strict_links(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Four tutorials" in (tmp_path / "tutorials.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "examples/README.md"], ids=by_path)
def test_commands_are_parsed_or_checked_by_kind(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)  # `ssd bench peers` looks for llama-server
    for words in fenced_commands(document):
        check(words)


@pytest.mark.parametrize("command", WRONG.splitlines())
def test_wrong_commands_fail(command: str) -> None:
    with pytest.raises((AssertionError, LookupError, UserError, jsonschema.ValidationError)):
        check(command.split())


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each.name != "CHANGELOG.md"], ids=by_path)
def test_flags_of_commands_in_sentences_exist(document: Path) -> None:
    commands = re.findall(r"`(?:\.venv/bin/)?ssd \w[^`]*`", text(document))
    assert {flag for command in commands for flag in _FLAG.findall(command)} <= FLAGS


def test_counterparts_of_other_servers_exist() -> None:
    """A row with "the same" in its second column has our flags and paths in the first."""
    rows = [line.split(" | ") for line in text(DOCS / "migrating.md").splitlines() if line.startswith("| ")]
    ours = " ".join(there + here if here.startswith("the same") else here for there, here in rows)
    assert len(_FLAG.findall(ours)) > 50
    assert set(_FLAG.findall(ours)) <= FLAGS
    assert set(re.findall(r"`(/[\w/]+)`", ours)) <= set(OPERATIONS)
