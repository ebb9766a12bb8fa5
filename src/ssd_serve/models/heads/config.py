"""Configuration of EAGLE heads, in the layouts of `config.json` in which heads are published.

Flat (SafeAILab, SpecForge, SGLang, vLLM) or nested (speculators). Knows key names; no tensors. Sources: Li et
al. 2024 (EAGLE), Li et al. 2025 (EAGLE-3), and the loaders of those projects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.architectures.dense.config import DecoderConfig
from ssd_serve.models.architectures.registry import describe
from ssd_serve.models.config import Json, positive_size
from ssd_serve.models.heads.kinds import MASK_KEYS, HeadKind
from ssd_serve.models.weights.quantization import Fp8Scheme

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FAMILIES_OF_EAGLE1 = {**_FAMILIES, "mistral": "LlamaForCausalLM", "qwen2": "LlamaForCausalLM"}
"""Families of EAGLE-1: the layer is Llama's for every target, with biases if `qkv_bias` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Configuration of a head: `layer` describes its decoder layers, with the target's vocabulary."""

    layer: DecoderConfig

    @property
    def hidden(self) -> int:
        """Width of the head's rows."""
        return self.layer.hidden

    @property
    def vocabulary(self) -> int:
        """The target's."""
        return self.layer.vocabulary

    @property
    def context(self) -> int:
        """Positions that it knows."""
        return self.layer.context

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The target decides what ends a text."""
        return self.layer.eos_token_ids

    @property
    def fp8(self) -> Fp8Scheme | None:
        """Scaling of fp8 weights in the file."""
        return self.layer.fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(HeadConfig):
    """Configuration that decides the computation of a head.

    `layer` is the decoder layer as if its input were [hidden]; its vocabulary is the target's, of which the
    head proposes `draft_vocabulary` tokens. The head reads the outputs of the target's layers `features`, by
    number from 0, or `FINAL`; None: the default layers for the target's number of layers.
    """

    kind: HeadKind
    draft_vocabulary: int
    target_hidden: int
    features: tuple[int, ...] | None
    residual_is_normed: bool = False
    """True if the normed features are what the layer adds to."""
    one_norm: bool = False
    """The features are normed together before they are fused (`norm_before_fc`)."""
    norm_each: bool = False
    """Each layer's features are normed before they are fused (`fc_norm`, EAGLE-3.1)."""
    feed_normed: bool = False
    """The head's own vector for the next token is normed (`norm_output`, EAGLE-3.1)."""
    fuse_bias: bool = False
    """`fc` must have a bias."""
    layer_norms: bool = False
    """EAGLE-1: the inputs of layer and head, and the embedding, are normed (`layernorms`)."""
    guesses: int = 0
    """Gumiho: heads that each guess one later token."""
    mask: int | None = None
    """P-EAGLE: the token of positions to guess."""
    positions: int | None = None
    """P-EAGLE: positions that it was trained to guess at once; None: its files do not tell."""

    @property
    def fused(self) -> int:
        """Number of target layers that it reads."""
        return 3 if self.features is None else len(self.features)

    @property
    def joins(self) -> bool:
        """Return True if `fc` makes one row of a token and the vector before it (EAGLE-1, Gumiho), instead of one
        vector of several layers' features (EAGLE-3, P-EAGLE)."""
        return self.kind not in {HeadKind.EAGLE3, HeadKind.PEAGLE}

    @property
    def fuse_inputs(self) -> int:
        """Numbers that `fc` reads."""
        return 2 * self.hidden if self.joins else self.fused * self.target_hidden


def parse_eagle1(raw: Json, generation: Json) -> EagleConfig:
    """Read `config.json` of an EAGLE-1 head. What cannot be computed exactly is a `CheckpointError`."""
    layer = _layer(HeadKind.EAGLE1, _FAMILIES_OF_EAGLE1, raw, generation)
    return EagleConfig(
        kind=HeadKind.EAGLE1,
        layer=replace(layer, qkv_bias=layer.qkv_bias or bool(raw.get("qkv_bias"))),
        draft_vocabulary=layer.vocabulary,
        target_hidden=layer.hidden,
        features=(FINAL,),
        fuse_bias=bool(raw.get("fusion_bias") or raw.get("bias")),
        layer_norms=bool(raw.get("layernorms")),
    )


