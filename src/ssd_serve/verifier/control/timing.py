"""Step times of a model at start: measured on GPUs, expected on CPUs; stored for the next start.

Only costs of the device are stored, nothing that depends on texts. A file is named by everything that the times
depend on: the model's sizes and dtype, the device, the processor and the versions. On GPUs stored times are
checked with a few forwards, and measured again if they are wrong. On CPUs nothing is measured at start. The times
are those of the last session's rounds, else follow from what is known of the processor. The first rounds give their
level. Live rounds correct all of them.
"""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch

from ssd_serve.base.cost import FIRST_ROUNDS, CostTable, Timing
from ssd_serve.base.devices import Device, processor_name
from ssd_serve.base.logs import Logger
from ssd_serve.base.stored import read_stored, stored_path, write_stored
from ssd_serve.models.interface import Model, ModelFacts
from ssd_serve.models.roof import Roof, expected_roof, roof_dtype, stored_roof
from ssd_serve.models.warmup import LONG_CONTEXT, SHORT_CONTEXT, measure_steps

_TRIES = 3
_MAX_OFF = 1.5
"""Stored times that differ by more than this factor from a few forwards now are measured again."""
_FEWEST_ROUNDS = 16
"""Live rounds from which a table is stored. It is stored again whenever their number has doubled."""
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Timings(msgspec.Struct):
    timings: list[tuple[_Count, Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(gt=0)]]]
    """Rows, context and seconds."""
    date: str = ""
    """Day of the measurement."""
    format: Literal[1] = 1


class TimingFiles:
    """Files of timings in `folder`."""

    def __init__(self, folder: Path, log: Logger) -> None:
        self._folder = folder
        self._log = log

    def stored(self, identity: Mapping[str, object]) -> list[Timing]:
        """Return the timings that an earlier session stored; empty if there are none."""
        stored = read_stored(self._path(identity), _Timings)
        return [Timing(*each) for each in stored.timings] if stored is not None else []

    def store(self, identity: Mapping[str, object], timings: Sequence[Timing]) -> None:
        """Store timings for the next start."""
        content = [(each.rows, each.context, each.seconds) for each in timings]
        today = datetime.now(UTC).date().isoformat()
        write_stored(self._path(identity), _Timings(content, today), self._log)

    def _path(self, identity: Mapping[str, object]) -> Path:
        return stored_path(self._folder, "cost", identity)

    def timings(
        self,
        identity: Mapping[str, object],
        measure: Callable[[], Sequence[Timing]],
        probe: Callable[[], Sequence[Timing]],
    ) -> Sequence[Timing]:
        """Return stored timings if `probe` agrees with them, else the result of `measure`.

        A measurement is stored if `probe` agrees with it afterwards. If it never does, other work disturbs the
        machine: the least of all times is returned, and the next start measures again.
        """
        known = self.stored(identity)
        if known and _agree(known, probe()):
            return known
        found: list[Timing] = []
        for _ in range(_TRIES):
            measured, probed = measure(), probe()
            if _agree(measured, probed):
                self.store(identity, measured)
                return measured
            found = _least((*found, *measured, *probed))
        self._log.debug("step times are not remembered: other work disturbs this machine")
        return found


