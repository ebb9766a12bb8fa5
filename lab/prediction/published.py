"""What others have published of the pair Llama 3.1 70B / Llama 3.2 1B at batch 1 and temperature 0; nothing
of it was measured by this project.

MI300X: AMD's ROCm blog, "Enabling Speculative Speculative Decoding on MI300X", 2026-05-29. H100: arXiv
2603.03251, means over its four sets of prompts. Both run the paper's engine, and are taken to run it as its
README says (github.com/tanishqkumar/ssd): a chain of 6 drafts in turns with the target, drafted by 7 forwards
of which the last only fills the cache; or beside it a table of outcomes, chains of 7, 3 guesses a place, and
a chain drafted on the spot after a miss. Prompts of at most 128 tokens, 512 new ones.
"""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["plain", "chain", "table"]

CHAIN = 6
"""Drafts a round, in turns with the target."""
TABLE = 7
"""Drafts of each prepared outcome, beside it."""
FAN_OUT = 3
CONTEXT = 384
"""The mean of a request: 128 tokens of prompt and half of its 512 new ones."""

EXPECTED_ACCEPTANCE = 0.65
"""Share of drafted tokens that are accepted when all is well: "~65% expected" (AMD-Ecosystem/flashinfer, pull
request 214, by an author of the blog)."""
INFERRED_TOKENS = 4.08
"""Tokens a round of the chain of 6, as this project's notes have it. Nobody has published it: it follows from
225.86 tokens/s if table rounds took as long as plain steps and nothing ever missed."""


@dataclass(frozen=True, slots=True)
class Point:
    """Tokens a second on `devices` that the target is split over; a table's drafter has one more."""

    device: str
    mode: Mode
    devices: int
    tokens_per_s: float


POINTS = (
    Point("MI300X", "plain", 1, 21.41),
    Point("MI300X", "plain", 2, 32.87),
    Point("MI300X", "plain", 4, 52.32),
    Point("MI300X", "chain", 2, 89.56),
    Point("MI300X", "chain", 4, 138.06),
    Point("MI300X", "table", 1, 107.59),
    Point("MI300X", "table", 2, 154.07),
    Point("MI300X", "table", 4, 225.86),
    Point("H100", "plain", 4, 54.7),
    Point("H100", "chain", 4, 161.75),
    Point("H100", "table", 4, 255.75),
)


def published(device: str, mode: Mode, devices: int) -> Point:
    """The figure of this."""
    return next(each for each in POINTS if (each.device, each.mode, each.devices) == (device, mode, devices))
