"""From a folder to a running model: sizes first, then memory, then weights.

Knows how the pieces are put together; the pieces know nothing of each other.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ssd_serve.cache.kv import KVCache
from ssd_serve.errors import UserError
from ssd_serve.kernels.attention.backends import DEVICE_SCRATCH_BYTES, AttentionWish, attention_for
from ssd_serve.kernels.attention.checked import Difference
from ssd_serve.kernels.attention.contract import Capturable
from ssd_serve.kernels.attention.registry import names
from ssd_serve.kernels.attention.self_test import layout_order
from ssd_serve.kernels.capture import DeviceGraphCapture
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.rows import NativeRows, can_operate
from ssd_serve.kernels.products.int8 import can_multiply_int8
from ssd_serve.kernels.products.packed import cpu_has_fast_bf16
from ssd_serve.kernels.rows.operations import RowOperations, TorchRows
from ssd_serve.logs import Logger
from ssd_serve.models.captured import CapturedDecoder
from ssd_serve.models.config import DecoderConfig, load_config, model_name
from ssd_serve.models.decoder import (
    Decoder,
    kv_layout,
    largest_matrix,
    matrix_elements,
    read_weights,
    tensor_names,
)
from ssd_serve.models.interface import Model, ModelFacts
from ssd_serve.models.invariant import invariant_operations, invariant_weights
from ssd_serve.models.memory import available_memory, require_memory
from ssd_serve.models.ranks.parallel import Alone, Group, Parallel, rank_config
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.linear import LinearFactory, multiplied_format
from ssd_serve.models.weights.matrices import MatrixReader
from ssd_serve.settings import Settings

_INT8 = "int8"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, _INT8: torch.bfloat16}
"""What is computed in; weights of int8 are wider only where this machine has no product for them."""
_PADDING_SLOTS = 1
"""A KV slot that no request has: padding rows of captured forwards write to it."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What each rank of a model will need, before its weights are read. `config` is the whole model's."""

    config: DecoderConfig
    matrix_bytes: int
    """All matrices that one forward of one row reads."""
    resident_bytes: int
    """Weights in memory, the embedding included."""
    kv_bytes_per_slot: int


def resolve_dtype(dtype: str, device: str) -> str:
    """`fp32`, `bf16`, `fp16` or `int8`; `auto` is bf16 where the device computes it fast, else fp32."""
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise UserError(f"dtype {dtype!r} is unknown; use auto, {', '.join(_DTYPES)}")
        if dtype == _INT8 and torch_device(device) != "cpu":
            raise UserError(f"dtype int8 is not built for {device}, only for CPUs; use auto, bf16 or fp16")
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


def model_sizes(
    folder: Path, *, device: str, dtype: str, ranks: int = 1, allow_pickle: bool = False
) -> ModelSizes:
    """Sizes of a model that is not loaded. Raises `UserError` where that many ranks cannot share it."""
    whole = load_config(folder)
    config = rank_config(whole, Parallel(ranks - 1, ranks))  # the last one's vocabulary is the largest
    name = resolve_dtype(dtype, device)
    kind = _DTYPES[name]
    # A packed head cannot serve as the embedding too, so tied weights are held twice on CPUs.
    shared = config.tied and torch_device(device) != "cpu"
    embedding = 0 if shared else config.vocabulary * config.hidden
    layout = kv_layout(config, attention_dtype(device, kind))
    matrices = _matrix_bytes(folder, config, device, name, ranks, allow_pickle)
    return ModelSizes(whole, matrices, matrices + embedding * kind.itemsize, layout.bytes_per_slot)


def _matrix_bytes(
    folder: Path, config: DecoderConfig, device: str, dtype: str, ranks: int, allow_pickle: bool
) -> int:
    """Bytes of all of one rank's matrices that one forward of one row reads.

    Where the device multiplies fp8, the file says which matrices stay in it.
    """
    numbers = matrix_elements(config)
    if (form := multiplied_format(config.fp8, torch_device(device))) is not None:
        with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
            checkpoint.require(tensor_names(config))
            saved = MatrixReader(checkpoint, config.fp8).bytes_saved(
                tensor_names(config), form, _DTYPES[dtype]
            )
        return numbers * _DTYPES[dtype].itemsize - saved // ranks
    if dtype != _INT8:
        return numbers * _DTYPES[dtype].itemsize
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    outputs = config.layers * (heads + 2 * config.hidden + 2 * config.intermediate) + config.vocabulary
    width = 1 if can_multiply_int8() else _DTYPES[dtype].itemsize
    return numbers * width + outputs * torch.float32.itemsize  # a scale for each output


