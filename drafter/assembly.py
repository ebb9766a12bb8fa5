"""Puts a drafter together from settings: model, slots, noise, source, core. Knows the parts, runs nothing."""

import secrets
from dataclasses import dataclass

from ssd_serve.devices import parse_device
from ssd_serve.drafter.build import CoreParts, DraftModel, build_core
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.width import LiveWidth, widths_to_measure
from ssd_serve.errors import SettingsError
from ssd_serve.hub_id import without_revision
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.labels import as_label
from ssd_serve.logs import get_logger
from ssd_serve.messages import NOISE_SCHEME, PROTOCOL_VERSION, Hello
from ssd_serve.models.emulated import EmulatedModel, device_table
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelSizes, load_served, model_sizes, torch_device
from ssd_serve.models.memory import available_memory
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.models.warmup import measure_steps
from ssd_serve.settings import Settings

_USUAL = 256 << 20


@dataclass(frozen=True, slots=True)
class AssembledDrafter:
    """A drafter that is ready to greet a verifier. `emulated` is the padded model in emulated set-ups."""

    core: DrafterCore
    hello: Hello
    emulated: EmulatedModel | None


def _kv_bytes(settings: Settings, sizes: ModelSizes, device: str) -> int:
    """Bytes: what the settings name, or a share of a GPU that has no target, which would be loading now."""
    if settings.draft_kv_memory_mb is not None:
        return settings.draft_kv_memory_mb << 20
    own, target = parse_device(device), parse_device(settings.target_device or "cpu")
    if own.kind == "cpu" or (target.kind == "cuda" and set(own.indices) & set(target.indices)):
        return _USUAL
    return (available_memory(torch_device(device)) - sizes.resident_bytes) // 10


def assemble_drafter(
    settings: Settings, name: str, device: str, native: NativeLibrary | None
) -> AssembledDrafter:
    """Load the draft model on `device` and measure its step."""
    if settings.draft_model is None:
        raise SettingsError("there is no draft model: set SSD_DRAFT to a folder or a hub id")
    path = find_model(settings, settings.draft_model, "draft")
    sizes = model_sizes(path, device=device, dtype=settings.dtype, allow_pickle=settings.allow_pickle)
    most = settings.max_running * (settings.context or sizes.config.context) + settings.tree_nodes
    slots = min(most, max(1024, _kv_bytes(settings, sizes, device) // sizes.kv_bytes_per_slot))
    log = get_logger(name, settings.log_level, settings.log_format)
    model: Model = load_served(settings, path, device, slots, native, log)
    emulated = None
    if settings.emulate:
        table = device_table(settings.emulate)
        model = emulated = EmulatedModel(model, table.draft_s, table.flat_rows)
    timings = measure_steps(model, widths_to_measure(settings.draft_width))
    seconds = {rows: min(each) for (rows, _), each in timings.items()}
    widths = LiveWidth(seconds)
    facts = model.facts
    limits = GrowthLimits(
        widths.width, settings.draft_fan_out, settings.draft_depth, settings.tree_nodes, context=facts.context
    )
    core = build_core(
        CoreParts(
            guesses=DraftModel(model, slots, native=native),
            limits=limits,
            ends=facts.eos_token_ids,
            name=name,
            log=log,
            widths=widths,
        )
    )
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        noise=NOISE_SCHEME,
        tokenizer=Tokenizer(path).vocabulary_hash(),
        vocabulary=facts.vocabulary,
        context=facts.context,
        name=name,
        instance=secrets.randbits(63),
        source=as_label(without_revision(settings.draft_model)),
        step_ms=1e3 * seconds[widths.width],
    )
    return AssembledDrafter(core, hello, emulated)
