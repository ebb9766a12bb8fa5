"""Tests of the page's files without a browser: headers, keys, root paths, and nothing from elsewhere."""

import re
from pathlib import Path

import pytest

from ssd_serve.base.settings import Settings
from ssd_serve.server import page
from tests.server.fakes import say
from tests.server.running_server import running_server

pytestmark = pytest.mark.anyio
STATIC = Path(page.__file__).parent / "static"
OWN = [
    file for file in STATIC.rglob("*.*") if file.suffix in (".html", ".js", ".css") and file.parent == STATIC
]
KEY = "k" * 32


async def test_page_has_a_strict_policy_and_is_revalidated() -> None:
    async with running_server(lambda _: say("x")) as server:
        answer = await server.http.get("/")
        known = await server.http.get("/", headers={"If-None-Match": answer.headers["etag"]})
        script = await server.http.get("/page/app.js")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert (known.status_code, known.content) == (304, b"")
    assert script.headers["content-type"].startswith("text/javascript")


async def test_every_file_of_the_page_is_served() -> None:
    files = [file for file in STATIC.rglob("*") if file.is_file() and file.name != "index.html"]
    async with running_server(lambda _: say("x")) as server:
        for file in files:
            answer = await server.http.get(f"/page/{file.relative_to(STATIC).as_posix()}")
            assert answer.content == file.read_bytes(), file
        missing = await server.http.get("/page/../auth.py")
    assert missing.status_code == 404


async def test_page_needs_no_key_but_its_requests_do() -> None:
    async with running_server(lambda _: say("x"), Settings(api_key=KEY)) as server:
        found = [(await server.http.get(path)).status_code for path in ("/", "/page/app.js", "/v1/models")]
    assert found == [200, 200, 401]


async def test_page_can_be_switched_off() -> None:
    async with running_server(lambda _: say("x"), Settings(page=False)) as server:
        assert [(await server.http.get(path)).status_code for path in ("/", "/page/app.js")] == [404, 404]


@pytest.mark.parametrize("path", ["/llm/", "/", "/llm"])
async def test_page_works_below_a_root_path(path: str) -> None:
    async with running_server(lambda _: say("x"), Settings(root_path="/llm")) as server:
        answer = await server.http.get(path, follow_redirects=True)
    assert answer.headers["content-type"].startswith("text/html")
    assert path == "/" or answer.url.path == "/llm/"


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_files_have_no_inline_code_and_no_foreign_address(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/)[\w-]+\.", text)
    assert "innerHTML" not in text
    if file.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
        assert not re.search(r'(?:src|href)="/', text), "absolute addresses fail below a root path"
