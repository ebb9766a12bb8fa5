"""Downloads models from the Hugging Face hub.

Before anything is downloaded its size is compared with the free disk and memory.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ssd_serve.base.errors import HubError, MemoryShortError, in_a_line
from ssd_serve.base.names import HubId
from ssd_serve.models.hub import PICKLES, SAFETENSORS, choose_gguf, downloaded, snapshot

_SMALL = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|tokenizer\.model"
    r"|special_tokens_map\.json|added_tokens\.json|chat_template\.(jinja|json)"
    r"|additional_chat_templates/[\w.-]+\.jinja|warp_model\.(bin|safetensors)"
)
_TORCH = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?|(medusa|hydra)_lm_head\.pt")


@dataclass(frozen=True, slots=True)
class _Plan:
    """Files that a download would fetch."""

    revision: str
    files: list[str]
    download_bytes: int
    min_memory: int
    """Bytes that the weights need at least, once loaded: two for each number, or the size of GGUF files."""


def download(
    model: HubId,
    token: str | None,
    allow_pickle: bool,
    free_memory: int | None,
    report: Callable[[str], None],
    warn: Callable[[str], None],
) -> Path:
    """Download what is missing of a model and return its folder or first GGUF file; see `resolve_model`."""
    try:
        plan = _look_up(model, token, allow_pickle)
    except HfHubHTTPError as error:
        raise HubError(_explain(model, error)) from error
    except HubError:
        raise
    except Exception as error:  # no network: which class that is depends on the hub client's HTTP library
        folder = _cached(model, error)
        found = downloaded(model, folder)
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
    weights = [] if model.variant else [file for file in sizes if SAFETENSORS.fullmatch(file)]
    if not weights and (parts := choose_gguf(model, list(sizes))):
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


def _check_space(model: HubId, plan: _Plan, free_memory: int | None) -> None:
    if free_memory is not None and plan.min_memory > free_memory:
        raise MemoryShortError(
            f"{model} needs at least {plan.min_memory / 1e9:.1f} GB of memory and "
            f"{free_memory / 1e9:.1f} GB are free; nothing was downloaded"
        )
    folder = cached = snapshot(HubId(model.name, plan.revision))
    missing = 0 if all((cached / file).exists() for file in plan.files) else plan.download_bytes
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise HubError(
            f"{model} needs {missing / 1e9:.1f} GB on disk and {free / 1e9:.1f} GB are free at {folder}; "
            "free some, or point HF_HOME to another disk"
        )


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
