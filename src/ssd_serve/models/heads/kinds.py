"""Detects the kind of head in a draft's folder, from its `config.json` and the names of its tensors.

EAGLE-1 heads are published with the `config.json` of a Llama of one layer: only their tensors tell them from
a draft model. Free of torch; reads no weights. Sources: the loaders of SafeAILab's EAGLE, SpecForge, SGLang,
vLLM and speculators.
"""

import pickletools
from enum import StrEnum
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from safetensors import SafetensorError, safe_open

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import Json, read_json
from ssd_serve.models.weights.formats import damaged_file, read_config


class HeadKind(StrEnum):
    """Heads that can draft."""

    EAGLE1 = "EAGLE-1"
    EAGLE3 = "EAGLE-3"
    PEAGLE = "P-EAGLE"
    """An EAGLE-3 head that guesses several positions."""
    PARD = "PARD"
    """A whole model that guesses several positions; PARD-2 too."""
    MEDUSA = "Medusa"
    HYDRA = "Hydra"
    GUMIHO = "Gumiho"
    DFLASH = "DFlash"
    """DFlash, DFlash 2 and DSpark."""


EAGLE_KINDS = frozenset({HeadKind.EAGLE1, HeadKind.EAGLE3})
_ALGORITHMS = {
    "eagle": HeadKind.EAGLE1,
    "eagle3": HeadKind.EAGLE3,
    "peagle": HeadKind.PEAGLE,
    **dict.fromkeys(("dflash", "dflash2", "dspark"), HeadKind.DFLASH),
}
"""Kinds by `speculators_model_type`."""
_ARCHITECTURES = {
    "EagleLlamaForCausalLM": HeadKind.EAGLE1,
    "EagleSpeculator": HeadKind.EAGLE1,
    "LlamaForCausalLMEagle": HeadKind.EAGLE1,
    "Eagle3DraftModel": HeadKind.EAGLE3,
    "Eagle3LlamaForCausalLM": HeadKind.EAGLE3,
    "Eagle3Speculator": HeadKind.EAGLE3,
    "LlamaForCausalLMEagle3": HeadKind.EAGLE3,
    "PEagleDraftModel": HeadKind.PEAGLE,
    "PeagleLlamaForCausalLM": HeadKind.PEAGLE,
    "MedusaModel": HeadKind.MEDUSA,
    "HydraModel": HeadKind.HYDRA,
    "DFlashDraftModel": HeadKind.DFLASH,
    "DFlash2DraftModel": HeadKind.DFLASH,
    "DSparkDraftModel": HeadKind.DFLASH,
    "Qwen3DSparkModel": HeadKind.DFLASH,
}
_KEYS = {
    "pard_token": HeadKind.PARD,
    "medusa_num_heads": HeadKind.MEDUSA,
    "hydra_num_heads": HeadKind.HYDRA,
    "draft_vocab_size": HeadKind.EAGLE3,
}
"""Kinds by keys that only their configurations have; the first one decides."""
_OTHERS = ("eagle", "medusa", "hydra", "mtp", "dflash", "dspark", "speculator")
"""Words in the names of other heads' architectures."""
_OTHER_KEYS = ("medusa_", "hydra_", "dflash_", "dspark_")
"""Prefixes of keys that only other heads have."""
MASK_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
"""Keys of a P-EAGLE head's mask token."""
GUMIHO_HEADS = frozenset({"mlp.0.0.linear.weight", "mlp.mlp.0.0.linear.weight"})
"""The first matrix of a Gumiho head's first head, in either layout."""
_FUSIONS = frozenset({"fc.weight", "fusion_fc.weight"})
_KNOWN = (
    "heads that can draft are EAGLE-1 (EAGLE-2 and HASS are alike), EAGLE-3 and EAGLE-3.1, as SafeAILab, "
    "SpecForge, SGLang, vLLM and speculators write them, P-EAGLE, PARD, Medusa, Hydra, Gumiho, DFlash, DFlash 2 and "
    "DSpark; other drafts are whole models, ngram, suffix and self:N"
)


def head_kind(folder: Path) -> HeadKind | None:
    """The kind of the head in a folder; None: a whole model. Raises `CheckpointError` for other heads."""
    raw = read_config(folder)
    declared = _declared(raw)
    if declared and not isinstance(declared, HeadKind):
        raise CheckpointError(f"the draft {folder} is a head of another kind ({declared}); {_KNOWN}")
    if declared and declared is not HeadKind.EAGLE3:
        return declared
    if declared and any(raw.get(key) is not None for key in MASK_KEYS):
        return HeadKind.PEAGLE
    names = {name.removeprefix("model.") for name in tensor_names(folder)}
    if _FUSIONS & names and GUMIHO_HEADS & names:  # with a reduced vocabulary its keys are EAGLE-3's
        return HeadKind.GUMIHO
    if declared or not _FUSIONS & names:
        return declared or None
    if any(name.endswith(".hidden_norm.weight") for name in names):
        return HeadKind.EAGLE3
    if other := sorted(name for name in names if name.startswith("layers.1.")):
        raise CheckpointError(f"the draft {folder} is a head of another kind (it has {other[0]}); {_KNOWN}")
    return HeadKind.EAGLE1


def _declared(raw: Json) -> HeadKind | str:
    algorithm, architectures = raw.get("speculators_model_type"), raw.get("architectures") or []
    if algorithm is not None:
        return _ALGORITHMS.get(algorithm, str(algorithm))
    for name in architectures:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    if found := next((kind for key, kind in _KEYS.items() if raw.get(key) is not None), None):
        return found
    if declared := next((key for key in raw if key.startswith(_OTHER_KEYS)), ""):
        return declared
    spoken = (*architectures, str(raw.get("model_type", "")))
    return next((each for each in spoken if any(word in each.lower() for word in _OTHERS)), "")


def tensor_names(folder: Path) -> set[str]:
    """The names of all tensors; none where pickles cannot be listed: loading them reports the reason.

    Raises `CheckpointError` for damaged safetensors.
    """
    try:
        for file in ("model.safetensors", "pytorch_model.bin"):
            if (index := folder / f"{file}.index.json").is_file():
                return set(read_json(index).get("weight_map", {}))
            if (path := folder / file).is_file():
                return _names_in(path)
    except SafetensorError as error:
        raise damaged_file(folder / "model.safetensors", error) from error
    except (OSError, BadZipFile, CheckpointError, KeyError, ValueError):
        pass
    return set()


def _names_in(path: Path) -> set[str]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="np") as opened:
            file: Any = opened
            return set(file.keys())
    with ZipFile(path) as archive:  # what is pickled there is listed, never run
        pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), "data.pkl")
        return {word for _, word, _ in pickletools.genops(archive.read(pickled)) if isinstance(word, str)}