class StepTimes:
    """Step times of one model on each of its devices."""

    def __init__(
        self,
        model: Model,
        files: TimingFiles,
        folder: Path,
        report: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """`report` receives the progress of measurements."""
        self._report = report
        self._model = model
        self._files = files
        self._folder = folder
        self._measured: dict[Device, Sequence[Timing]] = {}
        self._live: list[tuple[dict[str, object], CostTable]] = []
        self._stored_at = 0
        self.guessed = False
        """True if times follow from figures of the processor alone: no round has been timed."""

    def table(self, device: Device) -> CostTable:
        """Return a new table: of measured times on GPUs, of stored or expected ones on CPUs, which take their level
        from the first rounds."""
        if device.kind != "cpu":
            if device not in self._measured:
                name, model = identity(self._model, str(device)), self._model
                found = self._files.timings(
                    name, lambda: _measure(model, self._report), lambda: _probe(model)
                )
                self._measured[device] = found
            return CostTable(self._measured[device])
        facts, cores = self._model.facts, len(device.indices) or torch.get_num_threads()
        name = cpu_identity(
            facts.name,
            layers=facts.layers,
            hidden=facts.hidden,
            vocabulary=facts.vocabulary,
            dtype=facts.dtype,
            cores=cores,
        )
        stored = self._files.stored(name)
        self.guessed = self.guessed or not stored
        if not stored:
            dtype = roof_dtype(facts.dtype)
            roof = stored_roof(self._folder, dtype, cores) or expected_roof(cores, dtype)
            stored = expected_timings(facts, roof)
        table = CostTable(stored, first_rounds=FIRST_ROUNDS)
        for _, other in self._live:
            other.same_source = (*other.same_source, table)
        table.same_source = [other for _, other in self._live]
        self._live.append((name, table))
        return table

    def store(self) -> None:
        """Store what live rounds on CPUs have corrected, for the next start and for `ssd plan`."""
        rounds = sum(table.rounds for _, table in self._live)
        if rounds < _FEWEST_ROUNDS or rounds < 2 * self._stored_at:
            return
        self._stored_at = rounds
        for name, table in sorted(self._live, key=lambda each: each[1].rounds):
            if table.rounds >= _FEWEST_ROUNDS:
                self._files.store(name, table.timings())


def _least(timings: Iterable[Timing]) -> list[Timing]:
    """Return the least time of each kind: disturbances only lengthen a forward."""
    found: dict[tuple[int, int], Timing] = {}
    for each in timings:
        key = each.rows, each.context
        found[key] = min(each, found.get(key, each), key=lambda timing: timing.seconds)
    return list(found.values())


def _agree(known: Sequence[Timing], probed: Sequence[Timing]) -> bool:
    """Return whether every probed time is known and about the same."""
    seconds = {(each.rows, each.context): each.seconds for each in known}
    return all(
        1 / _MAX_OFF < each.seconds / seconds.get((each.rows, each.context), float("inf")) < _MAX_OFF
        for each in probed
    )


ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_LONG_ROWS = (1, 8, 32)
_PROBED_ROWS = (1, 8)
_CONTEXTS = (SHORT_CONTEXT, LONG_CONTEXT)
_LEAST_S, _PROBE_S = 0.3, 0.05
"""Minimum seconds of each measurement and of a probe. A device with short steps is timed for more of them:
a busy moment is as long as many steps."""
_MOST_S = 2.0
"""Maximum seconds of each measurement: a busy moment is short compared with several long steps."""


def measure_cost(model: Model) -> CostTable:
    """Time forwards of some rows after a short context, and of a few after a long one."""
    return CostTable(_measure(model))


def cpu_identity(
    name: str, *, layers: int, hidden: int, vocabulary: int, dtype: str, cores: int
) -> dict[str, object]:
    """Return what step times on CPUs depend on, as far as it is known before a model is loaded."""
    return {
        "name": name,
        "sizes": (layers, hidden, vocabulary),
        "dtype": dtype,
        "cores": cores,
        "processor": processor_name(),
        "torch": torch.__version__,
        "ssd-serve": version("ssd-serve"),
    }


def expected_timings(facts: ModelFacts, roof: Roof) -> list[Timing]:
    """Return what forwards will take by the roof of the cores: no forward is run."""
    return [
        Timing(
            rows,
            context,
            roof.product_s(facts.weight_bytes, rows)
            + roof.layers_s(facts.layers, rows)
            + context * facts.kv_bytes_per_slot / roof.bandwidth,
        )
        for rows in ROWS
        for context in ((0, LONG_CONTEXT) if rows in _LONG_ROWS else (0,))
    ]


def identity(model: Model, device: str) -> dict[str, object]:
    """Return everything that step times depend on."""
    return {
        **asdict(model.facts),
        "device": device,
        "step": type(model).__name__,  # a wrapper may change the model's times
        "processor": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else "",
        "torch": torch.__version__,
        "ssd-serve": version("ssd-serve"),
    }


def _measure(model: Model, report: Callable[[str], None] = lambda _text: None) -> list[Timing]:
    timed = partial(measure_steps, model, least_s=_LEAST_S, most_s=_MOST_S)
    short = timed(ROWS, report=lambda text: report(f"short contexts, {text}"))
    longer = timed(_LONG_ROWS, _CONTEXTS, report=lambda text: report(f"long contexts, {text}"))
    return _least((*_timings(short), *_timings(longer)))


def _probe(model: Model) -> list[Timing]:
    return _least(
        _timings(measure_steps(model, _PROBED_ROWS, _CONTEXTS, 2, least_s=_PROBE_S, most_s=_LEAST_S))
    )


def _timings(seconds: Mapping[tuple[int, int], Sequence[float]]) -> list[Timing]:
    return [Timing(*key, each) for key, repeats in seconds.items() for each in repeats]
