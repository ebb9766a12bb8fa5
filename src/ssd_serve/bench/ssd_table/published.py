"""What others published of asynchronous speculative decoding: one user, tokens a second."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """One pair on one machine: plain, synchronous and asynchronous (SSD), the last with one device more."""

    who: str
    pair: str
    text: str
    ranks: int
    plain: float
    sync: float
    ssd: float

    @property
    def of_plain(self) -> float:
        """SSD against plain decoding."""
        return self.ssd / self.plain

    @property
    def of_sync(self) -> float:
        """SSD against synchronous speculation."""
        return self.ssd / self.sync


AMD = Published("AMD, MI300X", "Llama 3.1 70B / 3.2 1B", "their prompts", 4, 52.32, 138.06, 225.86)
_PAPER = "the paper, H100"
_LLAMA, _QWEN = "Llama 3.1 70B / 3.2 1B", "Qwen3 32B / 0.6B"
TABLE = (
    AMD,
    Published(_PAPER, _LLAMA, "HumanEval", 4, 54.7, 176.0, 283.0),
    Published(_PAPER, _LLAMA, "UltraFeedback", 4, 54.7, 138.0, 215.0),
    Published(_PAPER, _LLAMA, "Alpaca", 4, 54.7, 145.0, 224.0),
    Published(_PAPER, _LLAMA, "GSM8K", 4, 54.7, 188.0, 301.0),
    Published(_PAPER, _QWEN, "mean of these", 4, 88.8, 136.8, 203.8),
)
EQUAL_DEVICES = 1.2
"""AMD: SSD on two devices (one rank and the draft's) against synchronous speculation on two ranks."""
