"""Tests of the placement of processes on machines of every size, and of device names."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.base.devices import Device, Machine, parse_device
from ssd_serve.base.engine_config import EngineConfig, Mode, config_from_json
from ssd_serve.base.errors import CheckpointError, SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.placement import Placement, place, resolve_config


def cpu(*cores: int) -> Device:
    return Device("cpu", cores)


def gpu(index: int) -> Device:
    return Device("cuda", (index,))


def gpus(*indices: int) -> Device:
    return Device("cuda", indices)


def machine(cores: int, gpus: int = 0) -> Machine:
    return Machine(tuple(range(cores)), gpus)


@pytest.mark.parametrize(
    ("have", "mode", "expected"),
    [
        (machine(2), Mode.AUTO, Placement(Mode.SSD, cpu(0), cpu(1), cpu(1), cpu(0, 1))),
        (machine(4), Mode.SSD, Placement(Mode.SSD, cpu(0, 1, 2), cpu(3), cpu(3))),
        (machine(1), Mode.AUTO, Placement(Mode.SD, cpu(0), None, cpu(0))),
        (machine(1), Mode.SSD, Placement(Mode.SSD, cpu(0), cpu(0), cpu(0))),
        (machine(2), Mode.AR, Placement(Mode.AR, cpu(0, 1), None, cpu(0, 1))),
        (machine(2), Mode.SD, Placement(Mode.SD, cpu(0, 1), None, cpu(0, 1))),
        (machine(2, 1), Mode.AUTO, Placement(Mode.SD, gpu(0), None, cpu(0, 1))),
        (machine(4, 1), Mode.AUTO, Placement(Mode.SSD, gpu(0), cpu(3), cpu(0, 1, 2), gpu(0))),
        (machine(4, 1), Mode.SSD, Placement(Mode.SSD, gpu(0), cpu(3), cpu(0, 1, 2))),
        (machine(4, 1), Mode.SD, Placement(Mode.SD, gpu(0), None, cpu(0, 1, 2, 3))),
        (machine(1, 1), Mode.SSD, Placement(Mode.SSD, gpu(0), cpu(0), cpu(0))),
        (machine(4, 2), Mode.AUTO, Placement(Mode.SSD, gpu(0), gpu(1), cpu(0, 1, 2, 3))),
    ],
)
def test_defaults(have: Machine, mode: Mode, expected: Placement) -> None:
    assert place(Settings(mode=mode), have) == expected


def test_front_end_avoids_the_cores_of_a_named_target() -> None:
    for mode in (Mode.AR, Mode.SD, Mode.SSD):
        assert place(Settings(mode=mode, target_device="cpu:0"), machine(2)).front_end == cpu(1)


def test_target_uses_idle_drafter_cores_in_mode_auto() -> None:
    assert place(Settings(mode=Mode.SSD), machine(4)).alone is None
    assert place(Settings(mode=Mode.AUTO), machine(4)).alone == cpu(0, 1, 2, 3)
    assert place(Settings(mode=Mode.AUTO, target_device="cpu:0"), machine(4)).alone is None
    named = Settings(mode=Mode.SSD, target_device="cpu:0", target_device_alone="cpu:0-1")
    assert place(named, machine(4)).alone == cpu(0, 1)


def write_draft(folder: Path, megabytes: int) -> str:
    """Write a sparse checkpoint of exactly this size: one tensor of bytes after a header padded to 100 bytes."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    size = (megabytes << 20) - 108
    header = json.dumps({"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).ljust(100)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(megabytes << 20)
    return str(folder)


def test_cores_draft_for_a_single_gpu_only_if_drafts_are_small(tmp_path: Path) -> None:
    """A large draft takes longer on a core than the target's round; a core in the settings is used for any draft."""
    small, large = (write_draft(tmp_path / f"{size}", size) for size in (256, 257))
    one = machine(8, 1)
    assert place(Settings(target="t", draft=small), one).draft == cpu(7)
    assert place(Settings(target="t", draft=f"{small},{small}"), one).draft == cpu(6, 7)
    for draft in (large, f"{small},{large}", "self:2", "a-hub/draft"):
        assert place(Settings(target="t", draft=draft), one).mode is Mode.SD
    named = place(Settings(target="t", draft=large, draft_device="cpu:2"), one)
    assert (named.mode, named.draft, named.alone) == (Mode.SSD, cpu(2), gpu(0))
    assert place(Settings(target="t", draft=small, draft_device="cuda:0"), one).mode is Mode.SD
    assert place(Settings(draft_device="cpu:2", tensor_parallel=2), machine(8, 2)).alone is None


def test_draft_files_are_read_only_if_their_size_decides(tmp_path: Path) -> None:
    """Plain decoding starts even if the unused draft is broken."""
    broken = write_draft(tmp_path / "broken", 1)
    Path(broken, "config.json").write_text("{")
    settings = Settings(target="t", draft=broken)
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        place(settings, machine(8, 1))
    dangling = Path(write_draft(tmp_path / "dangling", 1))
    (dangling / "model.safetensors").unlink()
    (dangling / "model.safetensors").symlink_to(tmp_path / "gone")
    half = place(Settings(target="t", draft=str(dangling)), machine(8, 1))
    assert half.mode is Mode.SSD, "who loads it says what is missing"
    for mode in (Mode.AR, Mode.SD, Mode.SSD):
        assert place(settings.model_copy(update={"mode": mode}), machine(8, 1)).mode is mode
    for there in (machine(8, 2), machine(2, 1), machine(8)):
        assert place(settings, there).mode is (Mode.SD if there == machine(2, 1) else Mode.SSD)


def test_default_draft_is_lookup_and_none_is_plain_decoding() -> None:
    lookup, nothing = Settings(target="/m"), Settings(target="/m", draft="none")
    assert place(lookup, machine(8, 2)).mode is Mode.SD
    assert resolve_config(lookup, place(lookup, machine(8))).drafts == ("ngram",)
    assert place(nothing, machine(8)).mode is Mode.AR
    assert resolve_config(nothing, place(nothing, machine(8))).drafts == ()
    with pytest.raises(SettingsError, match=r"needs a draft model for its own device.*SSD_MODE=sd"):
        place(lookup.model_copy(update={"mode": Mode.SSD}), machine(8))
    with pytest.raises(SettingsError, match=r"mode sd needs a draft: .*SSD_MODE=ar"):
        place(nothing.model_copy(update={"mode": Mode.SD}), machine(8))


def test_lookups_need_no_drafter_and_no_device() -> None:
    settings = Settings(target="t", draft="a,ngram,b")
    placement = place(settings, machine(8))
    assert (placement.mode, placement.draft) == (Mode.SSD, cpu(6, 7))
    mine = resolve_config(settings, placement)
    assert mine.drafts == ("a", "ngram", "b")
    assert [mine.for_drafter(index).drafts for index in range(2)] == [("a",), ("b",)]


def test_default_devices_avoid_named_ones() -> None:
    chosen_draft = place(Settings(mode=Mode.SSD, draft_device="cpu:0"), machine(2))
    assert (chosen_draft.target, chosen_draft.draft) == (cpu(1), cpu(0))
    chosen_target = place(Settings(mode=Mode.SSD, target_device="cpu:1"), machine(2))
    assert (chosen_target.target, chosen_target.draft) == (cpu(1), cpu(0))
    shared = place(Settings(mode=Mode.SSD, target_device="cpu:0-1"), machine(2))
    assert shared.shares_a_device
    swapped = place(Settings(mode=Mode.SSD, target_device="cuda:1"), machine(4, 2))
    assert swapped.draft == gpu(0)


@pytest.mark.parametrize(("device", "message"), [("cpu:7", "only the cores 0-1"), ("cuda:0", "no GPU")])
def test_absent_device_is_refused(device: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        place(Settings(target_device=device), machine(2))


@given(st.integers(1, 64), st.integers(0, 8), st.sampled_from(Mode))
def test_placement_of_any_machine_round_trips_as_json(cores: int, gpus: int, mode: Mode) -> None:
    placement = place(Settings(mode=mode), machine(cores, gpus))
    assert (placement.draft is not None) == (placement.mode is Mode.SSD)
    if cores >= 2:
        assert not placement.shares_a_device
    config = resolve_config(Settings(mode=mode), placement)
    again = config_from_json(config.to_json())
    assert again == config
    assert parse_device(again.target_device) == placement.target


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", Device("cpu")),
        ("cpu:0", cpu(0)),
        ("cpu:0-1", cpu(0, 1)),
        ("CPU:2, 0", cpu(0, 2)),
        ("cpu:0,2-4", cpu(0, 2, 3, 4)),
        ("cuda", gpu(0)),
        ("cuda:3", gpu(3)),
        ("cuda:2,0-1", gpus(0, 1, 2)),
    ],
)
def test_device_names(text: str, device: Device) -> None:
    assert parse_device(text) == device
    assert parse_device(str(device)) == device


@pytest.mark.parametrize("text", ["", "gpu", "cpu:", "cpu:a", "cpu:1-0", "cpu:-1", "cuda:1-0", "cpu:0,,1"])
def test_invalid_device_names_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="device"):
        parse_device(text)


