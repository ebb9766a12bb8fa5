"""The programs of `examples/` do what their first lines say, with SmolLM2."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.servers import free_port, running

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    port = free_port()
    command = [sys.executable, "-m", "ssd_serve", "serve", "smollm2", "--tool-parser", "hermes"]
    with running(
        [*command, "--port", str(port)], os.environ, tmp_path_factory.mktemp("server"), port
    ) as found:
        yield found[1]


def run(name: str, *arguments: str, given: str = "") -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_chat_remembers_its_turns(url: str) -> None:
    told = run("chat.py", url, given="What is the capital of Japan?\nRepeat your last answer.\n")
    assert told.count("Tokyo") >= 2


@pytest.mark.slow
def test_extraction_gives_an_object_of_the_schema(url: str) -> None:
    found = json.loads(run("extract.py", url))
    assert set(found) == {"name", "city", "born"}
    assert "Lovelace" in found["name"]


@pytest.mark.slow
def test_agent_calls_a_tool_and_answers_from_its_result(url: str) -> None:
    call, _, answer = run("agent.py", url).partition("\n")
    assert call == 'weather({"city": "Tokyo"}) = sun, 21 degrees'
    assert answer.strip()


@pytest.mark.slow
def test_batch_answers_each_line_of_a_file(tmp_path: Path) -> None:
    prompts = ["What is the capital of France?", "Name a colour."]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    run("batch.py", str(tmp_path / "prompts.txt"), str(tmp_path / "answers.jsonl"))
    rows = [
        json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["prompt"] for row in rows] == prompts
    assert all(row["answer"] for row in rows)


@pytest.mark.slow
def test_draft_source_drafts_and_changes_no_text(tmp_path: Path) -> None:
    """The package is described to Python as pip would do it."""
    source = EXAMPLES / "draft_source"
    project = (source / "pyproject.toml").read_text(encoding="utf-8")
    ((group, name, load),) = re.findall(r'entry-points\."(.+)"\]\n(.+) = "(.+)"', project)
    described = tmp_path / "last_follower-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.4\nName: last-follower\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[{group}]\n{name} = {load}\n")
    path = os.pathsep.join([str(tmp_path), str(source), os.environ.get("PYTHONPATH", "")])

    def generated(*flags: str) -> dict[str, object]:
        command = [sys.executable, "-m", "ssd_serve", "generate", "one two one two one two", "--json"]
        done = subprocess.run(
            [*command, "--temperature", "0", "--max-tokens", "40", *flags],
            env={**os.environ, "PYTHONPATH": path, "SSD_CONTEXT": "512"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        report: dict[str, object] = json.loads(done.stdout)
        return report

    plain = generated("--mode", "ar")
    drafted = generated("--draft", name, "--mode", "sd", "--num-speculative-tokens", "4")
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["accepted"] != 0


def test_litellm_configuration_names_the_model_and_its_server() -> None:
    (model,) = yaml.safe_load((EXAMPLES / "litellm.yaml").read_text(encoding="utf-8"))["model_list"]
    assert model["litellm_params"]["model"] == "openai/smollm2"


def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    nginx = shutil.which("nginx")
    if nginx is None:
        pytest.skip("nginx is not installed")
    command = [nginx, "-t", "-p", str(tmp_path), "-c", str(EXAMPLES / "nginx.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "syntax is ok" in done.stderr, done.stderr
