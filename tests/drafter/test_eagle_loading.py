"""An EAGLE-3 head as its drafter loads it."""

import dataclasses
from pathlib import Path

import pytest
import torch

from ssd_serve.base.draft_messages import Features, Open
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.settings import Settings
from ssd_serve.cache.vectors import as_bytes
from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.hub import embedded_folder
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel
from ssd_serve.recipes.checkpoint import read_checkpoint, shape_of
from ssd_serve.recipes.eagle3 import EagleHead
from ssd_serve.recipes.heads import export_head


class Counted(WrappedModel):
    """Counts the rows of all forwards and those of them that had a vector."""

    rows: int = 0
    with_vectors: int = 0

    def __init__(self, model: Model, role: str, argument: str) -> None:
        super().__init__(model)
        self.wrapped_by = (role, argument)

    def forward(self, batch: Batch) -> ForwardResult:
        assert self.wrapped_by == ("draft", "here")
        Counted.rows += batch.rows
        Counted.with_vectors += 0 if batch.vectors is None else len(batch.vectors)
        return self._model.forward(batch)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head of the embedded target."""
    torch.manual_seed(0)
    shape = dataclasses.replace(shape_of(read_checkpoint(embedded_folder("target")).config), layers=1)
    folder = tmp_path_factory.mktemp("head") / "head"
    export_head(EagleHead(shape, torch.arange(0, 4096, 64), (0, 2, 4), 1), folder)
    return folder


def test_the_model_wrapper_applies_to_heads(head: Path) -> None:
    settings = Settings(
        draft=str(head),
        dtype="fp32",
        native_kernels=False,
        draft_kv_memory_mb=16,
        draft_width=4,
        model_wrapper=f"{__name__}:Counted:here",
    )
    drafter = assemble_drafter(settings.engine_config(), "d0", "cpu", None)
    assert Counted.rows == Counted.with_vectors > 0, "a step is measured"
    before = Counted.rows
    drafter.core.handle(Open(1, 1, (5, 6, 7), (), SamplingParameters(temperature=0.0), 0, root=1))
    drafter.core.handle(Features(1, 1, 0, 3 * 384, as_bytes(torch.randn(2, 3 * 384))))
    (growth,) = drafter.core.step()
    assert growth.tokens
    assert Counted.rows == Counted.with_vectors > before
