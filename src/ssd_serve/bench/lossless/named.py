"""Loads a target and its drafts as the settings name them, for the losslessness proof."""

from dataclasses import replace
from functools import partial

from ssd_serve.base.logs import get_logger
from ssd_serve.base.settings import Settings
from ssd_serve.bench.lossless.drafters import RigDraft
from ssd_serve.bench.lossless.rig import GROWTH, LoadedTarget, load_on, wish
from ssd_serve.bench.options import Devices
from ssd_serve.drafter.assembly import hello_of, load_draft
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.lookup_channel import lookup_channel
from ssd_serve.drafter.sources.loading import LoadedSource
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.config import model_name
from ssd_serve.models.hub import find_model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.verifier.drafters.admission import check_hello


class _Cores:
    """Makes drafter cores over one source, one at a time; the requests of the last core are closed."""

    def __init__(self, loaded: LoadedSource, name: str) -> None:
        self._loaded = loaded
        self._name = name
        self._last: DrafterCore | None = None

    def __call__(self) -> DrafterCore:
        if self._last is not None:
            for request in list(self._last.requests):
                self._last.forget(request)
        loaded = self._loaded
        self._last = DrafterCore(
            loaded.source,
            GROWTH,
            loaded.tokenizer.ends,
            self._name,
            description=loaded.description,
        )
        return self._last


def load_named(settings: Settings, devices: Devices, native: NativeLibrary | None) -> LoadedTarget:
    """Load the target of the settings and all its drafts on the target's device.

    Raises `SettingsError`, `CheckpointError` and `PairMismatchError`.
    """
    config = settings.engine_config(draft_fan_out=GROWTH.fan_out, draft_width=GROWTH.width)
    folder, log = find_model(config, config.target, "target"), get_logger("bench", "error")
    device = str(devices.target)
    loaded = {
        name: load_draft(replace(config, drafts=(name,)), name, device, native, log)
        for name in config.draft_models
    }
    features = tuple(dict.fromkeys(layer for each in loaded.values() for layer in each.description.features))
    wished = wish(settings.dtype, native, settings.batch_invariant, features)
    model = load_on(folder, devices.target, wished)
    name = model_name(folder)
    target = LoadedTarget(name, folder, model, native, Tokenizer(folder).vocabulary_hash())
    target.features = wished.features
    target.drafts = [
        RigDraft(hello_of(each, draft, f"draft-{place}", 1e-3), _Cores(each, f"draft-{place}"))
        for place, (draft, each) in enumerate(loaded.items())
    ]
    for draft in target.drafts:
        check_hello(target.hello, draft.hello)
    target.lookups = [
        partial(lookup_channel, name, config, target.hello, target.eos) for name in config.lookups
    ]
    return target
