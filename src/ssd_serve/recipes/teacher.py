"""The target as a teacher: logits and layer outputs of whole texts, computed by the engine's own model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.dense.config import DecoderConfig
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.heads.load import target_embedding
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.recipes.decoder import Shape


@dataclass(frozen=True)
class Lesson:
    """A target's output for texts: logits [texts, length, vocabulary], and the concatenated outputs of the
    layers that were asked for [texts, length, layers * hidden], if any."""

    logits: Tensor
    features: Tensor | None = None


class Teacher:
    """A loaded target with KV slots for `places` tokens; it returns the outputs of `layers`."""

    def __init__(
        self,
        folder: Path,
        places: int,
        layers: Sequence[int] = (),
        device: str = "cpu",
        dtype: str = "auto",
        native: NativeLibrary | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._layers = tuple(layers)
        wish = ModelOptions(
            device=device, dtype=dtype, slots=places, context=None, native=native, features=self._layers
        )
        self._model = load_model(folder, wish)

    def read(self, tokens: Tensor) -> Lesson:
        """Compute the lesson of tokens int64 [texts, length]."""
        texts, length = tokens.shape
        places = torch.arange(texts * length).view(texts, length).tolist()
        parts = [
            RequestRows(
                tokens=row,
                positions=range(length),
                write_slots=own,
                prefix_slots=np.zeros(0, np.int32),
                wanted=range(length),
            )
            for row, own in zip(tokens.tolist(), places, strict=True)
        ]
        result = self._model.forward(build_batch(parts))
        # Copies, because a backward pass cannot keep what was made in inference mode.
        logits = result.logits.clone().view(texts, length, -1)
        if not self._layers:
            return Lesson(logits)
        features = torch.cat([result.features[f"layer.{layer}"] for layer in self._layers], dim=-1)
        return Lesson(logits, features.clone().view(texts, length, -1))


def head_shape(target: Path) -> Shape:
    """Return the sizes of a head for this target: those of one layer, without scaled rotations."""
    config = load_description(target).config
    if not isinstance(config, DecoderConfig):
        raise UserError(f"{target} is no dense decoder: heads of others cannot be trained here.")
    return Shape(
        vocabulary=config.vocabulary,
        hidden=config.hidden,
        layers=1,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head=config.head_dim,
        intermediate=config.intermediate,
        context=config.context,
        rope_theta=config.rope.theta,
        epsilon=config.norm_epsilon,
    )


def embedding_of(target: Path, shape: Shape, device: torch.device) -> Tensor:
    """Load the target's embedding, fp32 [vocabulary, hidden]."""
    return target_embedding(target, shape.vocabulary, shape.hidden).to(device, torch.float32)
