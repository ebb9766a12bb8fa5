"""Small fp8 checkpoints in the forms that AMD Quark, compressed-tensors and the `fp8` method write.

Each is made from a random transformers model. Afterwards this holds the dequantised weights in fp32, as the
reference. Scales are random multiples of the smallest that fits, so that no two matrices share one.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import checkpoints

BLOCK = (32, 48)
"""Block size that does not divide most sizes of the model, so that the last blocks are smaller."""


def group(strategy: str, inputs: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """Return a group of compressed-tensors with all fields of its exports."""
    common: dict[str, Any] = {"actorder": None, "block_structure": None, "group_size": None}
    common |= {"num_bits": 8, "type": "float"}
    common |= {"symmetric": True, "observer": "minmax", "observer_kwargs": {}, "dynamic": False}
    return {
        "targets": ["Linear"],
        "weights": {**common, "strategy": strategy, **changes},
        "input_activations": None if inputs is None else {**common, **inputs},
        "output_activations": None,
        "format": "float-quantized",
    }


def compressed(*groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {f"group_{index}": one for index, one in enumerate(groups)},
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def quark_tensor(qscheme: str, *, dynamic: bool = False, **changes: Any) -> dict[str, Any]:
    return {
        "dtype": "fp8_e4m3",
        "qscheme": qscheme,
        "ch_axis": 0 if qscheme == "per_channel" else None,
        "is_dynamic": dynamic,
        "symmetric": True,
        "group_size": None,
        "block_size": None,
        "is_scale_quant": False,
        "mx_element_dtype": None,
        "observer_cls": "PerTensorMinMaxObserver",
        "round_method": "half_even",
        "scale_calculation_mode": None,
        "scale_format": None,
        "scale_type": "float",
        **changes,
    }


def quark_layer(weight: dict[str, Any] | None, inputs: dict[str, Any] | None) -> dict[str, Any]:
    layer = {"weight": weight, "input_tensors": inputs}
    return {**layer, "output_tensors": None, "bias": None, "target_device": None}


def quark(layer: dict[str, Any], **layers: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": layer,
        "layer_quant_config": {f"*{name}": one for name, one in layers.items()},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "algo_config": None,
        "softmax_quant_spec": None,
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "version": "0.12",
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


def method_fp8(scheme: str, **changes: Any) -> dict[str, Any]:
    config = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}
    return {**config, **changes}


def with_fp8_cache(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same export with its KV cache in fp8."""
    patterns = ["*k_proj", "*v_proj"]
    method = config["quant_method"]
    if method == "compressed-tensors":
        return {**config, "kv_cache_scheme": group("tensor", None)["weights"]}
    if method == "fp8":
        export = {"kv_cache_group": patterns, "weight_format": "real_quantized", "pack_method": "reorder"}
        return {**config, "kv_cache_scheme": "static", "export": export}
    layers: dict[str, Any] = {}
    for pattern in patterns:
        layer = config["layer_quant_config"].get(pattern, config["global_quant_config"])
        layers[pattern] = {**layer, "output_tensors": quark_tensor("per_tensor")}
    return {
        **config,
        "layer_quant_config": {**config["layer_quant_config"], **layers},
        "kv_cache_quant_config": copy.deepcopy(layers),
        "kv_cache_post_rope": True,
        "export": {**config["export"], "kv_cache_group": patterns},
    }


Shape = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Form:
    config: dict[str, Any]
    kind: Callable[[str], str]
    shape: Shape = field(default=lambda scale: scale)
    """Function from scales [outputs, 1], [1, 1] or [blocks, blocks] to the shape in the file."""
    name: str = "weight_scale"
    inputs: str | None = None
    form: torch.dtype = torch.float8_e4m3fn
    scale_dtype: torch.dtype = torch.float32
    head: bool = False
    """True if the LM head is quantised too."""


def all_of(kind: str) -> Callable[[str], str]:
    return lambda _: kind


