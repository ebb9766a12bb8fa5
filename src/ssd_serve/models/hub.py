"""Finds a model's files: the embedded pair, a local path, or a download from the Hugging Face hub.

Before anything is downloaded its size is compared with the free disk and memory. Free of torch. Knows the
names of files that matter; knows nothing of what is in them.
"""

import json
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ssd_serve.base.engine_config import EMBEDDED, EMBEDDED_HEAD, EngineConfig
from ssd_serve.base.errors import CheckpointError, HubError, MemoryShortError, in_a_line
from ssd_serve.base.names import HubId, hub_id
from ssd_serve.base.settings_sources import suggestion
from ssd_serve.models.short_names import BUILT_IN, ShortNames
from ssd_serve.models.weights.formats import recognised
from ssd_serve.models.weights.gguf.file import files_of

Role = Literal["target", "draft"]

_SMALL = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|tokenizer\.model"
    r"|special_tokens_map\.json|added_tokens\.json|chat_template\.(jinja|json)"
    r"|additional_chat_templates/[\w.-]+\.jinja"
)
_SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
PICKLES = (
    "such files are pickles, which can run code of their author: take a revision with safetensors "
    "(owner/name@revision), or set SSD_ALLOW_PICKLE=1 if you trust where they come from"
)
_GGUF = re.compile(r"(?!mmproj)([\w.+-]+?)(-\d{5}-of-(\d{5}))?\.gguf")
"""Names of GGUF files: the model's, and its parts where it is split."""
_DEFAULT_VARIANT = "q4_k_m"
_TORCH = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")


@dataclass(frozen=True, slots=True)
class _Plan:
    """Files that a download would fetch."""

    revision: str
    files: list[str]
    download_bytes: int
    min_memory: int
    """Bytes that the weights need at least, once loaded: two for each number, or the size of GGUF files."""


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
            f"{name} is neither a folder, a GGUF file, a hub id such as owner/name, nor one of "
            f"{', '.join((*short_names, EMBEDDED))}{suggestion(name, (*short_names, EMBEDDED))}"
        )
    if wanted.commit and not ask_hub and (found := _complete(wanted)) is not None:
        return found
    return _from_hub(wanted, token, allow_pickle, free_memory, report, warn)


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


def _from_hub(
    model: HubId,
    token: str | None,
    allow_pickle: bool,
    free_memory: int | None,
    report: Callable[[str], None],
    warn: Callable[[str], None],
) -> Path:
    try:
        plan = _look_up(model, token, allow_pickle)
    except HfHubHTTPError as error:
        raise HubError(_explain(model, error)) from error
    except HubError:
        raise
    except Exception as error:  # no network: which class that is depends on the hub client's HTTP library
        folder = _cached(model, error)
        found = _downloaded(model, folder)
        warn(f"the hub cannot be reached ({in_a_line(error)}): {model} is the cached revision {folder.name}")
        return found
    _check_space(model, plan, free_memory)
    report(f"fetching {model} ({plan.download_bytes / 1e9:.2f} GB, unless cached)")
    try:
        folder = Path(
            snapshot_download(model.name, revision=plan.revision, allow_patterns=plan.files, token=token)
        )
        return folder / plan.files[0] if plan.files[0].endswith(".gguf") else folder
    except HfHubHTTPError as error:
        raise HubError(_explain(model, error)) from error
    except Exception as error:
        raise HubError(f"the download of {model} failed: {error}; start again to resume it") from error


def _look_up(model: HubId, token: str | None, allow_pickle: bool) -> _Plan:
    """Ask the hub which files there are, and choose those that are needed."""
    info = HfApi(token=token).model_info(model.name, revision=model.revision, files_metadata=True)
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
    weights = [] if model.variant else [file for file in sizes if _SAFETENSORS.fullmatch(file)]
    if not weights and (parts := _choose_gguf(model, list(sizes))):
        stored = sum(sizes[part] for part in parts)
        return _Plan(info.sha or model.revision or "main", parts, stored, stored)
    pickles = [] if weights else [file for file in sizes if _TORCH.fullmatch(file)]
    if not (weights or pickles) or "config.json" not in sizes:
        raise HubError(
            f"{model} on the hub has neither a GGUF file nor a config.json with model.safetensors or "
            "pytorch_model.bin beside it; other formats (original checkpoints, adapters) are not supported"
        )
    if pickles and not allow_pickle:
        raise HubError(f"{model} on the hub has no safetensors, only .bin files; {PICKLES}")
    weights = weights or pickles
    stored = sum(sizes[file] for file in weights)
    files = [file for file in sizes if _SMALL.fullmatch(file)] + weights
    return _Plan(
        revision=info.sha or model.revision or "main",
        files=files,
        download_bytes=sum(sizes[file] for file in files),
        min_memory=2 * info.safetensors.total if info.safetensors else stored // 2,
    )


def _choose_gguf(model: HubId, files: list[str]) -> list[str]:
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


def _check_space(model: HubId, plan: _Plan, free_memory: int | None) -> None:
    if free_memory is not None and plan.min_memory > free_memory:
        raise MemoryShortError(
            f"{model} needs at least {plan.min_memory / 1e9:.1f} GB of memory and "
            f"{free_memory / 1e9:.1f} GB are free; nothing was downloaded"
        )
    folder = Path(HF_HUB_CACHE)
    cached = _snapshot(HubId(model.name, plan.revision))
    missing = 0 if all((cached / file).exists() for file in plan.files) else plan.download_bytes
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise HubError(
            f"{model} needs {missing / 1e9:.1f} GB on disk and {free / 1e9:.1f} GB are free at {folder}; "
            "free some, or point HF_HOME to another disk"
        )


def _snapshot(model: HubId) -> Path:
    return Path(HF_HUB_CACHE) / f"models--{model.name.replace('/', '--')}" / "snapshots" / f"{model.revision}"


def _complete(model: HubId) -> Path | None:
    """Return the folder or file of a commit in the cache that seems to be whole, None without one."""
    folder = _snapshot(model)
    if not folder.is_dir():
        return None
    try:
        found = _downloaded(model, folder)
        whole = found != folder and bool(files_of(found))
    except (CheckpointError, HubError):
        return None
    return found if whole or _is_whole(folder) else None


def _downloaded(model: HubId, folder: Path) -> Path:
    """Return a downloaded folder, or the first file of the wanted GGUF model in it."""
    weights = not model.variant and any(_SAFETENSORS.fullmatch(file.name) for file in folder.iterdir())
    parts = [] if weights else _choose_gguf(model, [file.name for file in folder.iterdir()])
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


def _cached(model: HubId, error: Exception) -> Path:
    try:
        return Path(snapshot_download(model.name, revision=model.revision, local_files_only=True))
    except Exception:
        raise HubError(
            f"cannot reach the hub to fetch {model} ({error}), and it is not in the local cache; "
            "check the network, or give a local folder"
        ) from error


def _explain(model: HubId, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if isinstance(error, GatedRepoError) or status == 403:
        return (
            f"the hub refuses access to {model} (403): it is gated. Accept its terms at "
            f"https://huggingface.co/{model.name} with your account, and set HF_TOKEN to a token of it"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the hub's {model.name} has no revision {model.revision}: name a branch, a tag or a commit"
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return (
            f"the hub does not show {model} ({status or 404}): the name is wrong, or it is private and "
            "HF_TOKEN is missing or has no right to it"
        )
    return f"the hub answered {status} for {model}: {error}"
