"""What a draft source is loaded for, and what its drafter must know of it once it is.

Knows settings and folders; not how anything is guessed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.drafter.sources.contract import DraftSource
from ssd_serve.drafter.sources.reading_time import measure_reading
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.base.logs import Logger
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import Model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.models.warmup import measure_steps
from ssd_serve.base.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrder:
    """A source that is to be loaded on `device`. `folder` has the draft's files; None: it is a name that
    needs none. `widths` are numbers of nodes in a step whose times must be known; `layers`: how many of a
    model's layers draft, the first ones, if not all."""

    settings: Settings
    folder: Path | None
    device: str
    native: NativeLibrary | None
    log: Logger
    widths: Sequence[int]
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts that a source can draft. The verifier compares them with its own."""

    tokenizer: str
    """Hash of its vocabulary."""
    vocabulary: int
    context: int
    ends: tuple[int, ...]
    """Ids that end a text."""
    spelled: Callable[[], str] | None = None
    """tokenizer.json, where grammars can be followed by it."""


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A source that is ready. `seconds` are those of a step of each width; `features` are the target's layers
    whose outputs it reads. `text_s` are the seconds of a token of a new text that it reads, without them a
    row's of the widest step."""

    source: DraftSource
    texts: Texts
    seconds: Mapping[int, float]
    features: tuple[int, ...] = ()
    text_s: float | None = None

    @property
    def reading_s(self) -> float:
        """Seconds for which a token of a new text is read, as far as that is known."""
        return _widest_row_s(self.seconds) if self.text_s is None else self.text_s


def measure_draft(model: Model, widths: Sequence[int]) -> tuple[dict[int, float], float]:
    """Seconds of a step of each width, and those for which a token of a new text is read."""
    seconds = {rows: min(each) for (rows, _), each in measure_steps(model, widths).items()}
    return seconds, measure_reading(model, _widest_row_s(seconds))


def _widest_row_s(seconds: Mapping[int, float]) -> float:
    """Of a step of the most rows, those of one."""
    widest = max(seconds)
    return seconds[widest] / widest


def texts_of_target(settings: Settings) -> Texts:
    """Those of the target, for sources that have no model of their own."""
    return texts_of(find_model(settings, settings.target, "target"), settings.context)


def texts_of(folder: Path, context: int | None) -> Texts:
    """Those of a model in this folder, of at most so many tokens."""
    config = load_description(folder).config
    most = min(context or config.context, config.context)
    tokenizer, ends = Tokenizer(folder), config.eos_token_ids
    return Texts(tokenizer.vocabulary_hash(), config.vocabulary, most, ends, tokenizer.to_json)
