"""What the recipes' command lines have in common: numbers, figures in a file."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from ssd_serve.base.errors import UserError


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def read_figures(path: Path | None) -> dict[str, Any]:
    """Figures by name of a JSON file; none without a file."""
    if path is None:
        return {}
    try:
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} has no figures: {error}") from error
    if not isinstance(figures, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"{path} has no figures: a JSON object was expected.")
    return figures
