"""Tests of requests with many expensive choices, during a stream of another client."""

from typing import Any

PROMPT = "import os\n\n\ndef walk(path):\n"
VOCABULARY = 1000
"""Below the vocabulary of the served model."""

OPTIONS: dict[str, dict[str, Any]] = {
    "two thousand biases": {"logit_bias": {str(token): 0.5 for token in range(VOCABULARY)}},
    "many allowed tokens": {"allowed_token_ids": list(range(VOCABULARY))},
    "many bad words": {"bad_words": ["a" * (1 + word) for word in range(128)]},
    "twenty log-probabilities of every token": {"logprobs": 20},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "every truncation": {"top_k": 900, "top_p": 0.99, "min_p": 0.001},
}
