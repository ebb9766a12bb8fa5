"""`ssd chat --url`: a conversation with a server on a real socket, and what it says of servers that do not answer."""

import http.server
import io
import json
import re
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from ssd_serve.app.cli import main as cli
from ssd_serve.app.cli.chat_client import ChatClient, remote_summary, show_first_answer
from ssd_serve.base.errors import SettingsError, SsdError
from ssd_serve.base.messages import Submit
from ssd_serve.base.settings import Settings
from tests.server.fakes import END, Script, tokens
from tests.server.running_server import listening_server
from tests.servers import free_port

Captured = pytest.CaptureFixture[str]


def count(submit: Submit) -> Script:
    """Return the number of prompt tokens, so that a longer conversation has another answer."""
    return tokens([*f"{len(submit.prompt)} read".encode(), END], group=4)


def test_conversation_with_a_server(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nhello\n/new\n/help\nhello\n"))
    sent: list[Submit] = []

    def answer(submit: Submit) -> Script:
        sent.append(submit)
        return count(submit)

    with listening_server(answer, settings=Settings(api_key="secret-key-of-anna")) as address:
        assert cli.main(["chat", "--url", f"{address.url}/v1/", "--api-key", "wrong-key-of-anyone"]) == 1
        assert "wants a key" in capsys.readouterr().err
        wanted = ["chat", "--url", address.url, "--api-key", "secret-key-of-anna", "--top-k", "5"]
        assert cli.main(wanted) == 0
    shown = capsys.readouterr().out
    first, second, third = re.findall(r"(\d+) read", shown)
    assert int(first) == int(third) < int(second)
    assert (
        len(re.findall(r"\n\[\d+ tokens, .* tokens a round, \d+ of \d+ drafted tokens accepted\]\n", shown))
        == 3
    )
    assert {(each.parameters.temperature, each.parameters.top_k) for each in sent} == {(0.2, 5)}


@contextmanager
def canned(models: object, chat: bytes, status: int = 200) -> Generator[tuple[str, list[dict[str, Any]]]]:
    """A server of another kind, with these answers; yields its address and the bodies that it received."""
    asked: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps(models).encode())

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(status, chat)

        def answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


CARD: dict[str, Any] = {"data": [{"id": "other", "default_sampling_params": {"temperature": 0.75}}]}


def events(*chunks: Mapping[str, Any]) -> bytes:
    return (
        b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    )


@pytest.mark.parametrize("card", [CARD["data"][0], {"id": "other"}])
def test_server_of_another_kind_keeps_its_temperature_and_sends_no_figures(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    parts = [{"choices": [{"delta": {"content": each}}]} for each in ("one ", None, "two")]
    answer = b": a comment\n\n" + events(*parts, {"choices": [], "usage": {"completion_tokens": 4}})
    with canned({"data": [card]}, answer) as (url, asked):
        assert cli.main(["chat", "--url", url]) == 0
    assert "one two\n[4 tokens" in capsys.readouterr().out
    assert [(each["model"], "temperature" in each) for each in asked] == [("other", False)]


def test_failed_turns_are_told_and_left_out(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    refusal = json.dumps({"error": {"message": "the queue is full"}}).encode()
    for status, body, told in (
        (429, refusal, "[the queue is full; "),
        (500, b"oops", " answered 500; "),
        (200, events({"error": {"message": "the engine died"}}), "[the engine died; "),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
        with canned(CARD, body, status) as (url, asked):
            assert cli.main(["chat", "--url", url]) == 0
        assert [each["messages"] for each in asked] == [
            [{"role": "user", "content": text}] for text in ("hello", "again")
        ]
        assert capsys.readouterr().out.count(told) == 2


def test_addresses_without_a_server(capsys: Captured) -> None:
    assert cli.main(["chat", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert " does not answer (ConnectionRefused" in capsys.readouterr().err
    with canned({"data": []}, b"") as (url, _), pytest.raises(SsdError, match="lists no models"):
        ChatClient(url).model()
    for url in ("", "ftp://x", "http://", "http://x/?a=b"):
        with pytest.raises(SettingsError, match="--url must be"):
            ChatClient(url)
    assert cli.main(["chat", "smollm2", "--url", "127.0.0.1:1"]) == 2


def test_summary_tells_what_speculation_gave() -> None:
    timings = {"predicted_per_second": 61.23, "draft_n": 60, "draft_n_accepted": 12}
    drafts = {"speculative_decoding": {"mean_acceptance_length": 1.4444}}
    figures = {"timings": timings, "metrics": drafts}
    shown = "[40 tokens, 61.2 tokens/s, 1.44 tokens a round, 12 of 60 drafted tokens accepted]"
    assert remote_summary(40, 50.0, figures) == shown
    assert remote_summary(40, 50.0, {}) == "[40 tokens, 50.0 tokens/s]"
    assert remote_summary(1, None, {"timings": {**timings, "draft_n": 0}}) == "[1 tokens, 61.2 tokens/s]"


def test_progress_of_the_prompt_comes_before_the_answer() -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}], "return_progress": True, "cache_salt": "own"}
    with listening_server(count) as address:
        first, *others = ChatClient(address.url).stream(asked)
    assert first.progress is not None
    assert first.progress.processed == 5
    assert not any(piece.progress for piece in others)


def test_banner_shows_a_first_answer_unless_the_server_refuses() -> None:
    with listening_server(count, settings=Settings(api_key="secret-key-of-anna")) as address:
        for key, shown in (("wrong-key-of-anyone", ""), ("secret-key-of-anna", "Asked: What is the capital")):
            out = io.StringIO()
            show_first_answer(out, address.url, key)
            assert out.getvalue()[: len(shown) or None] == shown
    assert re.search(r"\nAnswer: \d+ read \[\d+ tokens, .*accepted\]\n", out.getvalue())
