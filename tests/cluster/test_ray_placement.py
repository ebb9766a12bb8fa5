"""Bundles that an engine requests from Ray, kinds of GPU, and devices of actors. No Ray runs."""

import pytest

from ssd_serve.base.engine_config import Mode
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.ray.placement import (
    RayNode,
    RayPlacement,
    actors_device,
    check_gpus_are_known,
    node_of,
    ray_place,
)

MI300X = "AMD-Instinct-MI300X-OAM"


def gpus(name: str, count: int, kind: str = "") -> RayNode:
    return RayNode(name, cpus=64, gpus=count, kinds=(kind,) if kind else ())


def cores(*counts: int) -> list[RayNode]:
    return [RayNode(f"n{index}", cpus=count) for index, count in enumerate(counts)]


def shapes(found: RayPlacement) -> list[tuple[float, float]]:
    """CPUs and GPUs of every bundle."""
    return [(bundle["CPU"], bundle.get("GPU", 0.0)) for bundle in found.bundles]


def test_ranks_share_a_bundle_and_drafters_have_their_own() -> None:
    settings = Settings(tensor_parallel=4, drafters=2)
    found = ray_place(settings, [gpus("a", 8), gpus("b", 2)])
    assert found.placement.mode is Mode.SSD
    assert str(found.placement.target) == "cuda:0-3"
    assert shapes(found) == [(4, 4), (1, 1), (1, 1)]


def test_drafter_is_placed_on_another_node() -> None:
    assert shapes(ray_place(Settings(tensor_parallel=4), [gpus("a", 4), gpus("b", 1)])) == [(4, 4), (1, 1)]
    assert shapes(ray_place(Settings(), cores(1, 1))) == [(1, 0), (1, 0)]


def test_target_that_fits_no_node_is_refused() -> None:
    with pytest.raises(SettingsError, match="needs 4 GPUs of one node, the largest has 2"):
        ray_place(Settings(tensor_parallel=4), [gpus("a", 2), gpus("b", 2)])
    with pytest.raises(SettingsError, match="the target needs 2 CPU of one node"):
        ray_place(Settings(mode=Mode.AR, tensor_parallel=2, target_device="cpu"), cores(1, 1))


def test_gpus_that_ray_does_not_know_of_are_not_replaced_by_cores() -> None:
    with pytest.raises(SettingsError, match=r"torch can use 8 here: start its nodes .* --num-gpus=8"):
        check_gpus_are_known(Settings(), cores(64), lambda: 8)
    check_gpus_are_known(Settings(), cores(64), lambda: 0)
    named = Settings(target_device="cpu:0-1")
    check_gpus_are_known(named, cores(64), lambda: 8)
    assert shapes(ray_place(named, cores(64))) == [(2, 0), (1, 0)]
    plain = Settings(mode=Mode.AR)
    check_gpus_are_known(plain, [gpus("a", 8)], lambda: 8)
    assert shapes(ray_place(plain, [gpus("a", 8)])) == [(1, 1)]


def test_drafters_without_resources_are_refused() -> None:
    settings = Settings(mode=Mode.SSD, target_device="cpu:0-1", drafters=2)
    with pytest.raises(SettingsError, match="room for 1 of 2 drafters, which need 1 CPU each"):
        ray_place(settings, cores(3))
    assert shapes(ray_place(settings, cores(2, 2))) == [(2, 0), (1, 0), (1, 0)]


def test_modes_follow_what_the_cluster_has() -> None:
    assert ray_place(Settings(), cores(1)).placement.mode is Mode.SD
    assert ray_place(Settings(), [gpus("a", 1)]).placement.mode is Mode.SD
    assert ray_place(Settings(target="a-model"), cores(8)).placement.mode is Mode.SD
    assert ray_place(Settings(draft_device="cpu"), [gpus("a", 1)]).placement.mode is Mode.SSD
    assert ray_place(Settings(target="a-model", draft="none"), cores(8)).placement.mode is Mode.AR
    with pytest.raises(SettingsError, match="needs a draft model"):
        ray_place(Settings(target="a-model", mode=Mode.SSD), cores(8))


def test_default_cores_are_the_largest_nodes_minus_drafters() -> None:
    assert shapes(ray_place(Settings(drafters=2), cores(4, 16))) == [(14, 0), (1, 0), (1, 0)]
    assert shapes(ray_place(Settings(mode=Mode.AR, tensor_parallel=3), cores(8))) == [(6, 0)]


def test_drafter_uses_a_core_if_no_gpu_is_left() -> None:
    found = ray_place(Settings(mode=Mode.SSD), [gpus("a", 1)])
    assert str(found.placement.draft) == "cpu"
    assert shapes(found) == [(1, 1), (1, 0)]
    with pytest.raises(SettingsError, match="room for 0 of 1 drafters, which need 1 CPU and 1 GPU each"):
        ray_place(Settings(mode=Mode.SSD, draft_device="cuda"), [gpus("a", 1)])


@pytest.mark.parametrize(
    ("wished", "kind"),
    [
        ("mi300x", MI300X),
        ("mi300x", "AMD-Instinct-MI300X-HF"),
        ("mi325x", "AMD-Instinct-MI325X-OAM"),
        ("mi350x", "AMD-Instinct-MI350X-OAM"),
        ("mi355x", "AMD-Instinct-MI355X-OAM"),
        ("h100", "H100"),
        ("H200", "H200"),
    ],
)
def test_kinds_of_gpu_are_named_as_people_name_them(wished: str, kind: str) -> None:
    nodes = [gpus("a", 8, "A100"), gpus("b", 8, kind)]
    settings = Settings(target_accelerator=wished, tensor_parallel=8)
    found = ray_place(settings, nodes)
    assert found.bundles == [
        {"CPU": 8.0, "GPU": 8.0, f"accelerator_type:{kind}": 0.001},
        {"CPU": 1.0, "GPU": 1.0},
    ]


