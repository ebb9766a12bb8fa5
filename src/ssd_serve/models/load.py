"""Loads models: sizes first, then memory, then weights.

Knows how the pieces are put together; the pieces know nothing of each other.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ssd_serve.base.attention_backends import names
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import UserError
from ssd_serve.base.logs import Logger
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.backends import (
    DEVICE_SCRATCH_BYTES,
    AttentionOptions,
    ChosenAttention,
    attention_for,
)
from ssd_serve.kernels.attention.checked import Difference
from ssd_serve.kernels.attention.contract import Capturable
from ssd_serve.kernels.device import DeviceGraphCapture, layout_order
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.rows import NativeRows, RowOperations, TorchRows, can_operate
from ssd_serve.models.architectures.contract import ModelParts, Sizes
from ssd_serve.models.captured import CapturedModel
from ssd_serve.models.config import model_name
from ssd_serve.models.interface import CapturableModel, Model, ModelFacts
from ssd_serve.models.invariant import InvariantLinears, invariant_operations
from ssd_serve.models.memory import available_memory, require_memory
from ssd_serve.models.parallel import Group
from ssd_serve.models.sizes import (
    INT8,
    PACKED,
    ModelSizes,
    activation_dtype,
    kv_dtype,
    model_dtype,
    model_sizes,
    torch_device,
)
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.linear import LinearFactory, Linears

_PADDING_SLOTS = 1
"""A KV slot that no request has: padding rows of captured forwards write to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of a model. `context` limits the positions (None: the checkpoint's). `native` are the
    kernels compiled for this CPU, without them torch's are used; `attention` chooses the tree attention.
    `batch_invariant`: a row's result is the same to the bit in any batch, at some cost. `layers`: use only
    this number of first layers, then the last norm and the head. Every forward returns the outputs of
    `features`: layers, or `FINAL`. `graphs` captures forwards on GPUs, where the attention can be captured;
    `allow_pickle`: weights may be `.bin` files; `rounded`: bf16 weights are rounded to 8 bits on CPUs."""

    device: str
    dtype: str
    slots: int
    context: int | None
    native: NativeLibrary | None = None
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    batch_invariant: bool = False
    layers: int | None = None
    features: tuple[int, ...] = ()
    rounded: bool = False
    graphs: bool = False
    allow_pickle: bool = False


def load_model(
    path: Path, options: ModelOptions, *, group: Group | None = None, log: Logger | None = None
) -> Model:
    """Load a model folder, or the share of one rank of a `group`, with its KV cache. Raises `CheckpointError`
    and `MemoryShortError`."""
    group = group or Group()
    sizes = model_sizes(
        path,
        device=options.device,
        dtype=options.dtype,
        ranks=group.parallel.size,
        allow_pickle=options.allow_pickle,
        layers=options.layers,
        native=options.native,
    )
    return load_sized(path, options, sizes, group=group, log=log)


def load_sized(
    path: Path,
    options: ModelOptions,
    sizes: ModelSizes,
    *,
    group: Group | None = None,
    log: Logger | None = None,
) -> Model:
    """Load what these are the sizes of."""
    return _Loading(path, options, sizes, group or Group(), log).model()


class _Loading:
    """Loads one rank's share of a model."""

    def __init__(
        self, path: Path, options: ModelOptions, sizes: ModelSizes, group: Group, log: Logger | None
    ) -> None:
        self._path, self._options, self._sizes = path, options, sizes
        self._group, self._log = group, log
        self._place = torch_device(options.device)
        self._native = options.native if self._place == "cpu" else None
        self._kind = model_dtype(path, options.dtype, options.device, options.native)
        self._dtype = activation_dtype(self._kind)
        self._architecture, self._config = sizes.description.architecture, sizes.description.config
        self._own: Sizes = sizes.description.sizes(group.parallel)

    def model(self) -> Model:
        """Memory, weights, attention, and what they are made into."""
        self._require_room()
        if (unread := self._sizes.description.unread) and self._log is not None:
            self._log.warning(
                "keys of config.json are not known here and change nothing",
                keys=", ".join(unread),
                model=model_name(self._path),
            )
        layout = replace(
            self._own.layout(kv_dtype(self._place, self._dtype, self._native)),
            order=layout_order(self._place),
        )
        with torch.inference_mode():
            weights = self._weights()
            more = _PADDING_SLOTS if self._options.graphs else 0
            cache = KVCache(layout, self._options.slots + more, self._place)
        attention = self._attention(cache)
        parts = ModelParts(
            attention=attention.backend,
            operations=self._operations(attention.backend.dtype),
            facts=self._facts(attention.name, layout.bytes_per_slot),
            slots=self._options.slots,
            release=cache.release,
            features=self._options.features,
            group=self._group,
        )
        return self._captured(self._architecture.build(self._config, weights, parts), attention)

    def _require_room(self) -> None:
        """Raise `MemoryShortError` where there is too little memory for weights and KV cache."""
        options, sizes = self._options, self._sizes
        # While a matrix is packed its dense copy exists too: as read, and as int8 where it becomes that.
        width = self._dtype.itemsize
        if self._kind == INT8:
            width = torch.float32.itemsize + torch.int8.itemsize
        need = sizes.resident_bytes + self._own.largest * width + options.slots * sizes.kv_bytes_per_slot
        if self._place != "cpu":
            need += DEVICE_SCRATCH_BYTES
        elif options.batch_invariant:  # a matrix of every shape is tried
            need += 2 * self._own.largest * width
        require_memory(model_name(self._path), need, available_memory(self._place))

    def _weights(self) -> Any:
        partly = self._options.layers is not None
        with Checkpoint(self._path, allow_pickle=self._options.allow_pickle, partly=partly) as checkpoint:
            linears: Linears = LinearFactory(
                checkpoint,
                parallel=self._group.parallel,
                device=self._place,
                dtype=self._dtype,
                int8=self._kind == INT8,
                native=self._native,
                fp8=self._config.fp8,
                keep=self._kind == PACKED,
                rounded=self._options.rounded,
            )
            if self._options.batch_invariant:
                linears = InvariantLinears(linears, self._place, self._dtype)
            weights = self._architecture.read_weights(self._config, checkpoint, linears)
            if self._log is not None:
                for note in checkpoint.notes():
                    self._log.warning(note, model=model_name(self._path))
            return weights

    def _attention(self, cache: KVCache) -> ChosenAttention:
        """The tree attention that was asked for, the same on all ranks."""
        invariant, alone = self._options.batch_invariant, self._group.parallel.size == 1
        options = replace(self._options.attention, invariant=invariant, measured=alone)
        chosen = attention_for(options, cache, self._own.rows.heads, self._native, self._log)
        self._group.meet()
        if not any(self._group.agree(chosen.name == name) for name in names()):
            raise UserError(
                "the ranks of the target have chosen different tree attention, for one does not work on all "
                "of their devices: name one that does with SSD_TREE_DECODE_BACKEND; `ssd doctor` shows them"
            )
        return chosen

    def _operations(self, attention: torch.dtype) -> RowOperations:
        """The compiled ones on CPUs where they work."""
        operations: RowOperations = TorchRows(attention)
        native = self._native
        if native is not None and attention is torch.float32 and can_operate(native, self._dtype):
            operations = NativeRows(native, self._dtype)
        operations = self._architecture.operations(operations)
        if not self._options.batch_invariant:
            return operations
        fixed = invariant_operations(self._own.rows, operations, self._place, self._dtype)
        if self._log is not None:
            self._log.info("batch invariant: no row depends on others", model=model_name(self._path))
        return fixed

    def _facts(self, attention: str, kv_bytes_per_slot: int) -> ModelFacts:
        config, native = self._config, self._native
        return ModelFacts(
            name=model_name(self._path),
            vocabulary=config.vocabulary,
            context=min(self._options.context or config.context, config.context),
            layers=len(self._own.kv),
            hidden=config.hidden,
            eos_token_ids=config.eos_token_ids,
            weight_bytes=self._sizes.read_bytes,
            kv_bytes_per_slot=kv_bytes_per_slot,
            device=self._place,
            dtype=self._kind,
            kernels="torch" if native is None else native.path.stem,
            attention=attention,
            batch_invariant=self._options.batch_invariant,
            ranks=self._group.parallel.size,
        )

    def _captured(self, model: CapturableModel, attention: ChosenAttention) -> Model:
        """The model as it is, or captured where that is asked for and can be."""
        options, log = self._options, self._log
        if not options.graphs or self._place == "cpu":
            return model
        if not isinstance(attention.backend, Capturable):
            if log is not None:
                log.info(
                    "forwards are not captured",
                    attention=attention.name,
                    checked=bool(options.attention.check),
                )
            return model
        capture = DeviceGraphCapture(torch.device(self._place))
        captured = CapturedModel(
            model, attention.backend, capture, padding_slot=options.slots, group=self._group, log=log
        )
        if self._group.parallel.size == 1:  # other ranks run forwards only when rank 0 sends one
            captured.capture_ahead()
        return captured


def load_served(
    config: EngineConfig,
    path: Path,
    device: str,
    slots: int,
    native: NativeLibrary | None,
    log: Logger | None = None,
    report: Callable[[Difference], None] | None = None,
    *,
    batch_invariant: bool = False,
    layers: int | None = None,
    features: tuple[int, ...] = (),
    group: Group | None = None,
) -> Model:
    """A model as the settings want it served; see `load_model`. Drafts decide nothing: of `batch_invariant`
    only targets have to be."""
    options = replace(
        served_options(config, device, slots, native, report),
        batch_invariant=batch_invariant,
        layers=layers,
        features=features,
    )
    return load_model(path, options, group=group, log=log)


def served_options(
    config: EngineConfig,
    device: str,
    slots: int,
    native: NativeLibrary | None,
    report: Callable[[Difference], None] | None = None,
) -> ModelOptions:
    """Return the options that the settings give for any model."""
    return ModelOptions(
        device=device,
        dtype=config.dtype,
        slots=slots,
        context=config.context,
        native=native,
        attention=AttentionOptions(
            config.tree_decode_backend, config.cache_dir, config.tree_decode_check, report
        ),
        graphs=config.graphs,
        allow_pickle=config.allow_pickle,
    )