def parse_eagle3(raw: Json, generation: Json, kind: HeadKind = HeadKind.EAGLE3) -> EagleConfig:
    """Read `config.json` of an EAGLE-3 head. What cannot be computed exactly is a `CheckpointError`."""
    layer = _layer(kind, _FAMILIES, raw, generation, layers=None)
    if raw.get("norm_before_fc") and raw.get("fc_norm"):
        raise CheckpointError("config.json: norm_before_fc and fc_norm exclude each other")
    return EagleConfig(
        kind=kind,
        layer=layer,
        draft_vocabulary=int(raw.get("draft_vocab_size") or layer.vocabulary),
        target_hidden=int(raw.get("target_hidden_size") or layer.hidden),
        features=_features(raw),
        residual_is_normed=bool(raw.get("norm_before_residual", False)),
        one_norm=bool(raw.get("norm_before_fc", False)),
        norm_each=bool(raw.get("fc_norm", False)),
        feed_normed=bool(raw.get("norm_output", False)),
    )


def parse_peagle(raw: Json, generation: Json) -> EagleConfig:
    """Read `config.json` of a P-EAGLE head, that of an EAGLE-3 head with a mask token."""
    config = parse_eagle3(raw, generation, HeadKind.PEAGLE)
    mask = next((raw[key] for key in MASK_KEYS if raw.get(key) is not None), None)
    if not isinstance(mask, int) or not 0 <= mask < config.vocabulary:
        raise CheckpointError(
            f"config.json: the mask token {mask!r} ({' or '.join(MASK_KEYS)}) is none of {config.vocabulary} tokens"
        )
    trained = positive_size(raw, "num_depths") if raw.get("num_depths") is not None else None
    return replace(config, mask=mask, positions=trained)


def parse_gumiho(raw: Json, generation: Json) -> EagleConfig:
    """Read `config.json` of a Gumiho head, that of a Llama of two layers; it does not tell the number of heads."""
    layer = _layer(HeadKind.GUMIHO, _FAMILIES_OF_EAGLE1, raw, generation, layers=2)
    return EagleConfig(
        kind=HeadKind.GUMIHO,
        layer=layer,
        draft_vocabulary=int(raw.get("draft_vocab_size") or layer.vocabulary),
        target_hidden=layer.hidden,
        features=(FINAL,),
        fuse_bias=True,
    )


PARSERS = {
    HeadKind.EAGLE1: parse_eagle1,
    HeadKind.EAGLE3: parse_eagle3,
    HeadKind.PEAGLE: parse_peagle,
    HeadKind.GUMIHO: parse_gumiho,
}
"""Parser of `config.json` for each kind."""


def _layer(
    kind: HeadKind, families: Mapping[str, str], raw: Json, generation: Json, layers: int | None = 1
) -> DecoderConfig:
    """The decoder layers, in either layout; `families` are architectures by `model_type`. `layers` None: any number."""
    nested = raw.get("transformer_layer_config")
    inner: Json = nested if isinstance(nested, dict) else raw
    family = str(inner.get("model_type", "llama"))
    if family not in families:
        known = ", ".join(families)
        raise CheckpointError(f"an {kind} head of the family {family!r} is not supported, only of {known}")
    if (found := positive_size(inner, "num_hidden_layers")) != (layers or found):
        only = "one" if layers == 1 else layers
        raise CheckpointError(f"an {kind} head of {found} layers is not supported, only of {only}")
    usual = {"quantization_config": raw.get("quantization_config"), "tie_word_embeddings": False}
    layer = describe({**inner, **usual, "architectures": [families[family]]}, generation).config
    if not isinstance(layer, DecoderConfig):
        raise CheckpointError(f"an {kind} head of the family {family!r} is not supported")
    return layer


def usual_features(layers: int) -> tuple[int, ...]:
    """The outputs that EAGLE-3 reads of a target of so many layers: an early, a middle and a late one."""
    if layers < 6:
        raise CheckpointError(
            f"which layers of a target of {layers} an EAGLE-3 head reads does not follow from a rule: name "
            "them with SSD_EAGLE_LAYERS"
        )
    return 1, layers // 2 - 1, layers - 4


def check_features(features: Sequence[int], layers: int) -> tuple[int, ...]:
    """Outputs of a target of so many layers. Raises `CheckpointError` for others."""
    if any(not 0 <= each < layers for each in features):
        raise CheckpointError(f"the draft reads outputs of layers {list(features)}, the target has {layers}")
    return tuple(features)


def _features(raw: Json) -> tuple[int, ...] | None:
    """Names of the speculators format are inputs of layers, those of the flat one outputs."""
    if "speculators_model_type" in raw:
        found = raw.get("eagle_aux_hidden_state_layer_ids")
        return None if not found else tuple(int(each) - 1 for each in found)
    found = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return None if not found else tuple(int(each) for each in found)