def test_accelerator_kinds_separate_target_and_partitioned_drafters() -> None:
    """Eight MI300X, one of them in eight parts (CPX) on a node of its own: a part counts as a GPU."""
    nodes = [gpus("h", 1, "H200"), gpus("parts", 8, MI300X)]
    settings = Settings(target_accelerator="h200", draft_accelerator="mi300x", drafters=3)
    found = ray_place(settings, nodes)
    assert [next(name for name in bundle if ":" in name).partition(":")[2] for bundle in found.bundles] == [
        "H200",
        *[MI300X] * 3,
    ]
    with pytest.raises(
        SettingsError, match=r"SSD_TARGET_ACCELERATOR is h100, and the cluster has AMD.*, H200"
    ):
        ray_place(Settings(target_accelerator="h100"), nodes)


def test_kind_of_gpu_matches_several_boards() -> None:
    settings = Settings(
        target_accelerator="mi300x", draft_accelerator="mi300x", tensor_parallel=4, mode=Mode.SSD
    )
    other = "AMD-Instinct-MI300X-HF"
    for on_the_larger_node, expected in ((4, [MI300X, other]), (5, [MI300X, MI300X])):
        nodes = [gpus("a", 1, other), gpus("b", on_the_larger_node, MI300X)]
        bundles = ray_place(settings, nodes).bundles
        kinds = [name.partition(":")[2] for bundle in bundles for name in bundle if ":" in name]
        assert kinds == expected, "the drafter stays beside the target where there is room"


def test_custom_kinds_separate_whole_and_partitioned_gpus() -> None:
    whole = RayNode("whole", cpus=64, gpus=4, kinds=(MI300X, "MI300X-SPX"))
    parts = RayNode("parts", cpus=64, gpus=8, kinds=(MI300X, "MI300X-CPX"))
    settings = Settings(
        target_accelerator="mi300x-spx", draft_accelerator="mi300x-cpx", tensor_parallel=4, mode=Mode.SSD
    )
    bundles = ray_place(settings, [parts, whole]).bundles
    kinds = [name.partition(":")[2] for bundle in bundles for name in bundle if ":" in name]
    assert kinds == ["MI300X-SPX", "MI300X-CPX"]


def test_drafters_for_which_a_kind_was_named_do_not_fall_back_to_cores() -> None:
    settings = Settings(draft_accelerator="h200", drafters=2, mode=Mode.SSD)
    with pytest.raises(SettingsError, match="room for 1 of 2 drafters"):
        ray_place(settings, [gpus("a", 2, "H200")])


def test_unknown_draft_accelerator_is_refused_with_drafters() -> None:
    settings = Settings(draft_accelerator="h100", mode=Mode.SSD)
    with pytest.raises(SettingsError, match="SSD_DRAFT_ACCELERATOR is h100, and the cluster has H200"):
        ray_place(settings, [gpus("a", 2, "H200")])
    alone = settings.model_copy(update={"mode": Mode.AR})
    assert shapes(ray_place(alone, [gpus("a", 2, "H200")])) == [(1, 1)]


def test_accelerator_is_ignored_on_cores() -> None:
    settings = Settings(target_device="cpu", draft_device="cpu", target_accelerator="h100")
    assert shapes(ray_place(settings, cores(2))) == [(1, 0), (1, 0)]


def test_gpus_are_as_many_as_processes_use() -> None:
    with pytest.raises(SettingsError, match="SSD_TARGET_DEVICE is cuda:0-1: with Ray name 4 GPUs, or none"):
        ray_place(Settings(target_device="cuda:0-1", tensor_parallel=4), [gpus("a", 8)])


def test_named_devices_are_divided_among_the_processes() -> None:
    settings = Settings(target_device="cuda:4-5", tensor_parallel=2, draft_device="cpu:8-11", drafters=2)
    found = ray_place(settings, [gpus("a", 8)])
    assert [found.rank.of(rank, 2) for rank in range(2)] == ["cuda:4", "cuda:5"]
    assert [found.drafter.of(number, 2) for number in range(2)] == ["cpu:8-9", "cpu:10-11"]
    assert shapes(found) == [(2, 2), (2, 0), (2, 0)]
    assert ray_place(Settings(), cores(2)).rank.of(0, 1) is None


@pytest.mark.parametrize(
    ("named", "ids", "visible", "device"),
    [
        (None, [], None, "cpu"),
        (None, ["3"], None, "cuda:3"),
        (None, ["6"], "4,5,6,7", "cuda:2"),
        (None, ["GPU-b"], "GPU-a,GPU-b", "cuda:1"),
        (None, ["1"], "", "cuda:1"),
        ("cuda:8", ["3"], None, "cuda:8"),
        ("cpu:0-3", [], None, "cpu:0-3"),
    ],
)
def test_device_of_an_actor(named: str | None, ids: list[str], visible: str | None, device: str) -> None:
    assert actors_device(named, ids, visible) == device


def test_nodes_are_read_from_rays_answer() -> None:
    entry = {
        "NodeID": "abc",
        "Alive": True,
        "Resources": {
            "CPU": 8.0,
            "GPU": 2.0,
            f"accelerator_type:{MI300X}": 1.0,
            "memory": 1e9,
            "node:x": 1.0,
        },
    }
    assert node_of(entry) == RayNode("abc", 8.0, 2.0, (MI300X,))
    assert node_of({"NodeID": "d", "Resources": {}}) == RayNode("d")
