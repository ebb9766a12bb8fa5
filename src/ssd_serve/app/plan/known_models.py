"""Sizes of models for `ssd plan`: from a folder, from a hub id's `config.json`, or by a well-known name.

Downloads no weights. Knows shapes, not devices.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from ssd_serve.app.plan.device_tables import device_sheet
from ssd_serve.base.devices import this_machine
from ssd_serve.base.engine_config import NGRAM, SUFFIX
from ssd_serve.base.errors import CheckpointError, HubError, SettingsError
from ssd_serve.base.names import HubId, hub_id
from ssd_serve.base.settings import Settings
from ssd_serve.drafter.sources.registry import is_source, self_draft_layers
from ssd_serve.kernels.device import dtype_name
from ssd_serve.kernels.fp8 import FORMATS, can_multiply, native_format
from ssd_serve.kernels.native.library import NativeLibrary, native_library
from ssd_serve.models.architectures.contract import Description, Sizes
from ssd_serve.models.architectures.registry import describe, load_description
from ssd_serve.models.config import model_name, read_json
from ssd_serve.models.heads.kinds import HeadKind, head_kind
from ssd_serve.models.hub import Role, cached_model, embedded_model, local_model
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.sizes import (
    bytes_saved,
    kv_dtype,
    model_dtype,
    resolve_dtype,
    separate_embedding,
    sizes_of,
)
from ssd_serve.models.weights.quantization import Fp8Scheme

_KEYS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)

_LLAMA, _QWEN2, _QWEN3 = ["LlamaForCausalLM"], ["Qwen2ForCausalLM"], ["Qwen3ForCausalLM"]
_SHAPES = {
    "llama-3.1-405b": (_LLAMA, 16384, 53248, 126, 128, 8, 128, 128256, 131072, False),
    "llama-3.3-70b": (_LLAMA, 8192, 28672, 80, 64, 8, 128, 128256, 131072, False),
    "llama-3.1-70b": (_LLAMA, 8192, 28672, 80, 64, 8, 128, 128256, 131072, False),
    "llama-3.1-8b": (_LLAMA, 4096, 14336, 32, 32, 8, 128, 128256, 131072, False),
    "llama-3.2-3b": (_LLAMA, 3072, 8192, 28, 24, 8, 128, 128256, 131072, True),
    "llama-3.2-1b": (_LLAMA, 2048, 8192, 16, 32, 8, 64, 128256, 131072, True),
    "llama-2-7b": (_LLAMA, 4096, 11008, 32, 32, 32, 128, 32000, 4096, False),
    "qwen2.5-72b": (_QWEN2, 8192, 29568, 80, 64, 8, 128, 152064, 32768, False),
    "qwen2.5-7b": (_QWEN2, 3584, 18944, 28, 28, 4, 128, 152064, 32768, False),
    "qwen2.5-0.5b": (_QWEN2, 896, 4864, 24, 14, 2, 64, 151936, 32768, True),
    "qwen3-32b": (_QWEN3, 5120, 25600, 64, 64, 8, 128, 151936, 40960, False),
    "qwen3-8b": (_QWEN3, 4096, 12288, 36, 32, 8, 128, 151936, 40960, False),
    "qwen3-1.7b": (_QWEN3, 2048, 6144, 28, 16, 8, 128, 151936, 40960, True),
    "qwen3-0.6b": (_QWEN3, 1024, 3072, 28, 16, 8, 128, 151936, 40960, True),
}
"""Values of `config.json` of well-known models, in the order of `_KEYS`."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Sizes of a model in one dtype on one kind of device."""

    name: str
    layers: int
    kv_heads: int
    vocabulary: int
    context: int
    elements: int
    """Numbers in the matrices that a forward of one row reads."""
    wide_bytes: int
    """Bytes of all matrices in the dtype of the computation."""
    matrix_bytes: int
    """Read by a forward of any number of rows."""
    resident_bytes: int
    """Bytes in memory, the embedding included."""
    kv_bytes_per_token: int
    attention_flops: float
    """Floating-point operations of one row's attention for each token of context."""
    ranks: tuple[int, ...] = (1,)
    """Numbers of devices that can share it."""
    fp8: bool | None = None
    """True if its fp8 weights are read as they are, False if they are widened; None: it has none."""
    hidden: int = 0
    """Numbers of a row between two layers."""
    served_dtype: str = ""
    """`ModelFacts.dtype` of this model when this machine serves it."""

    def kv_share(self, devices: int) -> float:
        """The part of its KV cache that each of `devices` holds: heads are whole, and copied if need be."""
        return 1 / min(devices, self.kv_heads)

    @property
    def flops_per_row(self) -> float:
        """Floating-point operations of one row's matrix products."""
        return 2.0 * self.elements


@dataclass(frozen=True, slots=True)
class Computing:
    """Device and formats of the computation."""

    device: str
    """torch's name of this kind of device."""
    dtype: torch.dtype
    fp8: torch.dtype | None = None
    """The eight-bit format that the device multiplies."""
    asked: str = "auto"
    """The dtype of the settings."""


def planned_model(name: str, role: Role, computing: Computing, token: str | None) -> PlannedModel:
    """Look a model up: `embedded`, a folder, a well-known name, or a hub id."""
    shown, model, folder = _find(name, role, token)
    return sized(shown, model, computing, folder)


