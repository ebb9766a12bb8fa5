"""A teacher on a pretended GPU: its outputs lie there and equal those on the CPU."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from ssd_serve.kernels.attention import backends
from ssd_serve.kernels.attention.backends import AttentionOptions
from ssd_serve.models.load import ModelOptions
from ssd_serve.recipes import teacher
from ssd_serve.recipes.teacher import Teacher, embedding_of, head_shape
from tests.end_to_end.tiny_pair import write_model
from tests.pretended_device import DEVICE, pretended_device

PLACES: tuple[tuple[str, AbstractContextManager[object]], ...] = (
    ("cpu", nullcontext()),
    (DEVICE, pretended_device()),
)


@torch.inference_mode()
def test_what_is_learned_from_lies_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "failure_of", lambda *_: "")  # tried elsewhere
    monkeypatch.setattr(teacher, "ModelOptions", partial(ModelOptions, attention=AttentionOptions("sdpa")))
    folder = tmp_path / "target"
    write_model(folder, seed=1, noise=0.0, layers=2)
    outputs = list[torch.Tensor]()
    for device, there in PLACES:
        with there:
            target = Teacher(folder, 40, (0, 1), device, dtype="fp32")
            lesson = target.read(torch.arange(40).view(2, 20).to(device))
            assert lesson.features is not None
            found = (lesson.logits, lesson.features, embedding_of(folder, head_shape(folder), target.device))
            assert {each.device for each in found} == {torch.device(device)}
            outputs += [each.cpu() for each in found]
    torch.testing.assert_close(outputs[:3], outputs[3:], atol=1e-4, rtol=1e-4)
