"""Tests of EAGLE heads against transformers' blocks: prompts, steps and trees, in every published layout."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import CheckpointError
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.native.layers import NativeHead
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.packed import can_multiply_packed
from ssd_serve.models.heads import eagle
from ssd_serve.models.heads.config import EagleConfig
from ssd_serve.models.heads.eagle import OWN, EagleHead
from ssd_serve.models.heads.kinds import HeadKind, head_kind
from ssd_serve.models.heads.load import head_config, head_sizes, load_head, target_head
from ssd_serve.models.load import ModelOptions
from tests.models import checkpoints
from tests.models.fp8_checkpoints import FORMS, Form, change_config, change_tensors, is_quantised, quantise
from tests.models.fp8_checkpoints import write as write_fp8
from tests.models.heads import FLAT, HIDDEN, LAYERS, NESTED, VOCABULARY, FirstOracle, Oracle, write
from tests.models.test_decoder import chunk

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "safeailab": (FLAT, {}),
    "whole-vocabulary": (FLAT, {"proposed": VOCABULARY}),
    "targets-embedding": (FLAT, {"own_embedding": False}),
    "speculators": (NESTED, {"residual_is_normed": True, "norms": "one"}),
    "eagle-3.1": (NESTED, {"norms": "each", "feed_normed": True}),
    "qwen3": (NESTED, {"family": "qwen3"}),
    "two-layers": (FLAT, {"layers": 2}),
    "p-eagle": (FLAT, {"layers": 2, "mask": 96, "norms": "one"}),
    "p-eagle-speculators": (NESTED, {"layers": 3, "mask": 7, "residual_is_normed": True}),
}
UNFUSED = {"qwen3", "two-layers", "p-eagle", "p-eagle-speculators"}
FIRST_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle-1-safeailab": (FLAT, {}),
    "eagle-1-bias": (FLAT, {"bias": True}),
    "eagle-1-own-head": (FLAT, {"own_head": True}),
    "eagle-1-speculators": (NESTED, {"own_embedding": False}),
    "eagle-1-layernorms": (NESTED, {"own_embedding": False, "bias": True, "norms": True}),
    "eagle-1-tied-target": (NESTED, {"own_embedding": False}),
}
AnyOracle = Oracle | FirstOracle
Pair = tuple[AnyOracle, EagleHead]


def target(folder: Path, case: str = "llama") -> Path:
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    return checkpoints.save(checkpoints.make(case, **sizes), folder)


def loaded(folder: Path, theirs: Path, **changes: Any) -> EagleHead:
    sizes = head_sizes(folder, theirs, device="cpu", dtype="fp32", **changes)
    return load_head(folder, ModelOptions(device="cpu", dtype="fp32", slots=128, context=None), sizes)


@pytest.mark.parametrize("case", [*CASES, *FIRST_CASES])
def test_rounded_head_in_one_call_gives_the_bits_of_separate_calls(
    case: str, tmp_path: Path, native: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_multiply_packed(native):
        pytest.skip("this processor has neither AVX-512 VNNI nor AVX2")
    layout, more = {**CASES, **FIRST_CASES}[case]
    oracle: AnyOracle = FirstOracle(**more) if case in FIRST_CASES else Oracle(**more)
    folder, theirs = oracle.save(tmp_path / "head", layout), target(tmp_path / "target")
    options = ModelOptions(device="cpu", dtype="bf16", slots=128, context=None, native=native, rounded=True)
    sizes = head_sizes(folder, theirs, device="cpu", dtype="bf16", native=native)
    calls: list[int] = []
    run = NativeHead.run

    def counted(self: NativeHead, tokens: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(tokens))
        return run(self, tokens, *rest)

    monkeypatch.setattr(NativeHead, "run", counted)
    together = load_head(folder, options, sizes)
    monkeypatch.setattr(eagle, "fused_head", lambda *_: None)
    apart = load_head(folder, options, sizes)
    oracle.adopt(load_file(theirs / "model.safetensors"))
    tokens, vectors = random_rows(14, 4)
    for start, stop in ((0, 9), (9, 10), (10, 14)):
        batch = build_batch([chunk(tokens.tolist(), start, stop, range(14))])
        batch = replace(batch, vectors=vectors[start:stop].bfloat16())
        found, expected = together.forward(batch), apart.forward(batch)
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
        torch.testing.assert_close(found.features, expected.features, rtol=0, atol=0)
    exact, _ = oracle(tokens, vectors)
    assert float(
        (found.logits - exact[-len(found.logits) :]).norm() / exact[-len(found.logits) :].norm()
    ) < 0.05 * more.get("layers", 1)
    assert calls == ([] if case in {*FIRST_CASES, *UNFUSED} else [9, 1, 4])


@pytest.fixture(scope="module", params=[*CASES, *FIRST_CASES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, folder = request.param, tmp_path_factory.mktemp("head")
    layout, options = {**CASES, **FIRST_CASES}[name]
    oracle: AnyOracle = FirstOracle(**options) if name in FIRST_CASES else Oracle(**options)
    theirs = target(folder / "target", "llama3-gqa-tied" if "tied" in name else "llama")
    head = loaded(oracle.save(folder / "head", layout), theirs)
    oracle.adopt(load_file(theirs / "model.safetensors"))
    return oracle, head


def random_rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, VOCABULARY, (count,), generator=source),
        torch.randn((count, HIDDEN), generator=source),
    )


def same(oracle: AnyOracle, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal logits of the proposed tokens; all others must be -inf."""
    proposed = torch.arange(VOCABULARY)
    if isinstance(oracle, Oracle) and oracle.proposed < VOCABULARY:
        proposed = oracle.ids
    torch.testing.assert_close(logits[:, proposed], expected, atol=1e-4, rtol=0)
    others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, proposed, False)
    assert bool((logits[:, others] == -torch.inf).all())


