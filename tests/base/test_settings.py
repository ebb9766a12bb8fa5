"""Tests of settings: precedence flag > variable > default, clear errors, and secrets that stay secret."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.app.cli.output import as_env
from ssd_serve.base.engine_config import EMBEDDED, Mode
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import (
    flag_name,
    origins,
    read_config,
    refuse_empty_keys,
    resolve,
    resolve_arguments,
    visible_gpus,
)


def test_flag_overrides_variable_overrides_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve({}).port == 8000
    monkeypatch.setenv("SSD_PORT", "9000")
    assert resolve({}).port == 9000
    assert resolve({"port": "9100"}).port == 9100


@pytest.mark.parametrize(
    ("name", "listed", "given"),
    [
        (
            "cors_origins",
            ["https://a.example", "HTTP://b.example:80"],
            "https://a.example, http://b.example:80",
        ),
        ("allowed_hosts", ["a.example", "[::1]"], "A.example ,::1"),
    ],
)
def test_json_list_and_commas_are_equal_and_shown_readable(
    name: str, listed: list[str], given: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({name: listed}))
    settings = resolve({}, config=read_config(file))
    value = getattr(settings, name)
    assert value == getattr(resolve({name: given}), name)
    (shown,) = (row.shown for row in origins(settings, {}, [name]) if row.name == name)
    assert getattr(resolve({name: shown}), name) == value


def test_every_setting_has_a_variable_and_a_description() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert name == name.lower()


def test_variables_of_kubernetes_services_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("SSD", "SSD_SERVE"):
        monkeypatch.setenv(f"{service}_SERVICE_HOST", "10.0.0.1")
        monkeypatch.setenv(f"{service}_SERVICE_PORT_HTTP", "8000")
        monkeypatch.setenv(f"{service}_PORT", "tcp://10.0.0.1:9000")
        monkeypatch.setenv(f"{service}_PORT_9000_TCP_ADDR", "10.0.0.1")
    assert resolve({}).port == 8000
    assert resolve({"port": "7000"}).port == 7000
    monkeypatch.setenv("SSD_METRIC_PORT", "9000")
    with pytest.raises(SettingsError, match="did you mean SSD_METRICS_PORT"):
        resolve({})


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("SSD_PROT", "; did you mean SSD_PORT"),
        ("SSD_EMULATE", "; use SSD_MODEL_WRAPPER=ssd_serve.bench.emulated:device:TABLE instead"),
        ("SSD_API_WORKERS", "; run replicas instead"),
        ("SSD_RECORD", "; report requests with their seeds"),
    ],
)
def test_unknown_variable_error_names_what_to_do(
    variable: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingsError, match=f"{variable} is not a setting{message}"):
        resolve({})


@pytest.mark.parametrize(
    ("name", "message"),
    [("emulate", "; use model_wrapper=ssd_serve.bench"), ("api_workers", "; run replicas instead")],
)
def test_unknown_argument_error_names_what_to_do(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"no setting {name}{message}"):
        resolve_arguments({name: 4})


def test_invalid_value_error_names_flag_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="the flag --port: input should be"):
        resolve({"port": "many"})
    monkeypatch.setenv("SSD_MODE", "fast")
    with pytest.raises(SettingsError, match="the variable SSD_MODE: input should be 'ar', 'sd'"):
        resolve({})


def test_empty_variables_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_CONTEXT", "")
    settings = resolve({})
    assert settings.context is None
    assert {row.name: row.origin for row in origins(settings, {})}["context"] == "default"


@pytest.mark.parametrize("name", ["api_key", "metrics_key"])
def test_keys_are_stripped_and_never_empty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"SSD_{name.upper()}"
    monkeypatch.setenv(variable, " sesame\n")
    assert getattr(resolve({}), name) == "sesame"
    refuse_empty_keys()
    monkeypatch.setenv(variable, "\n")
    with pytest.raises(SettingsError, match=f"{variable}: is empty"):
        resolve({})
    with pytest.raises(SettingsError, match=f"{flag_name(name)}: is empty"):
        resolve({name: ""})
    monkeypatch.setenv(variable, "")
    resolve({})  # a drafter's process needs no key
    with pytest.raises(SettingsError, match=f"{variable} is set but empty: give it a value, or take it away"):
        refuse_empty_keys()


def test_origins_and_masked_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_API_KEY", "sesame")
    monkeypatch.setenv("SSD_MODE", "sd")
    flags = {"port": "1"}
    rows = {row.name: row for row in origins(resolve(flags), flags)}
    assert (rows["port"].origin, rows["port"].shown) == ("flag", "1")
    assert (rows["api_key"].origin, rows["api_key"].shown) == ("variable", "****")
    assert (rows["mode"].origin, rows["mode"].shown) == ("variable", "sd")
    assert (rows["draft"].origin, rows["draft"].shown) == ("default", "-")


def test_env_output_sets_changed_settings_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSD_TARGET")
    monkeypatch.setenv("SSD_API_KEY", "sesame")
    flags = {"port": "1", "served_model_name": "my model"}
    lines = as_env(origins(resolve(flags), flags)).splitlines()
    assert [line for line in lines if line.startswith("SSD_")] == [
        "SSD_PORT=1",
        "SSD_SERVED_MODEL_NAME='my model'",
    ]
    assert {"#SSD_API_KEY=", "#SSD_MODE=auto"} <= set(lines)


def test_hub_token_has_two_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a")
    assert resolve({}).hf_token == "a"
    assert {row.name: row.origin for row in origins(resolve({}), {})}["hf_token"] == "variable"
    monkeypatch.setenv("SSD_HF_TOKEN", "b")
    assert resolve({}).hf_token == "b"
    assert resolve({"hf_token": "c"}).hf_token == "c"


def test_secrets_are_not_in_errors() -> None:
    with pytest.raises(SettingsError) as caught:
        resolve({"hf_token": ["sesame"], "port": "x"})
    assert "sesame" not in str(caught.value)


@given(st.integers(0, 65535), st.sampled_from(Mode), st.booleans(), st.none() | st.integers(16, 4096))
def test_settings_json_round_trip(port: int, mode: Mode, grow_first: bool, context: int | None) -> None:
    settings = Settings(port=port, mode=mode, grow_first=grow_first, context=context, hf_token="t")
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_default_drafts() -> None:
    assert Settings().draft_model == EMBEDDED
    assert Settings(target="/models/x").drafts == ("ngram",)
    assert Settings(target="/models/x", drafters=0).drafts == ()
    assert Settings(draft="none").drafts == ()
    assert Settings(target="/models/x").draft_model is None
    assert Settings(target="/models/x", draft="/models/y").draft_model == "/models/y"


def test_drafts_are_models_and_lookups() -> None:
    settings = Settings(draft="/models/y, ngram ,owner/z")
    assert settings.draft_models == ("/models/y", "owner/z")
    assert settings.lookups == ("ngram",)
    assert settings.drafter_count == 2
    with pytest.raises(ValueError, match="'none' stands alone"):
        Settings(draft="none,ngram")


@pytest.mark.parametrize(
    ("hip", "cuda", "rocr", "seen"),
    [
        ("", "", "", None),
        ("0,1", "", "", "0,1"),
        ("", "2", "", "2"),
        ("3,4", "3,4", "", "3,4"),
        ("1", None, "0,1", "1"),
        ("0,1", "1,0", "", "HIP_VISIBLE_DEVICES=0,1 and CUDA_VISIBLE_DEVICES=1,0 differ"),
        (None, None, "0,1", "set HIP_VISIBLE_DEVICES instead of ROCR_VISIBLE_DEVICES"),
    ],
)
def test_visible_gpus_of_rocm_and_cuda(
    hip: str | None, cuda: str | None, rocr: str, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, value in (("HIP", hip), ("CUDA", cuda), ("ROCR", rocr)):
        monkeypatch.delenv(f"{kind}_VISIBLE_DEVICES", raising=False)
        if value is not None:
            monkeypatch.setenv(f"{kind}_VISIBLE_DEVICES", value)
    if seen is not None and "VISIBLE" in seen:
        with pytest.raises(SettingsError, match=seen):
            visible_gpus()
    else:
        assert (visible_gpus() or None) == seen


@pytest.mark.parametrize("key", ["a" * 64, "0123456789abcde", "12341234123412341234", " \n"])
def test_weak_cluster_key_is_refused(key: str) -> None:
    with pytest.raises(SettingsError, match="openssl rand -hex 32") as refused:
        resolve({"cluster_key": key})
    assert key.strip() not in str(refused.value) or not key.strip()
    assert resolve({"cluster_key": "0123456789abcdef\n"}).cluster_key == "0123456789abcdef"
