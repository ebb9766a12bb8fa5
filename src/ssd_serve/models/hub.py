"""Finds a model's files: the embedded pair, a local path, or what was downloaded from the Hugging Face hub.

Imports the hub's client only to download. Free of torch. Knows the names of files that matter; knows nothing of what
is in them.
"""

import json
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Literal

from huggingface_hub.constants import HF_HUB_CACHE

from ssd_serve.base.engine_config import EMBEDDED, EMBEDDED_HEAD, EngineConfig
from ssd_serve.base.errors import CheckpointError, HubError
from ssd_serve.base.names import HubId, hub_id, suggestion
from ssd_serve.models.short_names import BUILT_IN, ShortNames
from ssd_serve.models.weights.formats import recognised
from ssd_serve.models.weights.gguf.file import files_of

Role = Literal["target", "draft"]

SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|medusa_lm_head\.safetensors")
PICKLES = (
    "such files are pickles, which can run code of their author: take a revision with safetensors "
    "(owner/name@revision), or set SSD_ALLOW_PICKLE=1 if you trust where they come from"
)
_GGUF = re.compile(r"(?!mmproj)([\w.+-]+?)(-\d{5}-of-(\d{5}))?\.gguf")
"""Names of GGUF files: the model's, and its parts where it is split."""
_DEFAULT_VARIANT = "q4_k_m"


def resolve_model(
    name: str,
    role: Role,
    *,
    token: str | None = None,
    allow_pickle: bool = False,
    free_memory: int | None = None,
    report: Callable[[str], None] = lambda _line: None,
    warn: Callable[[str], None] = lambda _line: None,
    ask_hub: bool = False,
    short_names: Collection[str] = tuple(BUILT_IN),
) -> Path:
    """Return the folder of a model, or its first GGUF file, downloaded if need be.

    `name` is `embedded`, `embedded-head`, a folder, a GGUF file, or a hub id `owner/name`; `ShortNames` expands
    others. A hub id may end with `@revision` for another state than the newest, and with `:variant` (`:Q4_K_M`)
    for one of several GGUF files. `short_names` are listed where the name is unknown.
    `token` is used for gated models (None: the hub client's own login). `allow_pickle`: weights may be `.bin` files.
    `free_memory` in bytes, where known, is compared with the weights before a download. `report` and `warn`
    get lines for people. A commit that lies whole in the cache is taken without asking the hub, unless
    `ask_hub`. Raises `CheckpointError`, `HubError` or `MemoryShortError`.
    """
    if (embedded := embedded_model(name, role)) is not None:
        return embedded
    wanted, local = hub_id(name), local_model(name)
    if local is not None:
        if wanted is not None:
            warn(f"{name} is the folder {local.absolute()}, not the hub's model; ./{name} says so clearly")
        return local
    if name.endswith(".gguf"):
        raise CheckpointError(f"there is no file {Path(name).expanduser().absolute()}")
    if wanted is None:
        raise CheckpointError(
            f"the {role} {name} is neither a folder, a GGUF file, a hub id such as owner/name, nor one of "
            f"{', '.join((*short_names, EMBEDDED))}{suggestion(name, (*short_names, EMBEDDED))}"
        )
    if wanted.commit and not ask_hub and (found := _complete(wanted)) is not None:
        return found
    from ssd_serve.models.hub_download import download  # which imports the hub's client: 10 MB, 0.2 s

    return download(wanted, token, allow_pickle, free_memory, report, warn)


def find_model(
    config: EngineConfig,
    name: str,
    role: Role,
    report: Callable[[str], None] = lambda _line: None,
) -> Path:
    """The folder of a model with the short names and the rights that the settings give. See `resolve_model`."""
    names = ShortNames(config.models_file, config.cache_dir)
    return resolve_model(
        names.expand(name, report),
        role,
        token=config.hf_token,
        allow_pickle=config.allow_pickle,
        report=report,
        short_names=names.table(),
    )


