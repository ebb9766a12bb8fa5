"""Puts a drafter together from settings: source, limits, core, greeting. Knows the parts, runs nothing."""

import secrets
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.base.draft_messages import NOISE_SCHEME, PROTOCOL_VERSION, Hello
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.hub_id import without_revision
from ssd_serve.base.labels import as_label
from ssd_serve.base.logs import Logger, get_logger
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.grammar_paths import GrammarPaths
from ssd_serve.drafter.sources.loading import LoadedSource, SourceConfig, TokenizerInfo
from ssd_serve.drafter.sources.registry import is_source, load_source, self_draft_layers
from ssd_serve.drafter.step_time import LiveWidth, widths_to_measure
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.hub import find_model
from ssd_serve.models.parallel import Parallel
from ssd_serve.sampling.grammar import Grammars


@dataclass(frozen=True, slots=True)
class AssembledDrafter:
    """A drafter that is ready to greet a verifier."""

    core: DrafterCore
    hello: Hello


def assemble_drafter(
    config: EngineConfig,
    name: str,
    device: str,
    native: NativeLibrary | None,
    grammars: Grammars | None = None,
) -> AssembledDrafter:
    """Load the draft on `device`, with the times of its steps. `grammars` are those of the verifier's texts,
    where this process has them already."""
    draft = config.draft_model
    if draft is None:
        raise SettingsError("there is no draft model: set SSD_DRAFT to a folder or a hub id")
    log = get_logger(name, config.log_level, config.log_format)
    loaded = load_draft(config, draft, device, native, log)
    texts, widths = loaded.tokenizer, LiveWidth(loaded.seconds)
    limits = GrowthLimits(
        *(widths.width, config.draft_fan_out, config.draft_depth, config.tree_nodes),
        context=texts.context,
        # While nobody drafts, a target on cores computes on those of its drafter.
        reads_paused=not device.startswith("cpu"),
    )
    followed = (grammars or _grammars(texts)) if config.draft_grammars else None
    paths = None if followed is None else GrammarPaths(followed)
    core = DrafterCore(loaded.source, limits, texts.ends, name, log, widths, paths)
    return AssembledDrafter(core, greeting(loaded, draft, name, loaded.seconds[widths.width]))


def load_draft(
    config: EngineConfig, draft: str, device: str, native: NativeLibrary | None, log: Logger
) -> LoadedSource:
    """Load what a draft of this name guesses with, on `device`, with the times of its steps."""
    layers = self_draft_layers(draft)
    order = SourceConfig(
        config=config,
        folder=_folder(config, draft, layers),
        device=device,
        native=native,
        log=log,
        widths=widths_to_measure(config.draft_width),
        layers=layers,
    )
    return load_source(draft, order)


def greeting(loaded: LoadedSource, draft: str, name: str, step_s: float) -> Hello:
    """What a drafter of this name says first, whose source was loaded for this draft."""
    texts = loaded.tokenizer
    return Hello(
        protocol=PROTOCOL_VERSION,
        noise=NOISE_SCHEME,
        tokenizer=texts.tokenizer,
        vocabulary=texts.vocabulary,
        context=texts.context,
        name=name,
        instance=secrets.randbits(63),
        source=as_label(without_revision(draft)),
        step_ms=1e3 * step_s,
        prefill_ms=1e3 * loaded.prefill_s,
        features=loaded.features,
    )


def _grammars(tokenizer: TokenizerInfo) -> Grammars | None:
    """Those of the texts, where a source can spell them."""
    if tokenizer.spelled is None:
        return None
    grammars = Grammars(tokenizer.spelled, tokenizer.vocabulary, tokenizer.ends)
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
        raise SettingsError(f"the draft {draft} leaves nothing out: the target has {len(there)} layers")
    return folder
