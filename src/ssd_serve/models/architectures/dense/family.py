"""An architecture of the dense family: all it has of its own is how its `config.json` is read."""

from collections.abc import Callable
from typing import Any

from ssd_serve.models.architectures.contract import Architecture
from ssd_serve.models.architectures.dense.config import DecoderConfig
from ssd_serve.models.architectures.dense.decoder import DenseDecoder
from ssd_serve.models.architectures.dense.sizes import dense_sizes
from ssd_serve.models.architectures.dense.weights import DecoderWeights, read_dense
from ssd_serve.models.config import Json


def dense_architecture(
    models: str, parse: Callable[[Json, Json], DecoderConfig]
) -> Architecture[DecoderConfig, DecoderWeights]:
    """A member of the family."""
    return Architecture(
        models=models, parse=parse, sizes=dense_sizes, read_weights=read_dense, build=DenseDecoder
    )


def is_dense(architecture: Architecture[Any, Any]) -> bool:
    """Whether an architecture is a member, rather than one that only borrows from the family."""
    return architecture == dense_architecture(architecture.models, architecture.parse)
