"""Tests of settings: precedence flag > variable > default, clear errors, and secrets that stay secret."""

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
    refuse_empty_keys,
    resolve,
    resolve_arguments,
    visible_gpus,
)


def test_a_flag_beats_a_variable_beats_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve({}).port == 8000
    monkeypatch.setenv("SSD_PORT", "9000")
    assert resolve({}).port == 9000
    assert resolve({"port": "9100"}).port == 9100


def test_every_setting_has_a_variable_and_a_description() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert name == name.lower()


def test_what_kubernetes_sets_for_a_service_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_unknown_variable_is_an_error_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_PROT", "9000")
    with pytest.raises(SettingsError, match="SSD_PROT is not a setting; did you mean SSD_PORT"):
        resolve({})


def test_a_setting_that_is_gone_is_an_error_that_names_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_EMULATE", "mi300x-70b-1b")
    use = "use SSD_MODEL_WRAPPER=ssd_serve.bench.emulated:device:TABLE instead"
    with pytest.raises(SettingsError, match=f"SSD_EMULATE is not a setting; {use}"):
        resolve({})
    with pytest.raises(SettingsError, match=r"no setting emulate; use model_wrapper=ssd_serve\.bench"):
        resolve_arguments({"emulate": "mi300x-70b-1b"})


def test_removed_setting_error_names_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_API_WORKERS", "4")
    with pytest.raises(SettingsError, match="SSD_API_WORKERS is not a setting; run replicas instead"):
        resolve({})
    with pytest.raises(SettingsError, match="no setting api_workers; run replicas instead"):
        resolve_arguments({"api_workers": 4})


def test_removed_setting_without_successor_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_RECORD", "/tmp/recordings")
    with pytest.raises(SettingsError, match="SSD_RECORD is not a setting; report requests with their seeds"):
        resolve({})


def test_a_wrong_value_names_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_keys_lose_the_newline_of_the_file_they_come_from_and_are_never_empty(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_env_file_has_what_is_in_force_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_API_KEY", "sesame")
    flags = {"port": "1", "served_model_name": "my model"}
    lines = as_env(origins(resolve(flags), flags)).splitlines()
    assert [line for line in lines if line.startswith("SSD_")] == [
        "SSD_PORT=1",
        "SSD_SERVED_MODEL_NAME='my model'",
    ]
    assert {"#SSD_API_KEY=", "#SSD_MODE=auto"} <= set(lines)


def test_the_hub_token_has_two_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a")
    assert resolve({}).hf_token == "a"
    assert {row.name: row.origin for row in origins(resolve({}), {})}["hf_token"] == "variable"
    monkeypatch.setenv("SSD_HF_TOKEN", "b")
    assert resolve({}).hf_token == "b"
    assert resolve({"hf_token": "c"}).hf_token == "c"


def test_a_secret_never_appears_in_an_error() -> None:
    with pytest.raises(SettingsError) as caught:
        resolve({"hf_token": ["sesame"], "port": "x"})
    assert "sesame" not in str(caught.value)


@given(st.integers(0, 65535), st.sampled_from(Mode), st.booleans(), st.none() | st.integers(16, 4096))
def test_workers_get_equal_settings(port: int, mode: Mode, grow_first: bool, context: int | None) -> None:
    settings = Settings(port=port, mode=mode, grow_first=grow_first, context=context, hf_token="t")
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_the_embedded_target_brings_its_draft() -> None:
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
    ("hip", "cuda", "seen"), [("", "", None), ("0,1", "", "0,1"), ("", "2", "2"), ("3,4", "3,4", "3,4")]
)
def test_rocm_and_cuda_show_their_gpus_by_either_variable(
    hip: str, cuda: str, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", hip)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cuda)
    assert (visible_gpus() or None) == seen


def test_variables_that_contradict_each_other_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    with pytest.raises(SettingsError, match="HIP_VISIBLE_DEVICES=0,1 and CUDA_VISIBLE_DEVICES=1,0 differ"):
        visible_gpus()


def test_the_variable_that_ray_refuses_alone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SettingsError, match="set HIP_VISIBLE_DEVICES instead of ROCR_VISIBLE_DEVICES"):
        visible_gpus()
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert visible_gpus() == "1"


@pytest.mark.parametrize("key", ["a" * 64, "0123456789abcde", "12341234123412341234", " \n"])
def test_a_cluster_key_that_was_not_drawn_is_refused_with_what_draws_one(key: str) -> None:
    with pytest.raises(SettingsError, match="openssl rand -hex 32") as refused:
        resolve({"cluster_key": key})
    assert key.strip() not in str(refused.value) or not key.strip()


def test_a_cluster_key_from_a_file_may_end_with_a_line_break() -> None:
    assert resolve({"cluster_key": "0123456789abcdef\n"}).cluster_key == "0123456789abcdef"
