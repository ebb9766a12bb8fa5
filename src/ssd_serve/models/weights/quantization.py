"""Parses `quantization_config` of a checkpoint's `config.json`: the scales of fp8 weights.

AMD Quark, compressed-tensors and the plain `fp8` method write the same few facts under different names.
Fields that only remember how the export was made are skipped by name; every other field must have a value
that is built, or a `CheckpointError` names it. Lists of ignored modules need no reading: an ignored matrix
lies in the file in a wider dtype. How activations are rounded is not repeated exactly: they stay wide, or,
where the export wants them in fp8, each row gets a scale of its own. Keys and values stay wide also where the
export wants them in fp8: that only brings results nearer to those of the model that was quantised. Knows no
tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from ssd_serve.base.errors import CheckpointError

ScaleKind = Literal["tensor", "channel", "block"]


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Scaling of the fp8 weights of a checkpoint: a weight is its number times its scale."""

    kinds: frozenset[ScaleKind]
    """Scales for a tensor, for each output (channel), for each block."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block."""
    rounds_inputs: bool = False
    """True if all matrices are made for activations in fp8; wide ones only bring the results nearer."""


_Fields = Mapping[str, tuple[object, ...] | None]
"""Values that a field may have; None: any. A field that is not listed must be null, false or empty."""

_SUPPORTED = (
    "supported are e4m3 weights (8 bits, symmetric) with a scale for each tensor, output or block, as AMD "
    "Quark, compressed-tensors and the fp8 method write them"
)
_KV_CACHE = (
    "supported is a KV cache in fp8 (its keys and values are kept wide here): export the model with that, or "
    "without KV-cache quantisation"
)
_KV_LAYERS = ("k_proj", "v_proj")
_LONGEST = 60


def _any(*names: str) -> dict[str, None]:
    return dict.fromkeys(names)


_STORED_AS = ("float-quantized", "naive-quantized")
_OBSERVED = {
    **_any("observer", "observer_kwargs", "observer_cls", "round_method", "max_input_numel"),
    **_any("scale_type", "scale_format", "scale_dtype", "scale_calculation_mode"),
    **_any("zp_dtype", "zero_point_type", "enable_buffer_reuse"),
}
"""Fields about how an export found its scales, which are in tensors."""
_FP8: _Fields = {
    **_any("quant_method", "weight_block_size", "modules_to_not_convert", "ignored_layers", "dequantize"),
    **_any("kv_cache_scheme", "export"),
    "activation_scheme": ("dynamic", "static"),
    "fmt": ("e4m3",),
    "scale_fmt": ("float",),
    "expert_dtype": ("fp8",),
}
_COMPRESSED: _Fields = {
    **_any("quant_method", "config_groups", "global_compression_ratio", "sparsity_config", "ignore"),
    **_any("version", "run_compressed", "dequantize", "use_optimized_inference", "kv_cache_scheme"),
    "format": _STORED_AS,
    "quantization_status": ("compressed", "frozen"),
}
_SPARSITY: _Fields = {
    **_any("global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets"),
    "format": ("dense",),
}
_GROUP: _Fields = {**_any("targets", "weights", "input_activations"), "format": _STORED_AS}
_EIGHT_BITS: _Fields = {**_OBSERVED, "num_bits": (8,), "type": ("float",), "symmetric": (True,)}
_GROUP_WEIGHTS: _Fields = {
    **_EIGHT_BITS,
    **_any("block_structure"),
    "strategy": ("tensor", "channel", "block"),
}
_GROUP_INPUTS: _Fields = {
    **_EIGHT_BITS,
    **_any("group_size"),
    "strategy": ("tensor", "token", "group"),
    "dynamic": (True, False),
}
_QUARK: _Fields = {
    **_any("quant_method", "global_quant_config", "layer_quant_config", "layer_type_quant_config", "export"),
    **_any("algo_config", "exclude", "version", "pack_method", "log_severity_level"),
    **_any("kv_cache_quant_config", "kv_cache_post_rope"),
    "quant_mode": ("eager_mode",),
}
_QUARK_EXPORT: _Fields = {
    **_any("pack_method", "weight_merge_groups", "min_kv_scale", "kv_cache_group"),
    "weight_format": ("real_quantized",),
    "custom_mode": ("quark", "fp8"),
}
_QUARK_LAYER: _Fields = _any("weight", "input_tensors", "output_tensors", "target_device")
_QUARK_WEIGHT: _Fields = {
    **_OBSERVED,
    **_any("ch_axis"),
    "dtype": ("fp8_e4m3",),
    "qscheme": ("per_tensor", "per_channel"),
    "symmetric": (True,),
}
_QUARK_INPUTS: _Fields = {**_QUARK_WEIGHT, "is_dynamic": (True, False)}
_QUARK_ALGORITHMS = ("awq", "gptq", "smooth", "smoothquant", "autosmoothquant")
"""Algorithms that only change weights before they are exported."""


