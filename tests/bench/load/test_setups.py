"""Who runs on what: the same target device for every mode, and command lines that mean the same settings."""

import pytest

from ssd_serve.app.cli.flags import given_flags
from ssd_serve.app.cli.main import build_parser
from ssd_serve.base.devices import Device, Machine
from ssd_serve.base.engine_settings import Mode
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve
from ssd_serve.bench.emulated import emulating
from ssd_serve.bench.load.groups import ALL, SAME
from ssd_serve.bench.load.servers import serve_flags
from ssd_serve.bench.load.setups import setups
from ssd_serve.cluster.placement import place

MODES = ("ar", "sd", "ssd", "auto")
EMULATED = emulating("mi300x-70b-1b")
TWO_CORES = Machine((0, 1), 0)


def test_every_mode_has_the_same_target_device() -> None:
    found = setups(Settings(), MODES, "same", TWO_CORES)
    assert tuple(found.servers) == SAME
    placements = {name: place(own, TWO_CORES) for name, own in found.servers.items()}
    assert {str(placement.target) for placement in placements.values()} == {"cpu:0"}
    assert {placement.alone for placement in placements.values()} == {None}
    assert [placements[mode].mode.value for mode in ("ar", "sd", "ssd")] == ["ar", "sd", "ssd"]
    assert str(placements["ssd"].draft) == str(placements["auto"].draft) == "cpu:1"
    assert placements["ar"].draft is None
    assert found.described() == {"target_device": "cpu:0", "draft_device": "cpu:1", "client_device": "cpu:1"}


def test_with_all_devices_a_target_has_what_no_drafter_needs() -> None:
    found = setups(Settings(), MODES, "all", TWO_CORES)
    assert tuple(found.servers) == ALL
    plain, inline, beside, auto = (place(own, TWO_CORES) for own in found.servers.values())
    assert (str(plain.target), plain.draft, plain.mode) == ("cpu:0-1", None, Mode.AR)
    assert (str(inline.target), inline.draft, inline.mode) == ("cpu:0-1", None, Mode.SD)
    assert (str(beside.target), str(beside.draft), beside.alone) == ("cpu:0", "cpu:1", None)
    assert (str(auto.target), str(auto.draft), str(auto.alone)) == ("cpu:0", "cpu:1", "cpu:0-1")


def test_both_comparisons_share_the_mode_that_is_the_same_in_both() -> None:
    servers = setups(Settings(), ("ar", "ssd", "auto"), "both", TWO_CORES).servers
    assert list(servers) == ["ar", "ssd", "auto", "ar-all-devices", "auto-all-devices"]


def test_only_auto_may_stop_speculating() -> None:
    servers = setups(Settings(), MODES, "both", TWO_CORES).servers
    governed = {name for name, own in servers.items() if own.speculation_may_stop}
    assert governed == {"auto", "auto-all-devices"}


def test_devices_that_were_named_are_used() -> None:
    settings = Settings(target_device="cpu:1-2", draft_device="cpu:0")
    found = setups(settings, MODES, "both", Machine((0, 1, 2, 3), 0))
    assert found.servers["ssd"].target_device == "cpu:1-2"
    assert found.servers["ar-all-devices"].target_device == "cpu:0-2"
    assert found.client == Device("cpu", (0, 3))


def test_emulated_devices_and_gpus_have_no_second_table() -> None:
    two_gpus = Machine((0, 1), 2)
    for settings, machine in (
        (Settings(model_wrapper=EMULATED), TWO_CORES),
        (Settings(), two_gpus),
    ):
        assert tuple(setups(settings, MODES, "both", machine).servers) == SAME
        with pytest.raises(UserError, match="choose --devices same"):
            setups(settings, MODES, "all", machine)
    gpus = setups(Settings(), MODES, "same", two_gpus)
    assert (str(gpus.target), str(gpus.draft), gpus.client) == ("cuda:0", "cuda:1", None)


def test_a_client_without_a_core_of_its_own_runs_anywhere() -> None:
    assert setups(Settings(), ("ar",), "same", Machine((0,), 0)).client is None


@pytest.mark.parametrize(
    "settings",
    [
        Settings(mode=Mode.SSD, target_device="cpu:0", prefix_cache=False, budget=3, port=0),
        Settings(mode=Mode.AR, model_wrapper=EMULATED, grow_first=False, log_level="warning"),
    ],
)
def test_a_command_line_gives_the_server_these_settings(settings: Settings) -> None:
    args = build_parser().parse_args(["serve", *serve_flags(settings)])
    assert resolve(given_flags(args)) == settings


def test_secrets_are_not_on_a_command_line() -> None:
    flags = serve_flags(Settings(api_key="hush", hf_token="hush too"))
    assert not any("hush" in flag for flag in flags)
    assert "--api-key" not in flags
