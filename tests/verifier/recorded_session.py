"""A session with all that makes sessions differ, and its recording."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.base.draft_messages import (
    Close,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.base.engine_settings import Mode
from ssd_serve.kernels.batch import Batch
from ssd_serve.base.logs import get_logger
from ssd_serve.base.messages import (
    RequestOptions,
    Abort,
    Choice,
    Finish,
    SamplingParameters,
    ServerMessage,
    Submit,
    SubmitChoices,
)
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel
from ssd_serve.sampling.choice import Sampled, sample
from ssd_serve.base.settings import Settings
from ssd_serve.verifier.assembly import assemble_verifier
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.environment import Environment, MeasuredStart
from ssd_serve.verifier.observer import Turn
from ssd_serve.base.cost import Timing
from ssd_serve.verifier.replay.recording import SessionRecorder
from tests.end_to_end.tiny_pair import write_pair

LOG = get_logger("test", "error")

SLOTS = 220


class Scarce(WrappedModel):
    """Has too little memory for a few forwards."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._forwards = 0

    def forward(self, batch: Batch) -> ForwardResult:
        self._forwards += 1
        if self._forwards % 50 == 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._model.forward(batch)


def small(recorder: SessionRecorder) -> Environment:
    """A machine with little memory, where requests are preempted, and with cheap rows, so that guesses are
    verified however busy the machine really is."""
    environment = recorder.environment
    cheap = [Timing(1, 64, 0.005), Timing(64, 64, 0.0051)]
    return dataclasses.replace(
        environment,
        measured=MeasuredStart(SLOTS, {"cpu": cheap}, {}),
        model=lambda model: environment.model(Scarce(model)),
    )


def scarce(calls: Callable[..., Sampled]) -> Callable[..., Sampled]:
    """`calls` on a device that has too little memory now and then."""
    count = itertools.count(1)

    def called(*args: Any, **named: Any) -> Sampled:
        if next(count) % 70 == 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return calls(*args, **named)

    return called


@dataclass(frozen=True)
class Recorded:
    """A session that was recorded, and what happened in it."""

    settings: Settings
    folder: Path
    rounds: int
    tokens: int
    preemptions: int
    prefix_hits: int
    accepted: int
    shortages: int


def submits() -> list[Submit]:
    """Requests of one beginning and several kinds, some of them of a user who shares it with nobody else."""
    source = random.Random(3)
    beginning = tuple(source.randrange(1, 250) for _ in range(40))
    kinds = (
        SamplingParameters(temperature=0.0, max_tokens=60, ignore_eos=True),
        SamplingParameters(temperature=1.0, max_tokens=50),
        SamplingParameters(temperature=0.7, top_p=0.9, max_tokens=40, logprobs=2),
        SamplingParameters(temperature=1.0, presence_penalty=0.5, max_tokens=30, prompt_logprobs=0),
    )
    return [
        Submit(
            number,
            beginning + tuple(source.randrange(1, 250) for _ in range(number)),
            kinds[number % len(kinds)],
            number,
            options=RequestOptions(salt=b"anna" * (number % 3 == 2)),
        )
        for number in range(12)
    ]


def drafter(engine: Engine, settings: Settings) -> tuple[MemoryChannel, Callable[[], None]]:
    """A drafter that sometimes says its things late: its end of the channel, and what lets it work, which
    being waited for does too."""
    made = assemble_drafter(settings, "d0", "cpu", None)
    mine, its = memory_pair(second_to_first=lambda index, _: (2,) if index % 5 == 4 else (0,))
    its.send(made.hello)

    def work() -> None:
        for message in its.receive():
            if isinstance(message, Open | Outcome | Close | Resync | Pause):
                for reply in made.core.handle(message):
                    its.send(reply)
        for growth in made.core.step():
            its.send(growth)

    mine.on_wait = work
    engine.drafters.connect(mine)
    return its, work


def ask(engine: Engine, what: ServerMessage | Turn) -> None:
    """Ask an engine for something as the process does."""
    engine.observer.asked(what)
    if isinstance(what, Turn):
        {Turn.STEP: engine.step, Turn.DRAIN: engine.drain, Turn.BEAT: engine.drafters.beat}[what]()
    else:
        engine.ask(what)


def live(engine: Engine, settings: Settings) -> None:
    """A session: requests come while others run, two go away, the drafter leaves and another one comes, and
    so does somebody who talks nonsense."""
    its, work = drafter(engine, settings)
    ask(engine, Turn.DRAIN)
    waiting = submits()
    step = 0
    while engine.busy or waiting:
        if waiting and step % 4 == 0:
            first = waiting.pop(0)
            choices = Choice(first.request, 1), Choice(first.request + 100, 2, (5, 6))
            ask(engine, SubmitChoices(first.prompt, first.parameters, choices))
        if step == 21:
            ask(engine, Abort(2))
        if step == 33:
            ask(engine, Finish(4))
        if step == 30:
            its.close()
        if step == 35:
            stranger, nonsense = memory_pair()
            engine.drafters.connect(stranger, stranger=True, peer="10.0.0.7")
            nonsense.send_raw(b"\xff" * 8)
        if step == 40:
            its, work = drafter(engine, settings)
        ask(engine, Turn.STEP)
        work()
        ask(engine, Turn.BEAT)
        step += 1
    engine.observer.rests()


def record(folder: Path) -> Recorded:
    """A session below the folder, which holds what makes sessions differ."""
    target, draft = write_pair(folder)
    settings = Settings(
        target=str(target),
        draft=str(draft),
        mode=Mode.SSD,
        cache_dir=folder / "cache",
        native_kernels=False,
        max_running=6,
        speculation_may_stop=False,
        record=folder / "sessions",
        hf_token="sesame",
    )
    recorder = SessionRecorder(folder / "sessions", 1 << 26, LOG)  # more than the slowest machine says
    verifier = assemble_verifier(settings, lambda _: None, log=LOG, environment=small(recorder))
    recorder.begin(settings, verifier)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssd_serve.verifier.round.sample", scarce(sample))
        live(verifier.engine, settings)
    engine, figures = verifier.engine, verifier.engine.totals.figures
    prefix = engine.scheduler.prefix
    return Recorded(
        settings,
        recorder.path,
        engine.clocked.rounds,
        figures.tokens,
        engine.scheduler.preemptions,
        prefix.hits if prefix else 0,
        figures.accepted,
        engine.shortage.count,
    )
