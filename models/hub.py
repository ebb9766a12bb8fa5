"""Where a model's files are: the embedded pair, a local folder, or a download from the Hugging Face hub.

Before anything is downloaded its size is compared with the free disk and memory. Free of torch. Knows the
names of files that matter; knows nothing of what is in them.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from ssd_serve.errors import CheckpointError, HubError, MemoryShortError
from ssd_serve.settings import EMBEDDED

Role = Literal["target", "draft"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|tokenizer\.model"
    r"|special_tokens_map\.json|chat_template\.(jinja|json)"
)
_SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_TORCH = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a download would fetch."""

    revision: str
    files: list[str]
    download_bytes: int
    least_memory: int
    """Bytes that the weights need at least, once loaded: two for each number."""


def resolve_model(
    name: str,
    role: Role,
    *,
    token: str | None = None,
    free_memory: int | None = None,
    report: Callable[[str], None] | None = None,
) -> Path:
    """The folder of a model, downloaded if need be.

    `name` is `embedded`, a folder, or a hub id `owner/name`. `token` is used for gated models (None: the hub
    client's own login). `free_memory` in bytes, where known, is compared with the weights before a download.
    `report` gets a line for people. Raises `CheckpointError`, `HubError` or `MemoryShortError`.
    """
    if name == EMBEDDED:
        return embedded_folder(role)
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"{name} is neither a folder nor a hub id such as owner/name")
    return _from_hub(name, token, free_memory, report)


def embedded_folder(role: Role) -> Path:
    """The folder of the embedded pair's target or draft."""
    folder = Path(__file__).resolve().parent / "embedded" / role
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"this installation has no embedded {role} model ({folder} is empty)")
    return folder


def _from_hub(
    name: str, token: str | None, free_memory: int | None, report: Callable[[str], None] | None
) -> Path:
    try:
        plan = _look_up(name, token)
    except HfHubHTTPError as error:
        raise HubError(_explain(name, error)) from error
    except HubError:
        raise
    except Exception as error:  # no network: which class that is depends on the hub client's HTTP library
        return _cached(name, error)
    _check_room(name, plan, free_memory)
    if report is not None:
        report(f"fetching {name} ({plan.download_bytes / 1e9:.2f} GB, unless cached)")
    try:
        return Path(snapshot_download(name, revision=plan.revision, allow_patterns=plan.files, token=token))
    except HfHubHTTPError as error:
        raise HubError(_explain(name, error)) from error
    except Exception as error:
        raise HubError(f"the download of {name} failed: {error}; start again to resume it") from error


def _look_up(name: str, token: str | None) -> _Plan:
    """Ask the hub which files there are, and choose those that are needed."""
    info = HfApi(token=token).model_info(name, files_metadata=True)
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
    weights = [file for file in sizes if _SAFETENSORS.fullmatch(file)]
    weights = weights or [file for file in sizes if _TORCH.fullmatch(file)]
    if not weights or "config.json" not in sizes:
        raise HubError(
            f"{name} on the hub has no config.json with model.safetensors or pytorch_model.bin beside it; "
            "other formats (GGUF, original checkpoints, adapters) are not supported"
        )
    stored = sum(sizes[file] for file in weights)
    files = [file for file in sizes if _SMALL.fullmatch(file)] + weights
    return _Plan(
        revision=info.sha or "main",
        files=files,
        download_bytes=sum(sizes[file] for file in files),
        least_memory=2 * info.safetensors.total if info.safetensors else stored // 2,
    )


def _check_room(name: str, plan: _Plan, free_memory: int | None) -> None:
    if free_memory is not None and plan.least_memory > free_memory:
        raise MemoryShortError(
            f"{name} needs at least {plan.least_memory / 1e9:.1f} GB of memory and "
            f"{free_memory / 1e9:.1f} GB are free; nothing was downloaded"
        )
    folder = Path(HF_HUB_CACHE)
    cached = folder / f"models--{name.replace('/', '--')}" / "snapshots" / plan.revision
    missing = 0 if all((cached / file).exists() for file in plan.files) else plan.download_bytes
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise HubError(
            f"{name} needs {missing / 1e9:.1f} GB on disk and {free / 1e9:.1f} GB are free at {folder}; "
            "free some, or point HF_HOME to another disk"
        )


def _cached(name: str, error: Exception) -> Path:
    """Without a network, an earlier download will do."""
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:
        raise HubError(
            f"cannot reach the hub to fetch {name} ({error}), and it is not in the local cache; "
            "check the network, or give a local folder"
        ) from error


def _explain(name: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if isinstance(error, GatedRepoError) or status == 403:
        return (
            f"the hub refuses access to {name} (403): it is gated. Accept its terms at "
            f"https://huggingface.co/{name} with your account, and set HF_TOKEN to a token of that account"
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return (
            f"the hub does not show {name} ({status or 404}): the name is wrong, or it is private and "
            "HF_TOKEN is missing or has no right to it"
        )
    return f"the hub answered {status} for {name}: {error}"
