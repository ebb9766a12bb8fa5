"""Users of one server who try to learn what others asked, to come in without a key, or to take all of it."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from ssd_serve.bench.metrics_page import by_label, metric
from tests.hostile.guarded import (
    ANNA,
    BEN,
    COMPLETIONS,
    KEYS,
    MALLORY,
    METRICS,
    OPERATOR,
    SECRETS,
    Guarded,
    bearer,
)
from tests.hostile.target_server import TargetServer

SECRET = [3 + 17 * place % 900 for place in range(80)]
"""Token ids of a prompt that only one user has; long enough to be worth keeping."""


def cached(answer: httpx.Response) -> int | None:
    """How much of its prompt an answer says was found in the cache."""
    assert answer.status_code == 200, answer.text
    details: dict[str, int] | None = answer.json()["usage"]["prompt_tokens_details"]
    return None if details is None else details["cached_tokens"]


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]


def test_a_guess_of_anothers_prompt_is_never_confirmed_without_keys(server: TargetServer) -> None:
    """Whole, streamed, and 100 guesses at once."""
    ask = {"prompt": SECRET, "max_tokens": 1, "temperature": 0.0}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    with server.unharmed():
        for _ in range(2):
            assert cached(server.post(COMPLETIONS, ask)) is None
        many = [[*SECRET[:40], *range(40 + number)] for number in range(100)]
        assert cached(server.post(COMPLETIONS, {**ask, "prompt": many})) is None
        stream = server.post(COMPLETIONS, {**ask, "stream": True, "stream_options": usage})
        assert {str(each["usage"]["prompt_tokens_details"]) for each in chunks(stream)} == {"None"}
        assert "cached" not in stream.text


def test_salts_keep_prompts_apart_and_their_owner_still_reuses_them(server: TargetServer) -> None:
    ask = {"prompt": [*SECRET, 5], "max_tokens": 1, "temperature": 0.0}
    with server.unharmed():
        first, again = (server.post(COMPLETIONS, {**ask, "cache_salt": "anna's"}) for _ in range(2))
        others = [server.post(COMPLETIONS, {**ask, "cache_salt": f"guess {n}"}) for n in range(20)]
    assert (cached(first), cached(again)) == (0, len(SECRET))
    assert {cached(each) for each in others} == {0}
    texts = {each.json()["choices"][0]["text"] for each in (first, again, *others)}
    assert len(texts) == 1


def test_a_guess_of_another_keys_prompt_finds_nothing(guarded: Guarded) -> None:
    """Also with Anna's own salt, and while her request runs."""
    ask = {"prompt": [*SECRET, 6], "max_tokens": 64, "ignore_eos": True, "cache_salt": "s"}
    with guarded.server.unharmed(), ThreadPoolExecutor(4) as pool:
        running = [pool.submit(guarded.post, ANNA, ask) for _ in range(2)]
        guesses = [pool.submit(guarded.post, BEN, {**ask, "max_tokens": 1}) for _ in range(2)]
        answers = [each.result() for each in (*guesses, *running)]
        found = [cached(each) for each in answers[:2]]
        later = guarded.post(BEN, {**ask, "cache_salt": "anna\0s"})
        hers = guarded.post(ANNA, ask)
    # Ben's two guesses may find each other.
    assert min(found) == 0  # type: ignore[type-var]
    assert cached(later) == 0
    assert cached(hers) == len(SECRET)


def test_wrong_keys_are_refused_as_fast_as_they_come(guarded: Guarded) -> None:
    wrong = [ANNA[:-1], ANNA + "a", "", "Bearer x", "a" * 8000, "Bearer", "~" * 32, "default", "anna"]
    with guarded.server.unharmed():
        with httpx.Client(base_url=guarded.server.url, timeout=30.0) as http:
            found = {http.get("/v1/models", headers=bearer(wrong[n % 9])).status_code for n in range(400)}
        assert found == {401}
        page = httpx.get(guarded.metrics, headers=bearer(METRICS)).text
    assert metric(page, "ssd_unknown_keys_total") >= 400


