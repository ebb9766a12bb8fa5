"""What is told of features on their way to a drafter. Knows the shape of the result, not how it is found."""

from collections.abc import Mapping
from typing import Any

from ssd_serve.bench.tables import text_table

FEATURE_HEAD = (
    "rows go by",
    "verifier computes",
    "before the next forward",
    "drafter computes",
    "in time",
    "prompt is there after",
    "verifier computes for it",
)


def feature_table(result: Mapping[str, Any]) -> str:
    """As text for a terminal."""
    return text_table(FEATURE_HEAD, feature_lines(result))


def feature_lines(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A line for each way."""
    lines: list[tuple[str, ...]] = []
    for way, found in result["ways"].items():
        of_round, of_prompt = found["rounds"], found["prompt"]
        lines.append(
            (
                way,
                f"{of_round['verifier_cpu_ms']:.1f} ms",
                f"{of_round['held_ms']:.1f} ms",
                f"{of_round['reader_cpu_ms']:.1f} ms",
                f"{of_round['read_whole']} of {of_round['rounds']}",
                f"{of_prompt['seconds']:.2f} s",
                f"{of_prompt['verifier_cpu_s']:.2f} s",
            )
        )
    return lines
