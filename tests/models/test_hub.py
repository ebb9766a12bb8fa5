"""Finding models: embedded, folders, and a hub that answers, refuses, or is not there."""

import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ssd_serve.base.errors import CheckpointError, HubError, MemoryShortError
from ssd_serve.models import hub, hub_download

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": 500,
    "tokenizer.json": 1000,
    "README.md": 10,
    "model-00001-of-00002.safetensors": 6_000_000,
    "model-00002-of-00002.safetensors": 4_000_000,
    "model.safetensors.index.json": 100,
    "pytorch_model.bin": 10_000_000,
    "warp_model.bin": 100_000,
    "consolidated.safetensors": 10_000_000,
    "original/model.safetensors": 10_000_000,
}


class FakeHub:
    """Stands in for the hub client; remembers what was downloaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = dict(FILES)
        self.parameters: Any = None
        self.failure: Exception | None = None
        self.cached = False
        self.asked: list[str | None] = []
        self.downloads: list[dict[str, Any]] = []

    def model_info(self, name: str, **options: Any) -> Any:
        """Sizes of all files, or the failure."""
        inspect.signature(huggingface_hub.HfApi().model_info).bind(name, **options)
        self.asked.append(options["revision"])
        if self.failure is not None:
            raise self.failure
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in self.files.items()]
        return SimpleNamespace(siblings=siblings, sha="abc", safetensors=self.parameters)

    def snapshot_download(self, name: str, **options: Any) -> str:
        """A folder; the arguments must be those of the real function."""
        inspect.signature(huggingface_hub.snapshot_download).bind(name, **options)
        if options.get("local_files_only") and not self.cached:
            raise FileNotFoundError("not cached")
        self.downloads.append(options)
        return str(self.folder)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The hub is replaced and its cache is empty."""
    made = FakeHub(tmp_path)
    monkeypatch.setattr(hub_download, "HfApi", lambda token: made)
    monkeypatch.setattr(hub_download, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return made


def refused(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    """An error as the hub client raises it."""
    request = httpx.Request("GET", "https://huggingface.co/api/models/owner/name")
    response: Any = httpx.Response(status, request=request)  # the client has an HTTP library of its own
    return kind("refused", response=response)


def test_local_folder(tmp_path: Path) -> None:
    assert hub.resolve_model(str(tmp_path), "target") == tmp_path


def test_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "hub.py"))
    with pytest.raises(CheckpointError, match="no embedded draft"):
        hub.resolve_model("embedded", "draft")
    folder = tmp_path / "embedded" / "draft"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert hub.resolve_model("embedded", "draft") == folder
    with pytest.raises(CheckpointError, match="no embedded head"):
        hub.resolve_model("embedded-head", "draft")


@pytest.mark.parametrize(
    "name", ["no-such-folder", "/a/b/c", "a/b/c", "owner/", "./x", "owner/na me", "a/b@", "a/b@../c"]
)
def test_neither_folder_nor_id(name: str) -> None:
    with pytest.raises(CheckpointError, match="is neither a folder, a GGUF file, a hub id"):
        hub.resolve_model(name, "target")


def test_only_needed_files_are_fetched(fake: FakeHub) -> None:
    lines: list[str] = []
    assert hub.resolve_model("owner/name", "target", token="t", report=lines.append) == fake.folder
    assert lines == ["fetching owner/name (0.01 GB, unless cached)"]
    (options,) = fake.downloads
    assert (options["revision"], options["token"]) == ("abc", "t")
    assert sorted(options["allow_patterns"]) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "warp_model.bin",
    ]


def test_bin_files_are_not_downloaded_unless_allowed(fake: FakeHub) -> None:
    fake.files = {name: size for name, size in FILES.items() if "safetensors" not in name}
    with pytest.raises(HubError, match=r"no safetensors.*SSD_ALLOW_PICKLE=1"):
        hub.resolve_model("owner/name", "target")
    assert not fake.downloads
    hub.resolve_model("owner/name", "target", allow_pickle=True)
    assert "pytorch_model.bin" in fake.downloads[0]["allow_patterns"]
    fake.files = {"config.json": 100, "medusa_lm_head.pt": 1000}
    hub.resolve_model("owner/heads", "draft", allow_pickle=True)
    assert "medusa_lm_head.pt" in fake.downloads[1]["allow_patterns"]


def test_named_revision_is_looked_up(fake: FakeHub) -> None:
    hub.resolve_model("owner/name@v1.0", "target")
    hub.resolve_model("owner/name@refs/pr/7", "target")
    assert fake.asked == ["v1.0", "refs/pr/7"]
    assert [each["revision"] for each in fake.downloads] == ["abc", "abc"]  # the commit that it is today