def test_keys_change_while_streams_run(guarded: Guarded) -> None:
    """New ones come, old ones go, and files that are broken or gone change nothing."""
    fresh = "f" * 32
    with guarded.server.unharmed():
        try:
            guarded.rewrite(KEYS.replace(ANNA, fresh))
            guarded.await_key(fresh, True)
            assert not guarded.opens(ANNA)
            for broken in ("", "anna\n", f"anna {ANNA}\nanna {fresh} limit=1\n", "\0" * 4096):
                guarded.rewrite(broken)
                time.sleep(1.2)
                assert guarded.opens(fresh)
                assert not guarded.opens(ANNA)
            guarded.file.unlink()
            time.sleep(1.2)
            assert guarded.opens(fresh)
        finally:
            guarded.rewrite(KEYS)
        guarded.await_key(ANNA, True)
        assert not guarded.opens(fresh)
    log = guarded.server.log
    assert "line 1: a line is: name key" in log
    assert not [key for key in (*SECRETS, fresh) if key in log]


def test_a_limit_holds_and_refuses_before_a_body_is_sent(guarded: Guarded) -> None:
    ask = {"prompt": "def f(", "max_tokens": 1}
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {MALLORY}\r\n"
        "Content-Type: application/json\r\nContent-Length: 8000000\r\n\r\n"
    )
    with guarded.server.unharmed():
        begun = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: guarded.post(MALLORY, ask), range(90)))
        served = sum(answer.status_code == 200 for answer in answers)
        refused = [answer for answer in answers if answer.status_code == 429]
        assert served + len(refused) == 90
        # A minute's worth, and what flows in meanwhile: one each two seconds.
        assert 30 <= served <= 31 + (time.monotonic() - begun) / 2
        assert refused
        assert {answer.json()["error"]["code"] for answer in refused} == {"rate_limit_exceeded"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        while guarded.post(MALLORY, ask).status_code == 200:
            pass
        with guarded.server.connect(timeout_s=5.0) as attacker:
            attacker.sendall(head.encode())
            assert b"429" in attacker.recv(65536).partition(b"\r\n")[0]


def test_nothing_that_users_write_is_in_the_log_whatever_goes_wrong(guarded: Guarded) -> None:
    """At the level that logs most: who asked and what became of it, never a text, a salt or a key."""
    mark = "zebra-crossing"
    bodies: list[object] = [
        {"prompt": mark, "max_tokens": 4},
        {"prompt": mark, "max_tokens": 4, "stop": [mark], "cache_salt": mark, "bad_words": [mark]},
        {"prompt": [mark, 5]},
        {"prompt": mark * 2_000},
        {"prompt": mark, "temperature": mark},
        {"prompt": mark, mark: 1},
        {"messages": [{"role": mark, "content": mark}]},
        mark,
    ]
    with guarded.server.unharmed():
        for body in bodies:
            for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"):
                assert guarded.post(BEN, body, path).status_code < 500
    log = guarded.server.log
    assert mark not in log
    of_ben = [line for line in log.splitlines() if line.endswith(" key=ben") or " key=ben " in line]
    assert any("answered" in line and f"path={COMPLETIONS} status=200" in line for line in of_ben)
    assert any("request finished" in line and f"path={COMPLETIONS}" in line for line in of_ben)
    assert not [key for key in SECRETS if key in log]


def test_metrics_are_for_their_key_at_their_port_alone(guarded: Guarded) -> None:
    api, port = guarded.server.url, guarded.metrics.removesuffix("/metrics")
    with guarded.server.unharmed():
        for key, status in ((METRICS, 200), (OPERATOR, 401), (ANNA, 401), ("", 401)):
            assert httpx.get(guarded.metrics, headers=bearer(key)).status_code == status
            assert httpx.get(f"{api}/metrics", headers=bearer(key)).status_code == 404
        assert httpx.get(f"{api}/v1/models", headers=bearer(METRICS)).status_code == 401
        for path in ("/v1/models", "/openapi.json", "//metrics", "/metrics/x", "/metrics/../v1/models"):
            assert httpx.get(f"{port}{path}", headers=bearer(OPERATOR)).status_code == 404
        posted = httpx.post(f"{port}{COMPLETIONS}", json={"prompt": "a"}, headers=bearer(OPERATOR))
        assert posted.status_code == 404
        page = httpx.get(guarded.metrics, headers=bearer(METRICS)).text
    assert "default" in by_label(page, "ssd_key_requests_total", "key")
    assert not [key for key in SECRETS if key in page]