def model_here(name: str, role: Role) -> Path | None:
    """Return the folder of a model that is complete on this machine, else None. The name of a hub model
    must include its commit."""
    if name in (EMBEDDED, EMBEDDED_HEAD) or local_model(name) is not None:
        return resolve_model(name, role)
    wanted = hub_id(name)
    return None if wanted is None or not wanted.commit else _complete(wanted)


def local_model(name: str) -> Path | None:
    """Return the folder, or the file in a format that is known, of this name on this machine."""
    local = Path(name).expanduser()
    return local if local.is_dir() or recognised(local) is not None else None


def embedded_model(name: str, role: Role) -> Path | None:
    """Return the folder of a model that comes with this package; None for any other name."""
    if name == EMBEDDED_HEAD:
        return embedded_folder("head")
    return embedded_folder(role) if name == EMBEDDED else None


def embedded_folder(role: Role | Literal["head"]) -> Path:
    """The folder of the embedded pair's target or draft, or of the target's head."""
    folder = Path(__file__).resolve().parent / "embedded" / role
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"this installation has no embedded {role} model ({folder} is empty)")
    return folder


def choose_gguf(model: HubId, files: list[str]) -> list[str]:
    """Return the parts of the wanted GGUF file among the files of a repository; none where it has none.

    Raises `HubError` where several files fit.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        if (name := _GGUF.fullmatch(file)) is not None:
            found.setdefault(name[1], []).append(file)
    wanted = (model.variant or (_DEFAULT_VARIANT if len(found) > 1 else "")).lower()
    fitting = [parts for name, parts in found.items() if wanted in name.lower()]
    exact = [parts for name, parts in found.items() if name.lower().endswith(wanted)]
    if len(chosen := fitting if len(fitting) == 1 else exact) == 1:
        return chosen[0]
    if found:
        raise HubError(
            f"{model} on the hub holds {', '.join(found)}: name one as {model.name}:{_DEFAULT_VARIANT.upper()}"
        )
    if model.variant:
        raise HubError(f"{model.name} on the hub has no GGUF files")
    return []


def snapshot(model: HubId) -> Path:
    return Path(HF_HUB_CACHE) / f"models--{model.name.replace('/', '--')}" / "snapshots" / f"{model.revision}"


def cached_model(model: HubId) -> Path | None:
    """Return the folder or first GGUF file of a model that is whole in the cache, else None. Does not ask the hub."""
    commit = model.commit
    if commit is None:
        with suppress(OSError):
            found = snapshot(model).parents[1] / "refs" / (model.revision or "main")
            commit = found.read_text(encoding="utf-8").strip()
    return None if not commit else _complete(HubId(model.name, commit, model.variant))


def _complete(model: HubId) -> Path | None:
    """Return the folder or file of a commit in the cache that seems to be whole, None without one."""
    folder = snapshot(model)
    if not folder.is_dir():
        return None
    try:
        found = downloaded(model, folder)
        whole = found != folder and bool(files_of(found))
    except (CheckpointError, HubError):
        return None
    return found if whole or _is_whole(folder) else None


def downloaded(model: HubId, folder: Path) -> Path:
    """Return a downloaded folder, or the first file of the wanted GGUF model in it."""
    weights = not model.variant and any(SAFETENSORS.fullmatch(file.name) for file in folder.iterdir())
    parts = [] if weights else choose_gguf(model, [file.name for file in folder.iterdir()])
    return folder / parts[0] if parts else folder


def _is_whole(folder: Path) -> bool:
    """Return True if a download of this commit seems to have come to its end."""
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set[str]()
    weights = {"model.safetensors"} if "model.safetensors" in names else {"pytorch_model.bin"}
    for index in names & {"model.safetensors.index.json", "pytorch_model.bin.index.json"}:
        weights = set(_listed(folder / index))
    return names >= {"config.json", *weights} and bool(names & {"tokenizer.json", "tokenizer.model"})


def _listed(index: Path) -> list[str]:
    """The files that an index of weights names."""
    try:
        return [str(file) for file in json.loads(index.read_bytes())["weight_map"].values()]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return ["a readable index"]
