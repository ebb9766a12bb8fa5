"""Bounds on what one client may ask for. Numbers only; the places that check them import this."""

from dataclasses import dataclass

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_STOP_IDS = 256
MAX_LOGIT_BIAS = 2048
MAX_ALLOWED_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_SALT_CHARACTERS = 256
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKEN_IDS = 2**21
"""In one body, all lists together."""
MAX_VALUES = 32_768
"""Of any kind in one body, besides token ids: as many messages as there may be have fewer."""
MAX_TOOLS = 256
"""That a request describes, or that a message calls."""
MAX_GRAMMAR_CHARACTERS = 65_536
"""Of what an output must match."""
MAX_UNKNOWN_FIELDS = 64
"""In one object of a body."""
MAX_LABELS = 16
MAX_LABEL_NAME_CHARACTERS = 64
MAX_LABEL_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a deployment may want to change."""

    max_body_bytes: int = 8 * 1024 * 1024
    body_timeout_s: float = 30.0
    """A client that is slower to send its body is answered 408."""
    inline_body_bytes: int = 16 * 1024
    """Longer bodies are read off the event loop, and take part in the next bound."""
    max_bodies_bytes: int = 64 * 1024 * 1024
    """All bodies together that are being received or turned into prompts."""
    body_grace_s: float = 5.0
    """A body that is being received for longer makes room for others where there is none."""
    max_sequences: int = 128
    """Prompts x n of one request."""
    inline_characters: int = 4096
    """Longer texts are tokenised off the event loop."""
    tokenising_at_once: int = 2
    """Threads that tokenise at the same time."""
    keep_alive_s: int = 75
    """Idle connections stay open for so long: more than the 60 s of usual proxies, so that they end them."""
    head_s: float = 10.0
    """From a connection's first moment, or from the first byte of a later request, to the end of its head."""
    unread_s: float = 60.0
    min_read_bytes: int = 32 * 1024
    """A client that leaves unread what it was sent takes at least so much in each `unread_s`, or is left."""
    ping_s: float = 15.0
    """A stream with nothing to say for so long sends a comment, so that proxies keep it open."""
    engine_silence_s: float = 60.0
    """A verifier that says nothing for so long is reported as hanging."""
    hold_s: float = 30.0
    """New requests wait for an engine that was lost no longer ago than this; later they are told to retry."""
