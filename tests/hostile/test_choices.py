"""What one client may ask of the target for each token and each choice, beside another client's stream."""

from typing import Any

import pytest

from tests.hostile.target_server import TargetServer

PROMPT = "import os\n\n\ndef walk(path):\n"
VOCABULARY = 1000
"""Fewer tokens than the served model has."""

ASKED: dict[str, dict[str, Any]] = {
    "two thousand biases": {"logit_bias": {str(token): 0.5 for token in range(VOCABULARY)}},
    "many allowed tokens": {"allowed_token_ids": list(range(VOCABULARY))},
    "many bad words": {"bad_words": ["a" * (1 + word) for word in range(128)]},
    "twenty log-probabilities of every token": {"logprobs": 20},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "every truncation": {"top_k": 900, "top_p": 0.99, "min_p": 0.001},
}


@pytest.mark.parametrize("name", ASKED)
def test_what_each_row_costs_does_not_stop_others(server: TargetServer, name: str) -> None:
    """Many choices, so that it is asked for in every row of a round."""
    body = {"prompt": PROMPT, "n": 32, "max_tokens": 24, "seed": 3, "ignore_eos": True, **ASKED[name]}
    with server.unharmed():
        answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 32


def test_as_many_choices_as_may_be_of_the_longest_prompt(server: TargetServer) -> None:
    """They read it once: the cache knows all but the first one's. Those that begin before it is read fill the
    target's cache, which the system backs with memory where it is first written."""
    with server.unharmed(kept_mb=512.0):
        answer = server.post(
            "/v1/completions", {"prompt": [5 + n % 90 for n in range(900)], "n": 128, "max_tokens": 2}
        )
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 128


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": PROMPT, "n": 129},
        {"prompt": [5] * 100_000, "n": 128},
        {"prompt": "a " * 500_000},
        {"prompt": [[5] * 1000] * 128, "n": 128},
        {"prompt": PROMPT, "max_tokens": 1_000_000_000},
    ],
)
def test_what_can_never_be_done_is_not_told_to_try_again(server: TargetServer, body: dict[str, Any]) -> None:
    with server.unharmed():
        answer = server.post("/v1/completions", body)
    assert answer.status_code in (400, 413, 422), answer.text
    assert "retry-after" not in answer.headers
