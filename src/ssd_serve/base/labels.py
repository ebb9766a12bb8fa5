"""Names that processes give themselves and others write into logs and figures: short and printable."""

import hashlib

LONGEST_LABEL = 128
"""Bytes."""
_DIGEST = 12


def is_label(text: str) -> bool:
    """Whether a text may be a name; an empty one may."""
    return len(text) <= LONGEST_LABEL and len(text.encode()) <= LONGEST_LABEL and text.isprintable()


def as_label(text: str) -> str:
    """The text itself where it may be a name, else its end and a digest of it, so that equal texts stay
    equal."""
    if is_label(text):
        return text
    end = "".join(sign for sign in text[-64:] if sign.isascii() and sign.isprintable())
    return f"{end}#{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]}"
