"""A training on two processes takes the steps of a training on one."""

import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as processes
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.decoder import Decoder, Shape
from ssd_serve.recipes.optimiser import Rates
from ssd_serve.recipes.processes import ALONE, TrainingProcess, joined_processes
from ssd_serve.recipes.training import Recipe, Training, run
from tests.end_to_end.tiny_pair import write_model

SHAPE = Shape(50, 16, layers=1, heads=2, kv_heads=1, head=8, intermediate=32, context=64)
RECIPE = Recipe(tokens=600, rows=4, length=10, seed=0, compiled=False)


def plain_loss(model: Decoder, inputs: Tensor) -> Tensor:
    """Compute without autocast, so that only the order of sums differs."""
    logits = model(inputs[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten())


def trained(folder: Path, process: TrainingProcess) -> Training[Decoder]:
    stream = np.random.default_rng(3).integers(0, 50, 400).astype(np.uint16)
    torch.manual_seed(1)
    model = Decoder(SHAPE)
    training = Training(RECIPE, Rates(), model, stream, folder / "model.pt", plain_loss, process)
    run(training, lambda _model: {}, say=lambda _line: None)
    return training


def one_of_two(number: int, folder: Path) -> None:
    """A process of the training; both keep their weights."""
    torch.set_num_threads(1)
    meeting = (folder / "meeting").as_uri()
    processes.init_process_group("gloo", init_method=meeting, rank=number, world_size=2)
    training = trained(folder / str(number), TrainingProcess(number, 2))
    torch.save(training.model.state_dict(), folder / f"{number}.pt")
    processes.destroy_process_group()


@pytest.mark.slow
def test_two_processes_learn_what_one_learns_and_the_first_keeps_it(tmp_path: Path) -> None:
    for name in ("0", "1", "alone"):
        (tmp_path / name).mkdir()
    started = [get_context("spawn").Process(target=one_of_two, args=(n, tmp_path)) for n in (0, 1)]
    for each in started:
        each.start()
    alone = trained(tmp_path / "alone", ALONE)
    for each in started:
        each.join(120)
    assert [each.exitcode for each in started] == [0, 0]
    first, second = (torch.load(tmp_path / f"{number}.pt") for number in (0, 1))
    for name, weight in alone.model.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight, atol=5e-3, rtol=0)
    assert (tmp_path / "0" / "model.pt").exists()
    assert not (tmp_path / "1" / "model.pt").exists()
    assert torch.load(tmp_path / "0" / "model.pt")["tokens"] == alone.tokens


def test_batches_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="3 processes cannot share 4 rows"):
        trained(tmp_path, TrainingProcess(0, 3))


def test_one_that_torchrun_has_not_started_is_alone() -> None:
    with joined_processes("cuda:1") as (process, device):
        assert (process, device) == (ALONE, "cuda:1")
        with process.first_of_all():
            assert process.first


@pytest.mark.slow
def test_the_command_runs_on_two_processes(tmp_path: Path) -> None:
    write_model(tmp_path / "target", seed=1, noise=0.0, layers=2)
    (tmp_path / "text").write_text("".join(f"line {number} of a text\n" for number in range(200)))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ssd_serve"]
    words += ["recipe", "eagle3", "target", "--text", "text", "--layers", "0", "1", "--proposed", "50"]
    words += ["--tokens", "500", "--rows", "2", "--length", "40", "--no-compile", "--work", "work"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exported head") == 1
    assert load_file(tmp_path / "head" / "model.safetensors")["lm_head.weight"].shape == (50, 32)
