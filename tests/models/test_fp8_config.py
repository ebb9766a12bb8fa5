"""`quantization_config`: what is read from each form, and one clear sentence for everything else."""

import copy
import json
from typing import Any

import pytest

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.weights.quantization import Fp8Scheme, parse_quantization
from tests.models.fp8_checkpoints import (
    BLOCK,
    FORMS,
    compressed,
    group,
    method_fp8,
    quark,
    quark_layer,
    with_fp8_cache,
)
from tests.models.fp8_checkpoints import quark_tensor as tensor

SCHEMES = {
    "quark-tensor-static": Fp8Scheme(frozenset({"tensor"}), rounds_inputs=True),
    "quark-channel-dynamic": Fp8Scheme(frozenset({"channel"}), rounds_inputs=True),
    "quark-channel-fnuz": Fp8Scheme(frozenset({"channel"}), rounds_inputs=True),
    "quark-mixed-layers": Fp8Scheme(frozenset({"tensor", "channel"})),
    "compressed-tensor-static": Fp8Scheme(frozenset({"tensor"}), rounds_inputs=True),
    "compressed-channel-dynamic": Fp8Scheme(frozenset({"channel"}), rounds_inputs=True),
    "compressed-block": Fp8Scheme(frozenset({"block"}), BLOCK, rounds_inputs=True),
    "fp8-static": Fp8Scheme(frozenset({"tensor"}), rounds_inputs=True),
    "fp8-block": Fp8Scheme(frozenset({"block"}), BLOCK, rounds_inputs=True),
}
COMPRESSED = with_fp8_cache(compressed(group("channel", {"strategy": "token", "dynamic": True})))
QUARK = with_fp8_cache(
    quark(quark_layer(tensor("per_tensor"), tensor("per_tensor")), q_proj=quark_layer(None, None))
)
FP8 = with_fp8_cache(method_fp8("dynamic", weight_block_size=[128, 128]))
GROUP = "config_groups.group_0"
CHANGES: list[tuple[dict[str, Any], str, Any]] = [
    (COMPRESSED, "kv_cache_scheme.type", "int"),
    (COMPRESSED, "format", "pack-quantized"),
    (COMPRESSED, "quantization_status", "initialized"),
    (COMPRESSED, "sparsity_config.format", "sparse-24-bitmask"),
    (COMPRESSED, "transform_config", {"R1": {"type": "hadamard"}}),
    (COMPRESSED, f"{GROUP}.output_activations", {"num_bits": 8}),
    (COMPRESSED, f"{GROUP}.weights.num_bits", 4),
    (COMPRESSED, f"{GROUP}.weights.strategy", "group"),
    (COMPRESSED, f"{GROUP}.weights.symmetric", False),
    (COMPRESSED, f"{GROUP}.input_activations.dynamic", "local"),
    (COMPRESSED, "a_field_of_tomorrow", 1),
    (QUARK, "kv_cache_quant_config.*k_proj.output_tensors.dtype", "int8"),
    (QUARK, "export.weight_format", "fake_quantized"),
    (QUARK, "global_quant_config.weight.dtype", "int8"),
    (QUARK, "global_quant_config.weight.qscheme", "per_group"),
    (QUARK, "global_quant_config.weight.symmetric", False),
    (QUARK, "global_quant_config.input_tensors.dtype", "int8"),
    (QUARK, "global_quant_config.bias", {"dtype": "int32"}),
    (QUARK, "layer_quant_config.*v_proj.weight", {"dtype": "int4", "qscheme": "per_channel"}),
    (QUARK, "layer_quant_config.*q_proj.output_tensors", {"dtype": "fp8_e4m3"}),
    (FP8, "activation_scheme", "none"),
    (FP8, "fmt", "e5m2"),
    (FP8, "scale_fmt", "ue8m0"),
    (FP8, "modules_to_convert", ["embed_tokens"]),
    (FP8, "kv_cache_scheme", "int8"),
]


def changed(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(raw)
    *parents, name = path.split(".")
    place = result
    for parent in parents:
        place = place[parent]
    place[name] = value
    return result


def test_weights_alone_in_fp8_leave_activations_wide() -> None:
    alone, both = group("channel", None), group("channel", {"strategy": "token", "dynamic": True})
    for groups in ([alone], [alone, both], [both, alone]):
        assert parse_quantization(compressed(*groups)) == Fp8Scheme(frozenset({"channel"}))


def test_no_quantization_config_is_no_scheme() -> None:
    assert parse_quantization(None) is None
    assert parse_quantization({}) is None


@pytest.mark.parametrize("name", FORMS)
def test_scheme_of_each_form_with_and_without_an_fp8_kv_cache(name: str) -> None:
    raw = FORMS[name].config
    with_cache = with_fp8_cache(raw)
    assert with_cache != raw
    assert parse_quantization(raw) == parse_quantization(with_cache) == SCHEMES[name]


@pytest.mark.parametrize(
    ("raw", "path", "value"), CHANGES, ids=[f"{path}={json.dumps(value)[:20]}" for _, path, value in CHANGES]
)
def test_unsupported_values_are_named(raw: dict[str, Any], path: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        parse_quantization(changed(raw, path, value))
    text = str(error.value)
    assert f"quantization_config.{path}" in text
    assert "support" in text
    assert "\n" not in text
    if "kv_cache" in path or "v_proj.output_tensors" in path:
        assert "supported is a KV cache in fp8" in text
        assert "without KV-cache quantisation" in text


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"quant_method": "awq"}, r"quantised \(awq\); supported are e4m3 weights"),
        ("fp8", "quantization_config must be an object, not 'fp8'"),
        ({"quant_method": "fp8"}, "lacks activation_scheme"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "lacks config_groups"),
        (changed(COMPRESSED, "config_groups", ["Linear"]), "config_groups must be an object"),
        (changed(COMPRESSED, "config_groups", {"group_0": {}}), "group_0 lacks weights"),
        (changed(COMPRESSED, f"{GROUP}.weights.strategy", "block"), "block_structure must be two positive"),
        (compressed(), "config_groups names no quantised weights"),
        (quark(quark_layer(None, None)), "global_quant_config names no quantised weights"),
        (quark(quark_layer(tensor("per_channel", ch_axis=1), None)), "ch_axis is 1; supported is 0"),
        ({**QUARK, "algo_config": [{"name": "rotation"}]}, "algo_config is 'rotation'; supported: awq"),
        ({**COMPRESSED, "kv_cache_scheme": "static"}, "kv_cache_scheme must be an object, not 'static'"),
        ({**QUARK, "global_quant_config": quark_layer(None, None) | {"weight": [1]}}, "must be an object"),
        (
            {**FP8, "weight_block_size": [128]},
            r"weight_block_size must be two positive integers, not \[128\]",
        ),
    ],
)
def test_malformed_configurations_are_refused(raw: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_quantization(raw)


def test_blocks_of_several_sizes() -> None:
    groups = [group("block", None, block_structure=size) for size in ([128, 128], [64, 64])]
    with pytest.raises(CheckpointError, match="blocks of several sizes"):
        parse_quantization(compressed(*groups))


def test_algorithms_that_only_change_weights_are_accepted() -> None:
    algorithms = [{"name": "awq", "scaling_layers": []}, {"name": "smooth", "alpha": 0.5}]
    assert parse_quantization({**QUARK, "algo_config": algorithms}) == SCHEMES["quark-tensor-static"]
