"""Strength of the key that the processes of a cluster share. Free of pydantic, as workers are."""

STRONG_KEY = "16 characters or more that cannot be guessed, such as `openssl rand -hex 32` prints"
_SHORTEST_KEY, _MIN_SIGNS = 16, 8


def is_weak(key: str) -> bool:
    """True if a cluster key is too short or too regular to be random."""
    return len(key) < _SHORTEST_KEY or len(set(key)) < _MIN_SIGNS