def load_model(
    path: Path,
    *,
    device: str,
    dtype: str,
    slots: int,
    context: int | None,
    packed: bool = True,
    native: NativeLibrary | None = None,
    wish: AttentionWish | None = None,
    batch_invariant: bool = False,
    features: tuple[int, ...] = (),
    graphs: bool = False,
    allow_pickle: bool = False,
    group: Group | None = None,
    progress: Callable[[int, int], None] | None = None,
    log: Logger | None = None,
) -> Model:
    """Load a model folder, or the share of one rank of a `group`, with a KV cache of `slots` tokens.

    `context` limits the positions (None: the checkpoint's). `packed` pre-packs weights for few-row products
    on CPUs; `native` are the kernels compiled for this CPU, without them torch's are used. `wish` says
    which tree attention; `batch_invariant`: a row's result is the same to the bit in any batch, at some cost;
    `features` names layers whose outputs every forward returns; `graphs` captures forwards on GPUs, where the
    attention can be captured; `allow_pickle`: weights may be `.bin` files. `progress` is told how many layers
    of how many are loaded. Raises `CheckpointError` and `MemoryShortError`.
    """
    place = torch_device(device)
    native = native if place == "cpu" else None
    group = group or Alone()
    parallel = group.parallel
    sizes = model_sizes(path, device=device, dtype=dtype, ranks=parallel.size, allow_pickle=allow_pickle)
    kind = resolve_dtype(dtype, device)
    config = rank_config(sizes.config, parallel)
    # While a matrix is packed its dense copy exists too: as read, and as int8 where it becomes that.
    dense = _DTYPES[kind].itemsize if kind != _INT8 else torch.float32.itemsize + torch.int8.itemsize
    need = sizes.resident_bytes + largest_matrix(config) * dense
    need += slots * sizes.kv_bytes_per_slot + (0 if place == "cpu" else DEVICE_SCRATCH_BYTES)
    if batch_invariant and place == "cpu":  # a matrix of every shape is tried
        need += 2 * largest_matrix(config) * dense
    require_memory(model_name(path), need, available_memory(place))
    layout = replace(kv_layout(config, attention_dtype(device, _DTYPES[kind])), order=layout_order(place))
    with torch.inference_mode(), Checkpoint(path, allow_pickle=allow_pickle) as checkpoint:
        make = LinearFactory(
            checkpoint,
            parallel=parallel,
            device=place,
            dtype=_DTYPES[kind],
            packed=packed,
            int8=kind == _INT8,
            native=native,
            fp8=config.fp8,
        )
        weights = read_weights(sizes.config, checkpoint, make, progress)
        if batch_invariant:
            weights = invariant_weights(config, weights, make)
        cache = KVCache(layout, slots + _PADDING_SLOTS if graphs else slots, place)
    wish = replace(wish or AttentionWish(), invariant=batch_invariant, measured=parallel.size == 1)
    chosen = attention_for(wish, cache, config.heads, native, log)
    group.meet()
    if not any(group.agree(chosen.name == name) for name in names()):
        raise UserError(
            "the ranks of the target have chosen different tree attention, for one does not work on all of "
            "their devices: name one that does with SSD_TREE_DECODE_BACKEND; `ssd doctor` shows them"
        )
    facts = ModelFacts(
        name=model_name(path),
        vocabulary=sizes.config.vocabulary,
        context=min(context or config.context, config.context),
        layers=config.layers,
        hidden=config.hidden,
        eos_token_ids=config.eos_token_ids,
        weight_bytes=sizes.matrix_bytes,
        kv_bytes_per_slot=layout.bytes_per_slot,
        device=place,
        dtype=kind,
        kernels=native.path.stem if native is not None and place == "cpu" else "torch",
        attention=chosen.name,
        batch_invariant=batch_invariant,
        ranks=parallel.size,
    )
    operations = _row_operations(_DTYPES[kind], layout.dtype, place, native)
    if batch_invariant:
        operations = invariant_operations(config, weights, operations)
        if log is not None:
            log.info("batch invariant: no row depends on others", model=facts.name)
    decoder = Decoder(
        config,
        weights,
        chosen.backend,
        operations,
        facts=facts,
        slots=slots,
        features=features,
        group=group,
    )
    if not graphs or place == "cpu":
        return decoder
    if not isinstance(chosen.backend, Capturable):
        if log is not None:
            log.info("forwards are not captured", attention=chosen.name, checked=bool(wish.check))
        return decoder
    capture = DeviceGraphCapture(torch.device(place))
    return CapturedDecoder(decoder, chosen.backend, capture, padding_slot=slots, group=group, log=log)


def load_served(
    settings: Settings,
    path: Path,
    device: str,
    slots: int,
    native: NativeLibrary | None,
    log: Logger | None = None,
    report: Callable[[Difference], None] | None = None,
    *,
    batch_invariant: bool = False,
    group: Group | None = None,
) -> Model:
    """A model as the settings want it served; see `load_model`. Drafts decide nothing: of `batch_invariant`
    only targets have to be."""
    return load_model(
        path,
        device=device,
        dtype=settings.dtype,
        slots=slots,
        context=settings.context,
        native=native,
        wish=AttentionWish(
            settings.tree_decode_backend, settings.cache_dir, settings.tree_decode_check, report
        ),
        batch_invariant=batch_invariant,
        graphs=settings.graphs,
        allow_pickle=settings.allow_pickle,
        group=group,
        log=log,
    )


def _row_operations(
    dtype: torch.dtype, attention: torch.dtype, place: str, native: NativeLibrary | None
) -> RowOperations:
    """The compiled ones on CPUs where they work."""
    if native is not None and place == "cpu" and attention is torch.float32 and can_operate(native, dtype):
        return NativeRows(native, dtype)
    return TorchRows(attention)