_TOKEN = {"strategy": "token", "dynamic": True}
FORMS: dict[str, Form] = {
    "quark-tensor-static": Form(
        quark(quark_layer(quark_tensor("per_tensor"), quark_tensor("per_tensor"))),
        all_of("tensor"),
        lambda scale: scale.view(()),
        inputs="input_scale",
    ),
    "quark-channel-dynamic": Form(
        quark(quark_layer(quark_tensor("per_channel"), quark_tensor("per_tensor", dynamic=True))),
        all_of("channel"),
        lambda scale: scale.flatten(),
    ),
    "quark-channel-fnuz": Form(
        quark(quark_layer(quark_tensor("per_channel"), quark_tensor("per_tensor", dynamic=True))),
        all_of("channel"),
        lambda scale: scale.flatten(),
        form=torch.float8_e4m3fnuz,
    ),
    "quark-mixed-layers": Form(
        quark(
            quark_layer(quark_tensor("per_tensor"), None),
            v_proj=quark_layer(quark_tensor("per_channel"), None),
        ),
        lambda name: "channel" if name.endswith("v_proj") else "tensor",
        lambda scale: scale.flatten(),
    ),
    "compressed-tensor-static": Form(
        compressed(group("tensor", {"strategy": "tensor"})),
        all_of("tensor"),
        lambda scale: scale.view(1),
        inputs="input_scale",
    ),
    "compressed-channel-dynamic": Form(
        {**compressed(group("channel", _TOKEN)), "ignore": []},
        all_of("channel"),
        scale_dtype=torch.bfloat16,
        head=True,
    ),
    "compressed-block": Form(
        compressed(
            group("block", {"strategy": "group", "group_size": 48, "dynamic": True}, block_structure=[*BLOCK])
        ),
        all_of("block"),
    ),
    "fp8-static": Form(
        method_fp8("static"), all_of("tensor"), lambda scale: scale.view(()), inputs="activation_scale"
    ),
    "fp8-block": Form(
        method_fp8("dynamic", weight_block_size=[*BLOCK], fmt="e4m3"),
        all_of("block"),
        name="weight_scale_inv",
    ),
}


QUICK_FORMS = ("quark-tensor-static", "compressed-channel-dynamic", "fp8-block")
MARKED_FORMS = [pytest.param(name, marks=() if name in QUICK_FORMS else pytest.mark.slow) for name in FORMS]


def quantise(weight: torch.Tensor, kind: str, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fp8 weight, the scales as in the file, and the fp32 weight that both represent."""
    outputs, inputs = weight.shape
    height, width = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": BLOCK}[kind]
    rows, columns = torch.arange(outputs) // height, torch.arange(inputs) // width
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    index = (rows[:, None] * scales.shape[1] + columns).flatten()
    tops = scales.flatten().scatter_reduce(0, index, weight.abs().flatten(), "amax")
    scales = tops.view(scales.shape) / torch.finfo(form.form).max * (1.0 + 2 * torch.rand(scales.shape))
    scales = scales.to(form.scale_dtype)
    every = scales.float()[rows][:, columns]
    numbers = (weight / every).to(form.form)
    return numbers, form.shape(scales), numbers.float() * every


def write(form: Form, folder: Path, case: str = "llama-linear-biases") -> Any:
    """Write a checkpoint; return the transformers model with the dequantised weights, in fp32."""
    model = checkpoints.make(case)
    checkpoints.save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(7)
    for name in [key.removesuffix(".weight") for key in tensors if is_quantised(key, form)]:
        numbers, scales, meant = quantise(tensors[f"{name}.weight"], form.kind(name), form)
        tensors |= {f"{name}.weight": numbers, f"{name}.{form.name}": scales}
        if form.inputs is not None:
            tensors[f"{name}.{form.inputs}"] = form.shape(torch.rand(1, 1) + 0.01)
        with torch.no_grad():
            model.get_submodule(name).weight.copy_(meant)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, quantization_config=form.config)
    return model


def is_quantised(key: str, form: Form) -> bool:
    return key.endswith("_proj.weight") or (form.head and key == "lm_head.weight")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