def parse_quantization(raw: object) -> Fp8Scheme | None:
    """The scheme of a `quantization_config`; None where there is none. Raises `CheckpointError`."""
    if not raw:
        return None
    path = "quantization_config"
    match method := _object(raw, path).get("quant_method"):
        case "fp8":
            return _fp8(_check(raw, path, _FP8, ("activation_scheme",)), path)
        case "compressed-tensors":
            return _compressed(_check(raw, path, _COMPRESSED, ("config_groups", "format")), path)
        case "quark":
            return _quark(_check(raw, path, _QUARK, ("global_quant_config",)), path)
        case _:
            raise CheckpointError(f"the checkpoint is quantised ({method or 'unknown'}); {_SUPPORTED}")


def _fp8(raw: Mapping[str, Any], path: str) -> Fp8Scheme:
    _check(raw.get("export") or {}, f"{path}.export", _QUARK_EXPORT)
    _fp8_cache(raw, path, {"kv_cache_scheme": (None, "static", "dynamic")})
    size = raw.get("weight_block_size")
    if size is None:
        return Fp8Scheme(frozenset({"tensor"}), rounds_inputs=True)
    return Fp8Scheme(frozenset({"block"}), _block(size, f"{path}.weight_block_size"), rounds_inputs=True)


def _compressed(raw: Mapping[str, Any], path: str) -> Fp8Scheme:
    _check(raw.get("sparsity_config") or {}, f"{path}.sparsity_config", _SPARSITY)
    if cache := raw.get("kv_cache_scheme"):
        _fp8_cache(cache, f"{path}.kv_cache_scheme", {"type": ("float",), "num_bits": (8,)})
    kinds: set[ScaleKind] = set()
    blocks: set[tuple[int, int]] = set()
    rounds = True
    for where, group in _objects(raw["config_groups"], f"{path}.config_groups"):
        _check(group, where, _GROUP, ("weights",))
        weights = _check(group["weights"], f"{where}.weights", _GROUP_WEIGHTS, ("type", "strategy"))
        kinds.add(weights["strategy"])
        if weights["strategy"] == "block":
            blocks.add(_block(weights.get("block_structure"), f"{where}.weights.block_structure"))
        if inputs := group.get("input_activations"):
            _check(inputs, f"{where}.input_activations", _GROUP_INPUTS, ("type",))
        rounds = rounds and bool(inputs)
    if len(blocks) > 1:
        raise CheckpointError(f"config.json: {path}.config_groups have blocks of several sizes; use one size")
    return _scheme(kinds, f"{path}.config_groups", next(iter(blocks), None), rounds)


