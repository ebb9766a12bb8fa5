"""Selection of the draft source: by name, by a checkpoint's architecture, or a whole model."""

import json
from pathlib import Path
from typing import Any

import pytest

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import CheckpointError, SettingsError
from ssd_serve.base.logs import get_logger
from ssd_serve.drafter.sources import registry
from ssd_serve.drafter.sources.loading import SourceConfig
from ssd_serve.drafter.sources.registry import ANY_MODEL, SOURCES, is_source, registered_source

HERE = __name__


def load_named(_order: SourceConfig) -> Any:
    return "named"


def load_head(_order: SourceConfig) -> Any:
    return "head"


def load_any(_order: SourceConfig) -> Any:
    return "whole model"


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"lookup": "load_named", "HeadForCausalLM": "load_head", ANY_MODEL: "load_any"}
    monkeypatch.setattr(registry, "SOURCES", {name: f"{HERE}:{load}" for name, load in known.items()})


def loaded(name: str, folder: Path | None) -> Any:
    order = SourceConfig(
        config=EngineConfig(), folder=folder, device="cpu", native=None, log=get_logger("d0"), widths=[4]
    )
    return registered_source(name, folder).load(order)


def checkpoint(folder: Path, architectures: list[str] | None) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": architectures}), encoding="utf-8")
    return folder


def test_registered_names_are_sources_and_others_are_models() -> None:
    assert is_source("lookup")
    assert loaded("lookup", None) == "named"
    assert not any(map(is_source, ["*", "owner/name", "./lookup", ""]))


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (["HeadForCausalLM"], "head"),
        (["LlamaForCausalLM"], "whole model"),
        (["*"], "whole model"),
        ([], "whole model"),
        (None, "whole model"),
    ],
)
def test_architectures_select_the_source(
    architectures: list[str] | None, expected: str, tmp_path: Path
) -> None:
    assert loaded("owner/name", checkpoint(tmp_path, architectures)) == expected


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        loaded("owner/name", tmp_path)


def test_a_whole_model_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SOURCES", {"lookup": SOURCES[ANY_MODEL]})
    with pytest.raises(SettingsError, match="names no model"):
        loaded("lookup", None)