def whole_snapshot(fake: FakeHub) -> Path:
    """A commit that lies in the cache."""
    folder = fake.folder / "cache" / "models--owner--name" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {str(number): file for number, file in enumerate(files)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in ("config.json", "tokenizer.json", *files):
        (folder / file).touch()
    return folder


def test_a_commit_in_the_cache_needs_no_hub(fake: FakeHub) -> None:
    fake.failure = refused(GatedRepoError, 403)
    folder = whole_snapshot(fake)
    assert hub.resolve_model(f"owner/name@{COMMIT}", "target") == folder
    assert not fake.asked
    with pytest.raises(HubError):
        hub.resolve_model(f"owner/name@{COMMIT}", "target", ask_hub=True)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(HubError):
        hub.resolve_model(f"owner/name@{COMMIT}", "target")


def test_folder_that_hides_a_hub_id_is_reported(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    assert hub.resolve_model("owner/name", "target", warn=lines.append) == Path("owner/name")
    assert str(tmp_path / "owner" / "name") in lines.pop()
    assert hub.resolve_model("./owner/name", "target", warn=lines.append) == Path("owner/name")
    assert not lines
    assert not fake.asked


def test_missing_revision(fake: FakeHub) -> None:
    fake.failure = refused(RevisionNotFoundError, 404)
    with pytest.raises(HubError, match="owner/name has no revision v9"):
        hub.resolve_model("owner/name@v9", "target")


def test_other_formats_are_refused(fake: FakeHub) -> None:
    fake.files = {"consolidated.00.pth": 1, "params.json": 1}
    with pytest.raises(HubError, match="original checkpoints"):
        hub.resolve_model("owner/name", "target")


QUANTISED = {
    "README.md": 1,
    "mmproj-m-f16.gguf": 5,
    "m-Q4_K_M.gguf": 4,
    "m-Q8_0-00001-of-00002.gguf": 8,
    "m-Q8_0-00002-of-00002.gguf": 8,
}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("owner/name", ["m-Q4_K_M.gguf"]),
        ("owner/name:q4_k_m", ["m-Q4_K_M.gguf"]),
        ("owner/name@v1:Q8_0", ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]),
    ],
)
def test_gguf_variant_is_downloaded_whole(fake: FakeHub, name: str, files: list[str]) -> None:
    fake.files = dict(QUANTISED)
    assert hub.resolve_model(name, "target") == fake.folder / files[0]
    assert fake.downloads[0]["allow_patterns"] == files


def test_unknown_gguf_variant_lists_the_files(fake: FakeHub) -> None:
    fake.files = dict(QUANTISED)
    with pytest.raises(HubError, match="holds m-Q4_K_M, m-Q8_0: name one as owner/name:Q4_K_M"):
        hub.resolve_model("owner/name:Q6_K", "target")
    fake.files = dict(FILES)
    with pytest.raises(HubError, match="has no GGUF files"):
        hub.resolve_model("owner/name:Q6_K", "target")


def test_cached_gguf_commit_needs_no_hub(fake: FakeHub, tmp_path: Path) -> None:
    fake.failure = refused(GatedRepoError, 403)
    folder = tmp_path / "cache" / "models--owner--name" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for file in QUANTISED:
        (folder / file).touch()
    assert hub.resolve_model(f"owner/name@{COMMIT}:Q8_0", "target") == folder / "m-Q8_0-00001-of-00002.gguf"
    (folder / "m-Q8_0-00002-of-00002.gguf").unlink()
    with pytest.raises(HubError):
        hub.resolve_model(f"owner/name@{COMMIT}:Q8_0", "target")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refused(GatedRepoError, 403), "gated. Accept its terms"),
        (refused(HfHubHTTPError, 403), "gated. Accept its terms"),
        (refused(RepositoryNotFoundError, 401), r"\(401\): the name is wrong, or it is private and HF_TOKEN"),
        (refused(HfHubHTTPError, 401), r"\(401\)"),
        (refused(RepositoryNotFoundError, 404), r"\(404\)"),
        (refused(HfHubHTTPError, 500), "answered 500"),
    ],
)
def test_refusals_are_explained(fake: FakeHub, error: Exception, message: str) -> None:
    fake.failure = error
    with pytest.raises(HubError, match=message):
        hub.resolve_model("owner/name", "target")
    assert not fake.downloads


def test_offline(fake: FakeHub) -> None:
    fake.failure = httpx.ConnectError("no route")
    with pytest.raises(HubError, match="cannot reach the hub"):
        hub.resolve_model("owner/name", "target")
    fake.cached = True
    lines: list[str] = []
    assert hub.resolve_model("owner/name@v1", "target", warn=lines.append) == fake.folder
    assert fake.downloads[0]["revision"] == "v1"
    assert f"owner/name@v1 is the cached revision {fake.folder.name}" in lines[0]


def test_memory_is_checked_before_the_download(fake: FakeHub) -> None:
    with pytest.raises(MemoryShortError, match="nothing was downloaded"):
        hub.resolve_model("owner/name", "target", free_memory=4_900_000)
    assert not fake.downloads
    hub.resolve_model("owner/name", "target", free_memory=5_100_000)  # stored in fp32, it fits in bf16
    fake.parameters = SimpleNamespace(total=5_000_000)
    with pytest.raises(MemoryShortError):
        hub.resolve_model("owner/name", "target", free_memory=9_900_000)


def test_disk_is_checked_before_the_download(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    with pytest.raises(HubError, match="on disk"):
        hub.resolve_model("owner/name", "target")
    snapshot = fake.folder / "cache" / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in FILES:
        if "/" not in file:
            (snapshot / file).touch()
    assert hub.resolve_model("owner/name", "target") == fake.folder  # cached: needs no room


def test_interrupted_download(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **options: Any) -> str:
        raise OSError("connection reset")

    monkeypatch.setattr(hub_download, "snapshot_download", fail)
    with pytest.raises(HubError, match="start again to resume"):
        hub.resolve_model("owner/name", "target")


def test_model_here_needs_all_files(tmp_path: Path) -> None:
    assert hub.model_here("embedded", "target") == hub.embedded_folder("target")
    assert hub.model_here(str(tmp_path), "target") == tmp_path
    for elsewhere in ("owner/name", f"owner/name@{'a' * 40}", "./nowhere"):
        assert hub.model_here(elsewhere, "target") is None