def _quark(raw: Mapping[str, Any], path: str) -> Fp8Scheme:
    _check(raw.get("export") or {}, f"{path}.export", _QUARK_EXPORT)
    algorithms = raw.get("algo_config") or []
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
        if name not in _QUARK_ALGORITHMS:
            _refuse(f"{path}.algo_config", name, f"supported: {', '.join(_QUARK_ALGORITHMS)}")
    kinds: set[ScaleKind] = set()
    rounds = True
    layers = [(f"{path}.global_quant_config", raw["global_quant_config"])]
    for field in ("layer_quant_config", "layer_type_quant_config"):
        layers += _objects(raw.get(field) or {}, f"{path}.{field}")
    for where, layer in _objects(raw.get("kv_cache_quant_config") or {}, f"{path}.kv_cache_quant_config"):
        _quark_outputs(layer, where)
    for where, layer in layers:
        _check(layer, where, _QUARK_LAYER)
        _quark_outputs(layer, where)
        if inputs := layer.get("input_tensors"):
            _check(inputs, f"{where}.input_tensors", _QUARK_INPUTS, ("dtype",))
        if layer.get("weight"):
            kinds.add(_quark_weight(layer["weight"], f"{where}.weight"))
            rounds = rounds and bool(inputs)
    return _scheme(kinds, f"{path}.global_quant_config", None, rounds)


def _quark_weight(raw: object, path: str) -> ScaleKind:
    weight = _check(raw, path, _QUARK_WEIGHT, ("dtype", "qscheme"))
    if weight["qscheme"] == "per_tensor":
        return "tensor"
    if weight.get("ch_axis") not in (None, 0):
        _refuse(f"{path}.ch_axis", weight["ch_axis"], "supported is 0, a scale for each output")
    return "channel"


def _quark_outputs(raw: object, path: str) -> None:
    """The outputs of a layer may be rounded where they are what the KV cache holds."""
    if outputs := _object(raw, path).get("output_tensors"):
        if not path.endswith(_KV_LAYERS):
            _refuse(f"{path}.output_tensors", outputs, f"supported are those of {' and '.join(_KV_LAYERS)}")
        _fp8_cache(outputs, f"{path}.output_tensors", {"dtype": ("fp8_e4m3", "fp8_e5m2")})


def _fp8_cache(raw: object, path: str, fields: Mapping[str, tuple[object, ...]]) -> None:
    found = _object(raw, path)
    for name, allowed in fields.items():
        if found.get(name) not in allowed:
            _refuse(f"{path}.{name}", found.get(name), _KV_CACHE)


def _scheme(kinds: set[ScaleKind], path: str, block: tuple[int, int] | None, rounds: bool) -> Fp8Scheme:
    if not kinds:
        raise CheckpointError(f"config.json: {path} names no quantised weights; {_SUPPORTED}")
    return Fp8Scheme(frozenset(kinds), block, rounds)


def _objects(raw: object, path: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The members of an object of objects, each with its path."""
    return [(f"{path}.{name}", member) for name, member in _object(raw, path).items()]


def _object(raw: object, path: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"config.json: {path} must be an object, not {_shorten(raw)}; {_SUPPORTED}")
    return cast("Mapping[str, Any]", raw)


def _block(raw: object, path: str) -> tuple[int, int]:
    match raw:
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
        case _:
            raise CheckpointError(f"config.json: {path} must be two positive integers, not {raw!r}")


def _check(raw: object, path: str, fields: _Fields, required: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """Return the object if every field has a supported value. Raises `CheckpointError`."""
    found = _object(raw, path)
    for name, value in found.items():
        allowed = fields.get(name, ())
        if value is None or allowed is None or (not allowed and not value):
            continue
        if value not in allowed:
            values = ", ".join(repr(choice) for choice in allowed)
            _refuse(f"{path}.{name}", value, f"supported: {values}" if allowed else _SUPPORTED)
    if missing := [name for name in required if found.get(name) is None]:
        raise CheckpointError(f"config.json: {path} lacks {', '.join(missing)}; {_SUPPORTED}")
    return found


def _refuse(path: str, value: object, supported: str) -> None:
    raise CheckpointError(f"config.json: {path} is {_shorten(value)}; {supported}")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
