"""Who runs on what: the same target device for every mode, and command lines that mean the same settings."""

import pytest

from ssd_serve.bench.load_outcome import ALL_DEVICES
from ssd_serve.bench.load_servers import serve_flags
from ssd_serve.bench.load_setups import setups
from ssd_serve.cli import build_parser
from ssd_serve.cluster.placement import place
from ssd_serve.devices import Device, Machine
from ssd_serve.flags import given_flags
from ssd_serve.settings import Mode, Settings, resolve

MODES = ("ar", "sd", "ssd", "auto")
TWO_CORES = Machine((0, 1), 0)


def test_every_mode_has_the_same_target_and_plain_decoding_everything_once_more() -> None:
    found = setups(Settings(), MODES, True, TWO_CORES)
    assert list(found.servers) == [*MODES, ALL_DEVICES]
    placements = {name: place(own, TWO_CORES) for name, own in found.servers.items()}
    assert {str(placements[mode].target) for mode in MODES} == {"cpu:0"}
    assert [placements[mode].mode.value for mode in ("ar", "sd", "ssd")] == ["ar", "sd", "ssd"]
    assert str(placements["ssd"].draft) == "cpu:1"
    assert placements["ar"].draft is None
    assert str(placements[ALL_DEVICES].target) == "cpu:0-1"
    assert placements[ALL_DEVICES].mode is Mode.AR
    assert found.described() == {"target_device": "cpu:0", "draft_device": "cpu:1", "client_device": "cpu:1"}


def test_devices_that_were_named_are_used() -> None:
    settings = Settings(target_device="cpu:1-2", draft_device="cpu:0")
    found = setups(settings, ("ssd",), True, Machine((0, 1, 2, 3), 0))
    assert found.servers["ssd"].target_device == "cpu:1-2"
    assert found.servers[ALL_DEVICES].target_device == "cpu:0-2"
    assert found.client == Device("cpu", (0, 3))


def test_emulated_devices_and_gpus_have_no_second_table() -> None:
    emulated = setups(Settings(emulate="mi300x-70b-1b"), MODES, True, TWO_CORES)
    assert ALL_DEVICES not in emulated.servers
    gpus = setups(Settings(), MODES, True, Machine((0, 1), 2))
    assert ALL_DEVICES not in gpus.servers
    assert (str(gpus.target), str(gpus.draft), gpus.client) == ("cuda:0", "cuda:1", None)


def test_a_client_without_a_core_of_its_own_runs_anywhere() -> None:
    assert setups(Settings(), ("ar",), False, Machine((0,), 0)).client is None


@pytest.mark.parametrize(
    "settings",
    [
        Settings(mode=Mode.SSD, target_device="cpu:0", prefix_cache=False, budget=3, port=0),
        Settings(mode=Mode.AR, emulate="mi300x-70b-1b", grow_first=False, log_level="warning"),
    ],
)
def test_a_command_line_gives_the_server_these_settings(settings: Settings) -> None:
    args = build_parser().parse_args(["serve", *serve_flags(settings)])
    assert resolve(given_flags(args)) == settings


def test_secrets_are_not_on_a_command_line() -> None:
    flags = serve_flags(Settings(api_key="hush", hf_token="hush too"))
    assert not any("hush" in flag for flag in flags)
    assert "--api-key" not in flags
