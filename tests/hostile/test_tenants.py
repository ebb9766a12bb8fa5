"""Tests of separation between users: no access to prompts of others, none without a key, and limits."""

from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.hostile.guarded import (
    ANNA,
    BEN,
    COMPLETIONS,
    SECRETS,
    Guarded,
)
from tests.hostile.target_server import TargetServer

SECRET = [3 + 17 * place % 900 for place in range(80)]
"""Token ids of one user's prompt, long enough for the prefix cache."""


def cached(answer: httpx.Response) -> int | None:
    assert answer.status_code == 200, answer.text
    details: dict[str, int] | None = answer.json()["usage"]["prompt_tokens_details"]
    return None if details is None else details["cached_tokens"]


def test_cache_salt_separates_prefixes_but_its_owner_reuses_them(server: TargetServer) -> None:
    ask = {"prompt": [*SECRET, 5], "max_tokens": 1, "temperature": 0.0}
    with server.unharmed():
        first, again = (server.post(COMPLETIONS, {**ask, "cache_salt": "anna's"}) for _ in range(2))
        others = [server.post(COMPLETIONS, {**ask, "cache_salt": f"guess {n}"}) for n in range(20)]
    assert (cached(first), cached(again)) == (0, len(SECRET))
    assert {cached(each) for each in others} == {0}
    texts = {each.json()["choices"][0]["text"] for each in (first, again, *others)}
    assert len(texts) == 1


def test_prefix_cache_is_separate_for_each_key(guarded: Guarded) -> None:
    """The separation holds with the other user's salt, and while the other user's request runs."""
    ask = {"prompt": [*SECRET, 6], "max_tokens": 64, "ignore_eos": True, "cache_salt": "s"}
    with guarded.server.unharmed(), ThreadPoolExecutor(4) as pool:
        running = [pool.submit(guarded.post, ANNA, ask) for _ in range(2)]
        guesses = [pool.submit(guarded.post, BEN, {**ask, "max_tokens": 1}) for _ in range(2)]
        answers = [each.result() for each in (*guesses, *running)]
        found = [cached(each) for each in answers[:2]]
        later = guarded.post(BEN, {**ask, "cache_salt": "anna\0s"})
        hers = guarded.post(ANNA, ask)
    # Ben's two requests may share a prefix with each other.
    assert min(found) == 0  # type: ignore[type-var]
    assert cached(later) == 0
    assert cached(hers) == len(SECRET)


def test_log_never_contains_prompts_salts_or_keys(guarded: Guarded) -> None:
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
