"""SECURITY.md agrees with the code: settings and files exist, and tests hold its verdicts."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd_serve.base.errors import GrammarError
from ssd_serve.base.settings import Settings
from ssd_serve.sampling.grammar import check_grammar, from_json_schema, from_lark, from_regex, serialize_parts
from ssd_serve.server.openapi import OPERATIONS
from tests.server.fakes import say
from tests.server.running_server import running_server

ROOT = Path(__file__).parents[1]
PRODUCT = ROOT / "src" / "ssd_serve"
VERDICTS = {"no", "closed", "open", "not known"}
POST_PATHS = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/ping",
}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}


@pytest.fixture(scope="module")
def security() -> str:
    return (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def advisories(security: str) -> list[list[str]]:
    """Cells of the rows: advisory, flaw, verdict, reason, tests."""
    table = security.partition("where we stand")[2]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")]
    return rows[1:]


def imports(folder: Path) -> Iterator[tuple[str, str]]:
    """Each file of the product below a folder, with each module that it imports."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            yield from ((str(path.relative_to(PRODUCT)), module) for module in modules)


def test_every_file_exists(security: str) -> None:
    named = [name for name in re.findall(r"`([\w/.-]+)`", security) if "/" in name or name.endswith(".txt")]
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists() and name != "owner/name"] == []


def test_every_advisory_has_a_verdict_held_by_tests(security: str) -> None:
    rows = advisories(security)
    assert len(rows) > 25
    assert all(len(row) == 5 for row in rows)
    assert {row[2] for row in rows} <= VERDICTS
    for advisory, _, verdict, _, tests in rows:
        names = re.findall(r"\btest_\w+\b(?!\.py)", tests)
        assert all(name in globals() for name in names), advisory
        assert bool(names or "`tests/" in tests) == (verdict in ("no", "closed")), advisory


def test_every_cve_number_is_well_formed(security: str) -> None:
    assert security.count("CVE-") == len(re.findall(r"\bCVE-20\d\d-\d{4,7}\b(?!\*\w)", security))


def test_the_readme_links_to_the_page() -> None:
    assert "](SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_module_unpickles() -> None:
    unpickling = {"cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
    assert [each for each in imports(PRODUCT) if each[1].partition(".")[0] in unpickling] == []
    for path in PRODUCT.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"pickle\.(loads?|Unpickler)\b|from pickle import", source), path
        guarded = re.findall(r"torch\.load\([^)]*weights_only=True", source)
        assert source.count("torch.load(") == len(guarded), path


def test_default_addresses_are_loopback() -> None:
    settings = Settings()
    assert settings.host == "127.0.0.1"
    assert not settings.drafter_address


def test_minimum_versions() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package, least in {"sentencepiece": (0, 2, 1), "jinja2": (3, 1, 6), "h11": (0, 16)}.items():
        (found,) = re.findall(rf'^    "{package}>=([\d.]+)"', project, re.MULTILINE)
        assert tuple(map(int, found.split("."))) >= least


def test_hub_downloads_no_code() -> None:
    files = [PRODUCT / "models" / name for name in ("hub.py", "hub_download.py")]
    source = "".join([each.read_text(encoding="utf-8") for each in files])
    assert "allow_patterns=" in source
    assert re.findall(r"[\w*]+\\?\.py\b", source) == []


def test_no_path_manages_the_server() -> None:
    posts = {path for path, each in OPERATIONS.items() if not {*each.methods} <= {"get", "head"}}
    assert posts == POST_PATHS


def test_server_has_no_http_client() -> None:
    clients = {"httpx", "requests", "aiohttp", "urllib3", "urllib.request", "http.client"}
    assert [each for each in imports(PRODUCT / "server") if each[1] in clients] == []


def test_prefix_cache_compares_tokens_not_hashes() -> None:
    file = PRODUCT / "cache" / "prefix.py"
    assert "hashlib" not in {module for _, module in imports(file.parent)}
    calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    assert "hash" not in {each.id for each in calls if isinstance(each, ast.Name)}


DANGEROUS: tuple[tuple[str, dict[str, Any]], ...] = (
    (TEXT, {"prompt_embeds": "AAAA"}),
    (TEXT, {"n": 1025}),
    (TEXT, {"prompt": ["a"] * 2000}),
    (CHAT, {"chat_template": "{{ 1 }}"}),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
)


@pytest.mark.anyio
async def test_dangerous_fields_are_refused() -> None:
    async with running_server(lambda _: say("x")) as server:
        for path, fields in DANGEROUS:
            body = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
            answer = await server.http.post(path, json={**body, **fields})
            assert answer.status_code == 400, fields


@pytest.mark.parametrize(
    "grammar",
    [
        from_regex("(" * 900),
        from_lark("start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(2000)) + '\na2000: "q"'),
        from_lark(f'start: {" ".join(["a?"] * 9_000)}\na: "q"'),
        from_json_schema(json.loads('{"items":' * 600 + "{}" + "}" * 600)),
    ],
    ids=["nesting", "rules", "size", "depth"],
)
def test_grammar_bombs_are_refused(grammar: dict[str, object]) -> None:
    with pytest.raises(GrammarError):
        check_grammar(serialize_parts(grammar))
