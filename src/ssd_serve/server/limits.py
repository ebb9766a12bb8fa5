"""Limits on requests, connections and bodies."""

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
"""Limit for all lists of one body together."""
MAX_VALUES = 32_768
"""JSON values of one body besides token ids; MAX_MESSAGES messages have fewer."""
MAX_TEXT_BYTES = 16 * 2**20
"""Limit for all strings of one body in Python's memory; one wide character makes its string 4 times as large."""
MAX_TOOLS = 256
"""Tools of a request, or calls of a message."""
MAX_GRAMMAR_CHARACTERS = 65_536
"""Limit for a grammar of structured output."""
MAX_UNKNOWN_FIELDS = 64
"""Per JSON object."""
MAX_LABELS = 16
MAX_LABEL_NAME_CHARACTERS = 64
MAX_LABEL_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a deployment may want to change."""

    max_body_bytes: int = 8 * 1024 * 1024
    body_timeout_s: float = 30.0
    """A slower body is answered 408."""
    inline_body_bytes: int = 16 * 1024
    """Longer bodies are parsed in a thread, and count towards `max_bodies_bytes`."""
    max_bodies_bytes: int = 64 * 1024 * 1024
    """Bytes of all bodies that are being received or turned into prompts."""
    body_grace_s: float = 5.0
    """A body that arrives for longer is evicted when `max_bodies_bytes` is reached."""
    max_sequences: int = 128
    """Prompts x n of one request."""
    inline_characters: int = 4096
    """Longer texts are tokenized in a thread."""
    tokenize_threads: int = 2
    keep_alive_s: int = 75
    """Idle connections stay open longer than the usual 60 s of proxies, so that the proxy closes them."""
    head_s: float = 10.0
    """Time for a request's head, from its first byte; of the first request, from the connection's start."""
    unread_s: float = 60.0
    min_read_bytes: int = 32 * 1024
    """A client with unread output is disconnected unless it reads so much in each `unread_s`."""
    ping_s: float = 15.0
    """A stream without events for so long sends a comment, so that proxies keep it open."""
    engine_silence_s: float = 60.0
    """An engine without reports for so long counts as hanging."""
    hold_s: float = 30.0
    """New requests wait for so long for the replacement of a dead engine; later they get 503."""
