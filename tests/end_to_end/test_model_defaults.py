"""A model folder's `generation_config.json`, the whole way: server, Python and command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from ssd_serve import LLM, SamplingParams
from ssd_serve.app.cli.main import main
from ssd_serve.base.errors import CheckpointError
from tests.end_to_end.tiny_pair import write_model
from tests.servers import free_port, running

GREEDY = SamplingParams(temperature=0, max_tokens=9)
SETTINGS: dict[str, Any] = {"mode": "ar", "dtype": "fp32", "native_kernels": False, "kv_memory_mb": 8}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that asks for nine tokens, always the best one."""
    folder = tmp_path_factory.mktemp("model") / "target"
    write_model(folder, seed=1, noise=0.0)
    configure(folder, do_sample=False, max_new_tokens=9)
    return folder


def configure(folder: Path, **keys: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(keys), encoding="utf-8")


def test_llm_uses_generation_config_defaults(target: Path, cache_dir: Path) -> None:
    with LLM(target, cache_dir=cache_dir, **SETTINGS) as llm:
        assert llm.get_default_sampling_params() == GREEDY
        tokens = [each.token_ids for each in llm.generate(["def f(", "import os"])]
        assert tokens == [each.token_ids for each in llm.generate(["def f(", "import os"], GREEDY)]
        assert [len(each) for each in tokens] == [9, 9]
        own = llm.generate("def f(", SamplingParams(max_tokens=12, seed=1))[0]
        assert len(own.token_ids) == 12
        assert own.token_ids[:9] != tokens[0]
        *_, last = llm.stream("def f(")
        assert last.output is not None
        assert last.output.token_ids == tokens[0]


def test_llm_uses_api_defaults(target: Path, cache_dir: Path) -> None:
    with LLM(target, cache_dir=cache_dir, generation_config="none", **SETTINGS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_generate_command_uses_generation_config_defaults(
    target: Path, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    fixed = ["--json", "--target", str(target), "--mode", "ar", "--dtype", "fp32", "--no-native-kernels"]
    fixed += ["--cache-dir", str(cache_dir)]

    def tokens(*flags: str) -> list[int]:
        assert main(["generate", "def f(", *fixed, *flags]) == 0
        found: list[int] = json.loads(capsys.readouterr().out)["token_ids"]
        return found

    plain = ["--generation-config", "none", "--temperature", "0", "--max-tokens", "9"]
    assert tokens() == tokens(*plain)
    assert len(tokens("--max-tokens", "4", "--temperature", "1", "--seed", "2")) == 4


@pytest.mark.slow
def test_server_uses_generation_config_defaults(target: Path, tmp_path: Path) -> None:
    port = free_port()
    named = {name.upper(): str(value) for name, value in SETTINGS.items()}
    environment = {**os.environ, **{f"SSD_{name}": value for name, value in named.items()}}
    command = [sys.executable, "-m", "ssd_serve", "serve", str(target), "--port", str(port)]
    with running(command, environment, tmp_path, port) as (_process, url, log):
        assert "from generation_config.json what they leave out" in log.read_text(encoding="utf-8")

        def answer(**fields: object) -> dict[str, Any]:
            body = {"prompt": "def f(", "return_token_ids": True, **fields}
            told = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).raise_for_status().json()
            choice: dict[str, Any] = told["choices"][0]
            return choice

        best = answer(temperature=0, max_tokens=9)
        assert answer()["token_ids"] == best["token_ids"] == answer(temperature=None)["token_ids"]
        assert len(best["token_ids"]) == 9
        assert answer(temperature=1, max_tokens=12, seed=1)["token_ids"][:9] != best["token_ids"]
        card = httpx.get(f"{url}/v1/models", timeout=60.0).json()["data"][0]
        assert card["default_sampling_params"] == {"temperature": 0.0, "max_tokens": 9}


def test_invalid_generation_config_is_refused_at_start(tmp_path: Path) -> None:
    write_model(tmp_path / "wrong", seed=1, noise=0.0)
    configure(tmp_path / "wrong", top_p=7)
    command = [sys.executable, "-m", "ssd_serve", "serve", str(tmp_path / "wrong"), "--mode", "ar", "--port"]
    done = subprocess.run(
        [*command, str(free_port())], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == CheckpointError.exit_code, done.stderr
    assert "generation_config.json: top_p: input should be less than or equal to 1" in done.stderr
    assert "starting" not in done.stderr
