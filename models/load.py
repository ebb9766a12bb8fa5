"""From a folder to a running model: sizes first, then memory, then weights.

Knows how the pieces are put together; the pieces know nothing of each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd_serve.cache.kv import KVCache
from ssd_serve.errors import UserError
from ssd_serve.kernels.packed import cpu_has_fast_bf16
from ssd_serve.kernels.sdpa import SdpaAttention
from ssd_serve.models.checkpoint import Checkpoint
from ssd_serve.models.config import DecoderConfig, load_config, model_name
from ssd_serve.models.decoder import Decoder, kv_layout, largest_matrix, matrix_elements, read_weights
from ssd_serve.models.interface import Model, ModelFacts
from ssd_serve.models.linear import LinearFactory, Parallel
from ssd_serve.models.memory import available_memory, require_memory

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model will need, from its configuration alone."""

    config: DecoderConfig
    resident_bytes: int
    """Weights in memory, the embedding included."""
    kv_bytes_per_slot: int


def resolve_dtype(dtype: str, device: str) -> str:
    """`fp32`, `bf16` or `fp16`; `auto` is bf16 where the device computes it fast, else fp32."""
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise UserError(f"dtype {dtype!r} is unknown; use auto, {', '.join(_DTYPES)}")
        return dtype
    if torch_device(device) != "cpu":
        return "bf16"
    return "bf16" if cpu_has_fast_bf16() else "fp32"


def attention_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache and of attention.

    float32 on CPUs, whatever the weights are: torch's attention in half precision is slower there, for single
    rows more than twice.
    """
    return torch.float32 if torch_device(device) == "cpu" else dtype


def torch_device(device: str) -> str:
    """The device name for torch: a core list (`cpu:0-1`) is the launcher's business, `cpu` is left of it."""
    return "cpu" if device == "cpu" or device.startswith("cpu:") else device


def model_sizes(folder: Path, *, device: str, dtype: str) -> ModelSizes:
    """Sizes of a model that is not loaded."""
    config = load_config(folder)
    kind = _DTYPES[resolve_dtype(dtype, device)]
    matrices = matrix_elements(config)
    # A packed head cannot serve as the embedding too, so tied weights are held twice on CPUs.
    shared = config.tied and torch_device(device) != "cpu"
    embedding = 0 if shared else config.vocabulary * config.hidden
    layout = kv_layout(config, attention_dtype(device, kind))
    return ModelSizes(config, (matrices + embedding) * kind.itemsize, layout.bytes_per_slot)


def load_model(
    path: Path,
    *,
    device: str,
    dtype: str,
    slots: int,
    context: int | None,
    packed: bool = True,
    features: tuple[int, ...] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Load a model folder with a KV cache of `slots` tokens.

    `context` limits the positions (None: the checkpoint's). `packed` pre-packs weights for few-row products
    on CPUs. `features` names layers whose outputs every forward returns. `progress` is told
    how many layers of how many are loaded. Raises `CheckpointError` and `MemoryShortError`.
    """
    place = torch_device(device)
    sizes = model_sizes(path, device=device, dtype=dtype)
    kind = resolve_dtype(dtype, device)
    config = sizes.config
    # While a matrix is packed its dense copy exists too.
    need = sizes.resident_bytes + largest_matrix(config) * _DTYPES[kind].itemsize
    need += slots * sizes.kv_bytes_per_slot
    require_memory(model_name(path), need, available_memory(place))
    layout = kv_layout(config, attention_dtype(device, _DTYPES[kind]))
    with torch.inference_mode(), Checkpoint(path) as checkpoint:
        make = LinearFactory(
            checkpoint, parallel=Parallel(), device=place, dtype=_DTYPES[kind], packed=packed
        )
        weights = read_weights(config, checkpoint, make, progress)
        cache = KVCache(layout, slots, place)
    facts = ModelFacts(
        name=model_name(path),
        vocabulary=config.vocabulary,
        context=min(context or config.context, config.context),
        layers=config.layers,
        hidden=config.hidden,
        eos_token_ids=config.eos_token_ids,
        weight_bytes=matrix_elements(config) * _DTYPES[kind].itemsize,
        kv_bytes_per_slot=layout.bytes_per_slot,
        device=place,
        dtype=kind,
    )
    return Decoder(
        config, weights, SdpaAttention(cache, config.heads), facts=facts, slots=slots, features=features
    )