def test_features_are_fused(pair: Pair) -> None:
    oracle, head = pair
    features = torch.randn((5, oracle.width), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(head.fuse(features), oracle.fuse(features), atol=1e-5, rtol=0)


def test_prompt_then_steps_from_own_vectors(pair: Pair) -> None:
    """The prompt uses features of a target, the steps use the outputs of the head itself."""
    oracle, head = pair
    tokens, vectors = random_rows(20, 2)
    part = chunk(tokens.tolist(), 0, 12, range(20))
    found = head.forward(replace(build_batch([part]), vectors=vectors[:12]))
    expected, own = oracle(tokens[:12], vectors[:12])
    same(oracle, head.spread(found.logits), expected)
    torch.testing.assert_close(found.features[OWN], own, atol=1e-4, rtol=0)
    for end in range(12, 15):
        vectors[end] = found.features[OWN][-1]
        part = chunk(tokens.tolist(), end, end + 1, range(20))
        found = head.forward(replace(build_batch([part]), vectors=vectors[end : end + 1]))
        expected, own = oracle(tokens[: end + 1], vectors[: end + 1])
        same(oracle, head.spread(found.logits), expected[-1:])
        torch.testing.assert_close(found.features[OWN], own[-1:], atol=1e-4, rtol=0)


def test_tree_rows_see_their_own_path_only(pair: Pair) -> None:
    oracle, head = pair
    tokens, vectors = random_rows(9, 3)
    head.forward(replace(build_batch([chunk(tokens.tolist(), 0, 6, range(9))]), vectors=vectors[:6]))
    # The root is the sixth token; two of its children, and a child of the second.
    rows = RequestRows(
        tokens=tokens[6:].tolist(),
        positions=[6, 6, 7],
        write_slots=[6, 7, 8],
        prefix_slots=np.arange(6, dtype=np.int32),
        wanted=[0, 2],
        ancestry=[0b001, 0b010, 0b110],
    )
    found = head.forward(replace(build_batch([rows]), vectors=vectors[6:]))
    for place, path in enumerate(([6], [7, 8])):
        chosen = [*range(6), *path]
        expected, own = oracle(tokens[chosen], vectors[chosen])
        same(oracle, head.spread(found.logits[place : place + 1]), expected[-1:])
        torch.testing.assert_close(found.features[OWN][place], own[-1], atol=1e-4, rtol=0)


def test_layers_of_features_follow_layout_rule_or_setting(tmp_path: Path) -> None:
    """The layouts number inputs or outputs of layers; without numbers a rule or the setting holds."""
    theirs = target(tmp_path / "target")

    def features(layout: str, name: str, **changes: Any) -> tuple[int, ...] | None:
        folder = tmp_path / name
        if not folder.exists():
            Oracle().save(folder, layout)
        sizes = head_sizes(folder, theirs, device="cpu", dtype="fp32", **changes)
        config = sizes.description.config
        assert isinstance(config, EagleConfig)
        return config.features

    assert features(NESTED, "nested") == (1, 3, 4)
    assert features(FLAT, "flat") == (1, LAYERS // 2 - 1, LAYERS - 4)
    assert features(FLAT, "flat", features=(0, 2, 7)) == (0, 2, 7)
    assert features(FLAT, "flat", features=(0, FINAL, 2, 7)) == (0, 2, 7)
    assert features(NESTED, "nested", features=(FINAL,)) == (1, 3, 4)
    with pytest.raises(CheckpointError, match=r"reads outputs of layers \[0, 2, 8\], the target has 8"):
        features(FLAT, "flat", features=(0, 2, 8))


def test_head_for_another_target_is_refused(tmp_path: Path) -> None:
    head = Oracle().save(tmp_path / "head", FLAT)
    wide = checkpoints.save(checkpoints.make("llama", num_hidden_layers=LAYERS), tmp_path / "wide")
    with pytest.raises(
        CheckpointError, match=f"a head for targets of width {HIDDEN} with {VOCABULARY} tokens"
    ):
        head_sizes(head, wide, device="cpu", dtype="fp32")


def kind_of(folder: Path, config: dict[str, object], *names: str) -> HeadKind | None:
    shutil.rmtree(folder, ignore_errors=True)
    return head_kind(write(folder, {name: torch.zeros(2, 2) for name in names}, config))


def test_a_damaged_head_is_named_as_such_whatever_its_configuration(tmp_path: Path) -> None:
    for config in ({"draft_vocab_size": 9, "num_hidden_layers": 2}, {"num_hidden_layers": 1}):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
        (tmp_path / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
        with pytest.raises(CheckpointError, match="damaged or half downloaded"):
            head_kind(tmp_path)


def test_head_kind_from_configuration_or_tensor_names(tmp_path: Path) -> None:
    plain: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    layer, folder = "layers.0.self_attn.q_proj.weight", tmp_path / "head"
    assert kind_of(folder, plain, f"model.{layer}", "lm_head.weight") is None
    assert kind_of(folder, plain, layer, "fc.weight") is HeadKind.EAGLE1
    assert kind_of(folder, plain, f"model.{layer}", "model.fc.weight") is HeadKind.EAGLE1
    assert kind_of(folder, {"architectures": ["LlamaForCausalLMEagle"]}) is HeadKind.EAGLE1
    assert kind_of(folder, {"speculators_model_type": "eagle"}) is HeadKind.EAGLE1
    assert kind_of(folder, {**plain, "draft_vocab_size": 32000}) is HeadKind.EAGLE3
    assert kind_of(folder, {"speculators_model_type": "peagle"}) is HeadKind.PEAGLE
    third: dict[str, object] = {"architectures": ["LlamaForCausalLMEagle3"]}
    for key in ("ptd_token_id", "pard_token", "mask_token_id"):
        assert kind_of(folder, {**third, key: 0}) is HeadKind.PEAGLE
    assert kind_of(folder, {**third, "mask_token_id": None}) is HeadKind.EAGLE3
    assert kind_of(folder, plain, layer, "fc.weight", "mlp.mlp.0.0.linear.weight") is HeadKind.GUMIHO
    assert kind_of(folder, {"medusa_num_heads": 2}) is HeadKind.MEDUSA
    assert kind_of(folder, {"architectures": ["MedusaModel"]}) is HeadKind.MEDUSA
    assert kind_of(folder, {"hydra_num_heads": 4, "draft_vocab_size": 32000}) is HeadKind.HYDRA
    assert kind_of(folder, {"speculators_model_type": "dspark"}) is HeadKind.DFLASH
    assert kind_of(folder, {"architectures": ["DFlash2DraftModel"], "draft_vocab_size": 9}) is HeadKind.DFLASH
    assert kind_of(folder, plain, layer, "layers.0.hidden_norm.weight", "fc.weight") is HeadKind.EAGLE3
    torch.save({"fc.weight": torch.zeros(2), layer: torch.zeros(2)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert head_kind(folder) is HeadKind.EAGLE1
    (folder / "pytorch_model.bin").write_bytes(b"half")
    assert head_kind(folder) is None


@pytest.mark.parametrize(
    ("config", "names", "found"),
    [
        ({"speculators_model_type": "mtp"}, (), "mtp"),
        ({"dflash_config": {}, "architectures": ["LlamaForCausalLM"]}, (), "dflash_config"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, (), "Eagle3DeepseekV2ForCausalLM"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            ("fc.weight", "layers.1.mlp.up_proj.weight"),
            "layers.1.mlp",
        ),
    ],
)
def test_heads_of_other_kinds_are_refused(
    config: dict[str, object], names: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"another kind .*{found}.* EAGLE-1 .* EAGLE-3.1, .* ngram"):
        kind_of(tmp_path / "head", config, *names)


def test_eagle_1_reads_the_final_features_only(tmp_path: Path) -> None:
    theirs = target(tmp_path / "target")
    head = FirstOracle().save(tmp_path / "head", FLAT)
    assert head_config(head, theirs).features == head_config(head, theirs, (0, 2, 4)).features == (FINAL,)
    change_config(head, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="an EAGLE-1 head of 2 layers is not supported, only of one"):
        head_config(head, theirs)


@pytest.mark.parametrize("make", [Oracle, FirstOracle])
def test_wrong_tensors_are_named_with_their_shapes(make: type[AnyOracle], tmp_path: Path) -> None:
    theirs = target(tmp_path / "target")
    head = make().save(tmp_path / "head", FLAT)
    layer = "midlayer" if make is Oracle else "layers.0"
    down, up = f"{layer}.mlp.down_proj.weight", f"{layer}.mlp.up_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[down]
        tensors |= {up: torch.zeros(4, 2), "enorm.weight": torch.zeros(3)}

    change_tensors(head, change)
    message = (
        f"lacks {down} [{HIDDEN}, 64], it has misshapen {up} [4, 2] instead of [64, {HIDDEN}], "
        "it has unknown enorm.weight [3]"
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        loaded(head, theirs)


def written_in_fp8(oracle: AnyOracle, folder: Path, form: Form) -> Path:
    """Write the oracle with fp8 weights, also of `fc`; afterwards it has the dequantised weights."""
    oracle.save(folder, FLAT)
    homes = {"midlayer.self_attn": "attention", "midlayer.mlp": "mlp", "layers.0": "layer"}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key == "fc.weight" or is_quantised(key, form)]:
            name = home = key.removesuffix(".weight")
            numbers, scales, meant = quantise(tensors[key], form.kind(name), form)
            tensors |= {key: numbers, f"{name}.{form.name}": scales}
            if form.inputs is not None:
                tensors[f"{name}.{form.inputs}"] = form.shape(torch.rand(1, 1) + 0.01)
            for prefix, module in homes.items():
                home = home.replace(prefix, module)
            oracle.get_submodule(home).get_parameter("weight").data = meant

    change_tensors(folder, change)
    change_config(folder, quantization_config=form.config)
    return folder


@pytest.mark.parametrize("form", ["quark-tensor-static", "fp8-block"])
@pytest.mark.parametrize("make", [Oracle, FirstOracle])
def test_heads_in_fp8(make: type[AnyOracle], form: str, tmp_path: Path) -> None:
    theirs, oracle = target(tmp_path / "target"), make()
    head = loaded(written_in_fp8(oracle, tmp_path / "head", FORMS[form]), theirs)
    oracle.adopt(load_file(theirs / "model.safetensors"))
    tokens, features = random_rows(8, 4)[0], torch.randn((8, oracle.width))
    vectors = head.fuse(features)
    torch.testing.assert_close(vectors, oracle.fuse(features), atol=1e-4, rtol=0)
    found = head.forward(replace(build_batch([chunk(tokens.tolist(), 0, 8, range(8))]), vectors=vectors))
    expected, own = oracle(tokens, vectors)
    same(oracle, head.spread(found.logits), expected)
    torch.testing.assert_close(found.features[OWN], own, atol=1e-4, rtol=0)


def test_head_in_a_bin_file_needs_allow_pickle(tmp_path: Path) -> None:
    theirs = target(tmp_path / "target")
    head = FirstOracle().save(tmp_path / "head", FLAT)
    torch.save(load_file(head / "model.safetensors"), head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    sizes = head_sizes(head, theirs, device="cpu", dtype="fp32", allow_pickle=True)
    options = ModelOptions(device="cpu", dtype="fp32", slots=8, context=None)
    with pytest.raises(CheckpointError, match="is not safetensors"):
        load_head(head, options, sizes)
    assert load_head(head, replace(options, allow_pickle=True), sizes).width == HIDDEN


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_shared_head_uses_the_dtype_of_the_eagle_head(dtype: str, tmp_path: Path) -> None:
    theirs, oracle = target(tmp_path / "target"), FirstOracle()
    folder = oracle.save(tmp_path / "head", FLAT)
    oracle.adopt(load_file(theirs / "model.safetensors"))
    sizes = head_sizes(folder, theirs, device="cpu", dtype=dtype)
    head = load_head(folder, ModelOptions(device="cpu", dtype=dtype, slots=128, context=None), sizes)
    tokens, vectors = random_rows(8, 4)
    found = head.forward(replace(build_batch([chunk(tokens.tolist(), 0, 8, range(8))]), vectors=vectors))
    expected, _ = oracle(tokens, vectors)
    similar = torch.nn.functional.cosine_similarity(found.logits, expected)
    assert float(similar.min()) > 0.99


@pytest.mark.parametrize("form", ["compressed-channel-dynamic", "quark-tensor-static"])
def test_head_of_an_fp8_target_is_dequantised(form: str, tmp_path: Path) -> None:
    model = write_fp8(FORMS[form], tmp_path / "target")
    weight = model.lm_head.weight
    torch.testing.assert_close(target_head(tmp_path / "target", *weight.shape), weight.data)