def sized(
    name: str, model: Description[Any], computing: Computing, folder: Path | None = None
) -> PlannedModel:
    """The sizes that follow from a configuration, and from the weights' files where they are in a folder."""
    whole, config, dtype = model.sizes(Parallel()), model.config, computing.dtype
    wide, saved = whole.resident * dtype.itemsize, _saved(whole, config.fp8, computing, folder)
    read = whole.read / whole.resident  # less than 1 for mixtures of experts
    embedding = separate_embedding(whole, computing.device)
    planned = PlannedModel(
        name=name,
        layers=len(whole.kv),
        kv_heads=whole.rows.kv_heads,
        vocabulary=config.vocabulary,
        context=config.context,
        elements=whole.read,
        wide_bytes=int(read * wide),
        matrix_bytes=int(read * (wide - saved)),
        resident_bytes=wide - saved + embedding * dtype.itemsize,
        kv_bytes_per_token=whole.layout(
            kv_dtype(computing.device, dtype, _native(computing.device))
        ).bytes_per_slot,
        ranks=whole.ranks,
        attention_flops=4.0 * whole.rows.heads * sum(layer.head_dim for layer in whole.kv),
        fp8=None if config.fp8 is None else saved > 0,
        hidden=whole.rows.hidden,
    )
    if folder is None or computing.device != "cpu":
        return planned
    native = _native("cpu")
    own = sizes_of(model, folder, device="cpu", dtype=computing.asked, native=native)
    return replace(
        planned,
        matrix_bytes=own.read_bytes,
        resident_bytes=own.resident_bytes,
        kv_bytes_per_token=own.kv_bytes_per_slot,
        served_dtype=model_dtype(folder, computing.asked, "cpu", native),
    )


def _saved(whole: Sizes, scheme: Fp8Scheme | None, computing: Computing, folder: Path | None) -> int:
    """Bytes that matrices take less than wide ones where the device multiplies fp8.

    The files say it. Without them, every matrix but the head is taken to be in e4m3fn, as exports leave it.
    """
    form, dtype = computing.fp8, computing.dtype
    if form is None or scheme is None or not scheme.rounds_inputs:
        return 0
    if folder is not None and any(folder.glob("*.safetensors")):
        return bytes_saved(folder, scheme, form, dtype)
    if "block" in scheme.kinds:
        return 0  # widened everywhere
    return sum(
        each.count * outputs * (each.inputs * (dtype.itemsize - 1) - torch.float32.itemsize)
        for each in whole.matrices
        for outputs in each.outputs
        if can_multiply(outputs, each.inputs)
    )


def multiplied_fp8(device: str) -> torch.dtype | None:
    """The eight-bit format that a device of the table, or `cpu` or `cuda` here, multiplies."""
    if device == "cpu":
        return None
    if device == "cuda":
        return native_format("cuda:0") if this_machine().gpus else None
    return next((form for form in FORMATS if dtype_name(form) == device_sheet(device).fp8), None)


def torch_dtype(name: str, device: str) -> torch.dtype:
    """`auto`, fp32, bf16 or fp16 on this kind of device."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return kinds[resolve_dtype(name, device, _native(device))]


def _native(device: str) -> NativeLibrary | None:
    return native_library(Settings().engine_config()) if device == "cpu" else None


def known_model(name: str) -> Description[Any] | None:
    """A well-known model, as far as sizes go; None if the name is not known."""
    shape = _SHAPES.get(name.lower())
    return None if shape is None else describe(dict(zip(_KEYS, shape, strict=True)))


def _find(name: str, role: Role, token: str | None) -> tuple[str, Description[Any], Path | None]:
    """Display name, description and folder (if there is one) of a model."""
    if (folder := embedded_model(name, role)) is not None:
        return model_name(folder), load_description(folder), folder
    if role == "draft" and not _is_whole_model(name):
        raise SettingsError(
            f"`ssd plan` has figures of whole draft models only, and {name} is none: measure it with `ssd bench modes "
            f"TARGET {name}`"
        )
    if (local := local_model(name)) is not None:
        return model_name(local.resolve()), load_description(local), local
    if Path(name).expanduser().is_file():
        raise CheckpointError(f"{name} is a file; name the folder of the model")
    known = known_model(name)
    if known is not None:
        return name.lower(), known, None
    if (found := hub_id(name)) is None:
        raise CheckpointError(
            f"{name} is no folder, no hub id such as owner/name, and no name that `ssd plan` knows; it knows "
            f"{', '.join(_SHAPES)}"
        )
    if (cached := cached_model(found)) is not None:
        return model_name(cached), load_description(cached), cached
    return name, _from_hub(found, token), None


def _is_whole_model(draft: str) -> bool:
    if draft in {NGRAM, SUFFIX} or is_source(draft) or self_draft_layers(draft) is not None:
        return False
    folder = local_model(draft)
    return folder is None or head_kind(folder) in {None, HeadKind.PARD}


def _from_hub(name: HubId, token: str | None) -> Description[Any]:
    """`config.json` alone; a copy in the local cache will do where there is no network."""
    try:
        path = hf_hub_download(name.name, "config.json", revision=name.revision, token=token)
    except HfHubHTTPError as error:
        raise HubError(
            f"the hub answered {error.response.status_code} for config.json of {name}: the name is wrong, or "
            "the model is gated and HF_TOKEN is missing or has no right to it, or it has GGUF files only: "
            f"`ssd pull {name}` fetches them to be planned"
        ) from error
    except Exception as error:  # no network: which class that is depends on the hub client's HTTP library
        raise HubError(
            f"cannot fetch config.json of {name} ({error}); check the network, give a local folder, or one "
            f"of {', '.join(_SHAPES)}"
        ) from error
    return describe(read_json(Path(path)))