@given(st.sets(st.integers(0, 999), min_size=1))
def test_device_names_round_trip(indices: set[int]) -> None:
    device = Device("cpu", tuple(sorted(indices)))
    assert parse_device(str(device)) == device


@pytest.mark.parametrize(
    ("have", "ranks", "mode", "expected"),
    [
        (machine(4), 2, Mode.AUTO, Placement(Mode.SSD, cpu(0, 1, 2), cpu(3), cpu(3))),
        (machine(2), 2, Mode.AUTO, Placement(Mode.SD, cpu(0, 1), None, cpu(0, 1))),
        (machine(8, 5), 4, Mode.AUTO, Placement(Mode.SSD, gpus(0, 1, 2, 3), gpu(4), cpu(*range(8)))),
        (machine(8, 4), 4, Mode.AUTO, Placement(Mode.SD, gpus(0, 1, 2, 3), None, cpu(*range(8)))),
        (machine(8, 8), 8, Mode.AR, Placement(Mode.AR, gpus(*range(8)), None, cpu(*range(8)))),
    ],
)
def test_ranks_have_gpus_or_cores(have: Machine, ranks: int, mode: Mode, expected: Placement) -> None:
    assert place(Settings(mode=mode, tensor_parallel=ranks), have) == expected


def test_target_ranks_avoid_the_gpu_of_the_draft() -> None:
    placement = place(Settings(mode=Mode.SSD, tensor_parallel=2, draft_device="cuda:0"), machine(4, 3))
    assert (placement.target, placement.draft) == (gpus(1, 2), gpu(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(tensor_parallel=4), "needs 4 GPUs beside the draft model's, and 2 are there"),
        (Settings(tensor_parallel=2, target_device="cuda:0"), "SSD_TENSOR_PARALLEL is 2: name 2 GPUs"),
        (Settings(target_device="cuda:0-1"), "SSD_TENSOR_PARALLEL is 1: name 1 GPU$"),
        (Settings(draft_device="cuda:0-1"), "the draft model uses one: name 1 GPU$"),
        (Settings(tensor_parallel=2, target_device_alone="cpu"), "SSD_TARGET_DEVICE_ALONE is for one rank"),
    ],
)
def test_impossible_ranks_are_refused(settings: Settings, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        place(settings, machine(4, 2))


@pytest.mark.parametrize(
    ("device", "ranks", "parts"),
    [
        ("cpu:0-3", 2, ["cpu:0-1", "cpu:2-3"]),
        ("cpu:0-4", 3, ["cpu:0", "cpu:1-2", "cpu:3-4"]),
        ("cpu:5", 2, ["cpu:5", "cpu:5"]),
        ("cpu:0-1", 4, ["cpu:0", "cpu:0", "cpu:1", "cpu:1"]),
        ("cuda:0-3", 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cpu:0-1", 1, ["cpu:0-1"]),
    ],
)
def test_ranks_divide_a_device(device: str, ranks: int, parts: list[str]) -> None:
    assert [str(part) for part in parse_device(device).split(ranks)] == parts
    config = EngineConfig(target_device=device, tensor_parallel=ranks)
    assert [config.rank_device(rank) for rank in range(ranks)] == parts


def test_several_gpus_have_no_torch_name() -> None:
    with pytest.raises(SettingsError, match="cuda:0-1 are 2 GPUs where one is meant"):
        _ = parse_device("cuda:0-1").torch_name


@pytest.mark.parametrize(
    ("have", "drafters", "target", "draft"),
    [
        (machine(8), 4, cpu(0, 1, 2, 3), cpu(4, 5, 6, 7)),
        (machine(4), 4, cpu(0), cpu(1, 2, 3)),
        (machine(2), 2, cpu(0), cpu(1)),
        (machine(1), 2, cpu(0), cpu(0)),
        (machine(4, 8), 4, gpu(0), gpus(1, 2, 3, 4)),
        (machine(4, 3), 4, gpu(0), gpus(1, 2)),
        (machine(4, 1), 2, gpu(0), cpu(2, 3)),
    ],
)
def test_drafters_get_free_devices(have: Machine, drafters: int, target: Device, draft: Device) -> None:
    placement = place(Settings(mode=Mode.SSD, drafters=drafters), have)
    assert (placement.target, placement.draft) == (target, draft)


def test_drafters_divide_their_device_and_the_draft_models() -> None:
    settings = Settings(
        mode=Mode.SSD,
        target="t",
        draft="a, b",
        drafters=4,
        target_device="cuda:0-3",
        tensor_parallel=4,
        draft_device="cuda:4,5,6,7",
    )
    whole = resolve_config(settings, place(settings, machine(8, 8)))
    each = [whole.for_drafter(index) for index in range(4)]
    assert [one.draft_device for one in each] == ["cuda:4", "cuda:5", "cuda:6", "cuda:7"]
    assert [one.draft_models for one in each] == [("a",), ("b",), ("a",), ("b",)]
    cores = Settings(mode=Mode.SSD, drafters=3, target_device="cpu:0", draft_device="cpu:2-5")
    parts = [
        resolve_config(cores, place(cores, machine(6))).for_drafter(index).draft_device for index in range(3)
    ]
    assert parts == ["cpu:2", "cpu:3", "cpu:4-5"]


def test_default_is_one_drafter_for_each_draft_model() -> None:
    settings = Settings(mode=Mode.SSD, target="t", draft="a,b,c")
    assert settings.drafter_count == 3
    assert place(settings, machine(8)).draft == cpu(5, 6, 7)
    assert resolve_config(settings, place(settings, machine(8))).draft_models == ("a", "b", "c")
    assert settings.engine_config().joining_drafters == 3
    synchronous = Settings(mode=Mode.SD, target="t", draft="a,b")
    assert resolve_config(synchronous, place(synchronous, machine(2))).draft_models == ("a", "b")


def test_fewer_drafter_processes_than_draft_models_share_them() -> None:
    settings = Settings(mode=Mode.SSD, target="t", draft="a,b,c", drafters=2)
    whole = resolve_config(settings, place(settings, machine(8)))
    assert whole.draft_device == "cpu:6-7"
    assert [whole.for_drafter(index).draft_models for index in range(2)] == [("a", "c"), ("b",)]
    assert settings.engine_config().joining_drafters == 3
    assert Settings(mode=Mode.SSD, target="t", draft="a,b", drafters=5).engine_config().joining_drafters == 5
    assert Settings(mode=Mode.SSD, target="t", draft="a,b", drafters=0).engine_config().joining_drafters == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(mode=Mode.SSD, drafters=2, draft_device="cuda:1-3"), "each uses one: name 2 GPUs"),
        (Settings(mode=Mode.SSD, draft_device="cuda:1-2"), "the draft model uses one: name 1 GPU"),
        (Settings(mode=Mode.SSD, drafters=0), "no SSD_DRAFTER_ADDRESS"),
        (Settings(mode=Mode.SD, target="t", drafters=0, drafter_address="/run/d"), "mode sd needs a draft:"),
        (Settings(mode=Mode.SSD, drafter_address="tcp://h:1"), "set SSD_CLUSTER_KEY"),
    ],
)
def test_impossible_drafters_are_refused(settings: Settings, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        place(settings, machine(8, 8))


def test_target_has_all_cores_if_drafters_join_from_elsewhere() -> None:
    address = "tcp://127.0.0.1:4711"
    settings = Settings(target="t", drafters=0, drafter_address=address, cluster_key="a key of the tests")
    assert place(settings, machine(4)) == Placement(Mode.SSD, cpu(0, 1, 2, 3), None, cpu(0, 1, 2, 3))
    assert resolve_config(settings, place(settings, machine(4))).drafts == ()
