"""Bounds on what one client may ask for. Numbers only; the places that check them import this."""

from dataclasses import dataclass

LEAST_TEMPERATURE = 1e-6
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_STOP_IDS = 256
MAX_LOGIT_BIAS = 2048
MAX_ALLOWED_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_SALT_CHARACTERS = 256
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a deployment may want to change."""

    max_body_bytes: int = 8 * 1024 * 1024
    body_timeout_s: float = 30.0
    """A client that is slower to send its body is answered 408."""
    max_sequences: int = 128
    """Prompts x n of one request."""
    inline_characters: int = 4096
    """Longer texts are tokenised off the event loop."""
    tokenising_at_once: int = 2
    """Threads that tokenise at the same time."""
    keep_alive_s: int = 75
    """Idle connections stay open for so long: more than the 60 s of usual proxies, so that they end them."""
    ping_s: float = 15.0
    """A stream with nothing to say for so long sends a comment, so that proxies keep it open."""
    engine_silence_s: float = 60.0
    """A verifier that says nothing for so long is reported as hanging."""
    hold_s: float = 30.0
    """New requests wait for an engine that was lost no longer ago than this; later they are told to retry."""
