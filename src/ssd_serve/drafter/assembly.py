"""Builds a drafter from the configuration: source, limits, core and `Hello`."""

import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ssd_serve.base.draft_messages import NOISE_SCHEME, PROTOCOL_VERSION, Hello
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.logs import Logger, get_logger
from ssd_serve.base.names import as_label, without_revision
from ssd_serve.drafter.blocks import NativeTrees, grow_tree
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.grammar_paths import GrammarPaths
from ssd_serve.drafter.sources.loading import LoadedSource, SourceConfig, TokenizerInfo
from ssd_serve.drafter.sources.registry import is_source, registered_source, self_draft_layers
from ssd_serve.drafter.step_time import LiveWidth, widths_to_measure
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.hub import find_model
from ssd_serve.models.parallel import Parallel
from ssd_serve.sampling.grammar import Grammars


@dataclass(frozen=True, slots=True)
class AssembledDrafter:
    """A drafter that is ready to connect."""

    core: DrafterCore
    hello: Hello


def assemble_drafter(
    config: EngineConfig,
    name: str,
    device: str,
    native: NativeLibrary | None,
    grammars: Grammars | None = None,
) -> AssembledDrafter:
    """Load the draft on `device` and measure its steps; `grammars` are the verifier's, if it is this
    process."""
    draft = config.draft_model
    if draft is None:
        raise SettingsError("there is no draft model: set SSD_DRAFT to a folder or a hub id")
    if config.shape is not None and config.shape.chain:
        # No siblings: growth by reach would expand most of them before it reached the chain's end.
        depth = max(config.draft_depth, config.shape.nodes)
        config = replace(config, draft_fan_out=1, draft_depth=depth)
    log = get_logger(name, config.log_level, config.log_format)
    loaded = load_draft(config, draft, device, native, log)
    info, widths = loaded.tokenizer, LiveWidth(loaded.seconds)
    limits = GrowthLimits(
        *(widths.width, config.draft_fan_out, config.draft_depth, config.tree_nodes),
        context=info.context,
        # A fixed number of draft tokens is verified however improbable they are.
        min_reach=1e-3 if config.shape is None else sys.float_info.min,
        # While speculation is paused, a target on CPU cores also computes on its drafter's cores.
        prefills_paused=not device.startswith("cpu"),
    )
    compiled = (grammars or _grammars(info)) if config.draft_grammars else None
    paths = None if compiled is None else GrammarPaths(compiled)
    trees = grow_tree if native is None else NativeTrees(native)
    core = DrafterCore(loaded.source, limits, info.ends, name, log, widths, paths, loaded.description, trees)
    return AssembledDrafter(core, hello_of(loaded, draft, name, loaded.seconds[widths.width]))


def load_draft(
    config: EngineConfig, draft: str, device: str, native: NativeLibrary | None, log: Logger
) -> LoadedSource:
    """Load the source of a draft on `device` and measure its steps."""
    layers = self_draft_layers(draft)
    folder = _folder(config, draft, layers)
    registered = registered_source(draft, folder)
    description = registered.describe(config, folder)
    source = SourceConfig(
        config=config,
        folder=folder,
        device=device,
        native=native,
        log=log,
        widths=widths_to_measure(config.draft_width),
        layers=layers,
        description=description,
    )
    return replace(registered.load(source), description=description)


def hello_of(loaded: LoadedSource, draft: str, name: str, step_s: float) -> Hello:
    """The first message of a drafter of this name."""
    info = loaded.tokenizer
    return Hello(
        protocol=PROTOCOL_VERSION,
        noise=NOISE_SCHEME,
        tokenizer=info.tokenizer,
        vocabulary=info.vocabulary,
        context=info.context,
        name=name,
        instance=secrets.randbits(63),
        source=as_label(without_revision(draft)),
        step_ms=1e3 * step_s,
        prefill_ms=1e3 * loaded.prefill_s,
        features=loaded.description.features,
        depth=loaded.depth or loaded.description.block or loaded.description.depth or 0,
    )


def _grammars(tokenizer: TokenizerInfo) -> Grammars | None:
    if tokenizer.tokenizer_json is None:
        return None
    grammars = Grammars(tokenizer.tokenizer_json, tokenizer.vocabulary, tokenizer.ends)
    grammars.prepare()
    return grammars


def _folder(config: EngineConfig, draft: str, layers: int | None) -> Path | None:
    if is_source(draft):
        return None
    if layers is None:
        return find_model(config, draft, "draft")
    folder = find_model(config, config.target, "target")
    there = load_description(folder).sizes(Parallel()).kv
    if layers >= len(there):
        raise SettingsError(
            f"the draft {draft} must have fewer layers than the target, which has {len(there)}"
        )
    return folder
