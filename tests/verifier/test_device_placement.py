"""Tests of an engine on a simulated GPU, built from settings: its tokens equal those on the CPU."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from msgspec import structs

from ssd_serve.base.engine_config import Mode
from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.base.settings import Settings
from ssd_serve.kernels.attention import backends
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models import load
from ssd_serve.models.architectures.dense.decoder import DenseDecoder
from ssd_serve.models.interface import Inputs, ModelFacts
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.verifier.assembly import assemble_verifier
from ssd_serve.verifier.control import timing as startup_benchmark
from ssd_serve.verifier.request import Request, TokenSequence
from ssd_serve.verifier.round import RequestStep, Rounds
from ssd_serve.verifier.scheduler import ScheduledChunk
from tests.end_to_end.tiny_pair import write_pair
from tests.fakes import EOS, VOCABULARY, FakeModel, Output, run
from tests.models.tape import Tape, recording_kernels
from tests.pretended_device import DEVICE, pretended_device

PARAMETERS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=1.0, logprobs=2, prompt_logprobs=1),
    SamplingParameters(temperature=0.8, top_p=0.9, frequency_penalty=0.3),
)


def outputs(
    device: str,
    there: Callable[[], AbstractContextManager[object]],
    folder: Path,
    backend: Literal["sdpa", "triton"] = "sdpa",
    assembled: Callable[[], None] = lambda: None,
    prompt: int = 55,
    tokens: int = 20,
    context: int = 160,
) -> list[Output]:
    settings = Settings(
        target=str(folder / "target"),
        draft=str(folder / "draft"),
        mode=Mode.SD,
        target_device=device,
        dtype="fp32",
        tree_decode_backend=backend,
        cache_dir=folder / "cache",
        native_kernels=False,
        context=context,
        max_running=4,
        speculation_may_stop=False,
    )
    parameters = [structs.replace(each, max_tokens=tokens) for each in PARAMETERS]
    submits = [
        Submit(number, tuple(range(5, 5 + prompt + number)), each, 7 + number)
        for number, each in enumerate(parameters if backend == "sdpa" else parameters[:2])
    ]
    with there():
        verifier = assemble_verifier(settings.engine_config(), lambda _: None)
        assert verifier.facts.device == device
        assembled()
        found = run(verifier.engine, submits)
    return [found[number] for number in sorted(found)]


@pytest.mark.slow
def test_device_out_of_memory_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "failure_of", lambda *_: "")
    emptied: list[bool] = []
    forwards, run_decoder, short = 0, DenseDecoder.run, 0

    def limited(decoder: DenseDecoder, inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        nonlocal forwards, short
        forwards += 1
        if forwards % 9 == 4:
            short += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return run_decoder(decoder, inputs)

    def run_out() -> None:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
        monkeypatch.setattr(DenseDecoder, "run", limited)

    write_pair(tmp_path)
    expected = outputs("cpu", nullcontext, tmp_path)
    found = outputs(DEVICE, pretended_device, tmp_path, assembled=run_out)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert sum(each.figures.accepted for each in found) > 0
    assert short == len(emptied) > 0


@pytest.mark.slow
def test_captured_forwards_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of target and draft model are captured once for each shape, and replayed after that."""
    monkeypatch.setattr(backends, "failure_of", lambda *_: "")
    tape = Tape()
    monkeypatch.setattr(load, "DeviceGraphCapture", lambda _: tape)
    monkeypatch.setattr(startup_benchmark, "ROWS", (1, 8))  # Triton's interpreter is slow
    monkeypatch.setattr(startup_benchmark, "_LONG_ROWS", (1,))

    @contextmanager
    def there() -> Generator[None]:
        with pretended_device(), recording_kernels(tape, monkeypatch):
            yield

    write_pair(tmp_path)
    expected = outputs("cpu", nullcontext, tmp_path, prompt=6, tokens=6, context=24)
    found = outputs(DEVICE, there, tmp_path, "triton", prompt=6, tokens=6, context=24)
    assert [each.tokens for each in found] == [each.tokens for each in expected[: len(found)]]
    assert tape.replays > tape.runs > 1


class OnDevice(FakeModel):
    @property
    def facts(self) -> ModelFacts:
        return replace(super().facts, device=DEVICE)


class RecordingNoise(NoiseRows):
    """Noise source that records the requested spans."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, 64)
        self.spans: list[tuple[int, int, int]] = []

    def lines(self, spans: Sequence[tuple[int, int, int]]) -> list[list[int]] | None:
        self.spans += spans
        return super().lines(spans)


def test_noise_is_requested_with_the_forward_of_a_device(native: NativeLibrary) -> None:
    request = Request(
        0, SamplingParameters(), 9, 3, TokenSequence((1, 2, 3)), frozenset(), None, 64, VOCABULARY
    )
    noise = RecordingNoise()
    flight = Rounds(OnDevice(8), noise, (EOS,), native).launch(
        [RequestStep(ScheduledChunk(request, (0, 1, 2), final=True))]
    )
    assert noise.spans == [(9, 3, 1)]
    assert flight.rows == 3
