"""Tests of benchmarks on the devices that flags name.

torch's device `meta`, which holds no numbers, stands in for a GPU. An operator that mixes devices fails there,
and so does reading a result back.
"""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssd_serve.app.cli.main import main
from ssd_serve.base.devices import Device, Machine
from ssd_serve.base.draft_messages import Open
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.base.settings import Settings
from ssd_serve.bench import commands
from ssd_serve.bench.lossless import rig as lossless_rig
from ssd_serve.bench.lossless.proof import requests
from ssd_serve.bench.lossless.random_pair import write_random_pair
from ssd_serve.bench.lossless.rig import Case, LoadedPair, run_case
from ssd_serve.bench.modes import CORES
from ssd_serve.bench.options import Devices, chosen_devices
from ssd_serve.bench.prompts import Prompt
from ssd_serve.bench.rig import EngineMode, Rig
from ssd_serve.bench.runner import Runner
from ssd_serve.cache.kv import KVCache
from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.kernels.attention.backends import AttentionOptions, ChosenAttention
from ssd_serve.kernels.attention.sdpa import SdpaAttention
from ssd_serve.models import load
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from tests.end_to_end.tiny_pair import write_pair

FIRST, SECOND = Device("cuda", (0,)), Device("cuda", (1,))
SAMPLED = SamplingParameters(temperature=0.8, max_tokens=8)
READ_BACK = "Cannot copy out of meta tensor"
COMMANDS = (["modes"], ["lossless", "--quick"], ["kernels", "--conformance"], ["kernels"])


def machine(gpus: int) -> Machine:
    return Machine((0, 1, 2, 3), gpus)


@pytest.mark.parametrize(
    ("gpus", "target", "draft", "found"),
    [
        (0, "cpu", "", CORES),
        (2, "cpu", "", CORES),
        (0, "cpu:1-2", "", Devices(Device("cpu", (1, 2)), Device("cpu", (0,)))),
        (0, "cpu:0", "cpu:2", Devices(Device("cpu", (0,)), Device("cpu", (2,)))),
        (1, "cuda", "", Devices(FIRST, FIRST)),
        (2, "cuda:0", "", Devices(FIRST, SECOND)),
        (2, "cuda:1", "", Devices(SECOND, FIRST)),
        (2, "cuda:0", "cuda:0", Devices(FIRST, FIRST)),
        (1, "cuda:0", "cpu:3", Devices(FIRST, Device("cpu", (3,)))),
    ],
)
def test_default_devices_of_target_and_draft(gpus: int, target: str, draft: str, found: Devices) -> None:
    assert chosen_devices(target, draft, machine(gpus), CORES) == found


@pytest.mark.parametrize(
    ("target", "draft", "flag"), [("cuda:1", "", "--device"), ("cuda", "cuda:1", "--draft")]
)
def test_missing_gpu_is_named_with_its_flag(target: str, draft: str, flag: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag}.* is cuda:1, but this machine has 1 GPU"):
        chosen_devices(target, draft, machine(1), CORES)


@pytest.mark.parametrize("words", [*(["bench", *words] for words in COMMANDS), ["report"]])
def test_every_command_refuses_a_missing_gpu(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "report.tar.gz")] if words == ["report"] else []
    assert main([*words, "--device", "cuda:77", *out]) == SettingsError.exit_code
    assert "--device is cuda:77, but this machine has" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_emulated_devices_are_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "this_machine", lambda: machine(1))
    assert main(["bench", "modes", "--device", "cuda:0", "--setting", "emulated"]) == SettingsError.exit_code
    assert "use --setting real" in capsys.readouterr().err


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return Settings(target=str(target), draft=str(draft), native_kernels=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name that torch uses for the stand-in."""

    def choose(wish: AttentionOptions, cache: KVCache, heads: int, *rest: object) -> ChosenAttention:
        return ChosenAttention("sdpa", SdpaAttention(cache, heads))  # no self-test, which reads numbers

    monkeypatch.setattr(load, "attention_for", choose)
    monkeypatch.setattr(load, "available_memory", lambda device: 1 << 40)
    return "meta"


def test_sampled_round_stays_on_the_gpu_until_tokens_are_read(gpu: str, pair: Settings) -> None:
    rig = Rig(pair, gpu)
    assert rig.real.facts.kernels == "torch"
    engine = rig.engine(EngineMode("ar"))
    assert engine.submit(Submit(1, (5, 6, 7), SAMPLED, 3)) is None
    with pytest.raises(NotImplementedError, match=READ_BACK):
        engine.step()
    grow(rig.core(EngineMode("sd-chain", 3)))
    assert rig.engine(EngineMode("sd-tree", 2, 4, 4), draft_device="cpu").drafters.step_s > 0


def test_synchronous_draft_on_another_device_than_its_target(pair: Settings) -> None:
    rig, runner = Rig(pair), Runner(12)
    prompt = Prompt("def", tuple(rig.tokenizer.encode("def main(")), 3)
    plain = runner.run(rig.engine(EngineMode("ar")), prompt, 0.8)
    for mode in (EngineMode("sd-chain", 2), EngineMode("sd-tree", 2, 4, 4, lookup=True)):
        engine = rig.engine(mode, draft_device="cpu")
        assert runner.run(engine, prompt, 0.8).tokens == plain.tokens
        assert engine.drafters.expansions > 0  # the number of verified ones depends on measured times


def test_drafter_grows_on_the_gpu_until_children_are_read(gpu: str, pair: Settings) -> None:
    settings = pair.model_copy(update={"draft_kv_memory_mb": 64})
    grow(assemble_drafter(settings.engine_config(), "drafter", gpu, None).core)


def grow(core: DrafterCore) -> None:
    """Run a step that ranks with noise, up to the point where its children are read."""
    core.handle(Open(1, 1, (5, 6, 7), (), SAMPLED, 3, root=1))
    with pytest.raises(NotImplementedError, match=READ_BACK):
        core.step()


def test_proof_models_compute_with_their_own_gpu_current(
    gpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    current: list[str] = []

    @contextlib.contextmanager
    def device(name: str) -> Generator[None]:
        current.append(name)
        yield

    def loaded(path: Path, wish: ModelOptions) -> Model:
        current.append(f"loads on {wish.device}")
        return load_model(path, replace(wish, device=gpu))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(lossless_rig, "load_model", loaded)
    folders = write_random_pair("random-llama", tmp_path)
    pair = LoadedPair("random-llama", *folders, "bf16", devices=Devices(FIRST, SECOND))
    assert current == ["cuda:0", "loads on cuda:0", "cuda:1", "loads on cuda:1"]
    submits = [each for each in requests(pair.vocabulary, 8) if each.parameters.temperature][:1]
    with pytest.raises(NotImplementedError, match=READ_BACK):
        run_case(pair, Case("sd", 1, 4), submits)
    assert current[4:] == [gpu]  # the target's; it ended there
