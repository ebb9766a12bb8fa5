"""Small random EAGLE heads in the layouts in which they are published, and what transformers' own blocks
compute with them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

HIDDEN, VOCABULARY, PROPOSED, LAYERS = 32, 97, 40, 8
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
FLAT, NESTED = "flat", "nested"


def randomise(module: nn.Module) -> None:
    torch.manual_seed(5)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, 0.0, 0.3)


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    """A checkpoint."""
    folder.mkdir()
    plain = {key: value.detach().contiguous() for key, value in tensors.items()}
    save_file(plain, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Oracle(nn.Module):
    """An EAGLE-3 head made of transformers' attention, MLP, norms and rotation; with a mask token, a P-EAGLE head."""

    width = 3 * HIDDEN

    def __init__(
        self,
        family: str = "llama",
        proposed: int = PROPOSED,
        residual_is_normed: bool = False,
        norms: str = "",
        feed_normed: bool = False,
        own_embedding: bool = True,
        layers: int = 1,
        mask: int | None = None,
    ) -> None:
        super().__init__()
        blocks: Any = llama if family == "llama" else qwen3
        name = "Llama" if family == "llama" else "Qwen3"
        config = getattr(transformers, f"{name}Config")(**_SIZES)
        config._attn_implementation = "eager"
        self.family, self.residual_is_normed, self.feed_normed = family, residual_is_normed, feed_normed
        self.norms, self.own_embedding, self.proposed = norms, own_embedding, proposed
        norm = getattr(blocks, f"{name}RMSNorm")
        self.attention: Any = getattr(blocks, f"{name}Attention")(config, 0)
        for which in ("q", "k", "v"):
            old = getattr(self.attention, f"{which}_proj")
            setattr(self.attention, f"{which}_proj", nn.Linear(2 * HIDDEN, old.out_features, bias=False))
        self.mlp: Any = getattr(blocks, f"{name}MLP")(config)
        self.rotary: Any = getattr(blocks, f"{name}RotaryEmbedding")(config)
        self.hidden_norm: Any = norm(HIDDEN, eps=1e-5)
        self.input_layernorm: Any = norm(HIDDEN, eps=1e-5)
        self.post_attention_layernorm: Any = norm(HIDDEN, eps=1e-5)
        self.norm: Any = norm(HIDDEN, eps=1e-5)
        decoder = getattr(blocks, f"{name}DecoderLayer")
        self.deeper = nn.ModuleList([decoder(config, 0) for _ in range(1, layers)])
        self.mask = mask
        self.mask_hidden = torch.randn(1, 3 * HIDDEN, generator=torch.Generator().manual_seed(6))
        wide = [3 * HIDDEN] if norms == "one" else [HIDDEN] * 3 if norms == "each" else []
        self.feature_norms = nn.ModuleList([norm(width, eps=1e-5) for width in wide])
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, proposed, bias=False)
        randomise(self)
        self.ids = torch.randperm(VOCABULARY)[:proposed].sort().values

    @torch.no_grad()
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[rows, 3 * hidden] -> [rows, hidden]."""
        parts = features.chunk(3, -1) if self.norms == "each" else (features,)
        if len(self.feature_norms):
            parts = tuple(norm(part) for norm, part in zip(self.feature_norms, parts, strict=True))
        fused: torch.Tensor = self.fc(torch.cat(parts, -1))
        return fused

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A causal chunk [rows] with vectors [rows, hidden]: logits [rows, proposed] and own vectors."""
        count = len(tokens)
        hidden = self.hidden_norm(vectors)
        residual = hidden if self.residual_is_normed else vectors
        x = torch.cat((self.input_layernorm(self.embed(tokens)), hidden), -1)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotation = self.rotary(x, torch.arange(count)[None])
        attended, _ = self.attention(x, position_embeddings=rotation, attention_mask=mask)
        hidden = residual + attended[0]
        own = hidden + self.mlp(self.post_attention_layernorm(hidden))
        for layer in self.deeper:
            own = layer(own[None], position_embeddings=rotation, attention_mask=mask)[0]
        said = self.norm(own)
        return self.head(said), said if self.feed_normed else own

    def save(self, folder: Path, layout: str) -> Path:
        """Write it as a checkpoint."""
        layer = "midlayer" if layout == FLAT and self.mask is None else "layers.0"
        named: dict[str, torch.Tensor] = {"fc.weight": self.fc.weight, "lm_head.weight": self.head.weight}
        for each in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            named[f"{layer}.{each}.weight"] = getattr(self, each).weight
        named |= {f"{layer}.self_attn.{key}": value for key, value in self.attention.state_dict().items()}
        named |= {f"{layer}.mlp.{key}": value for key, value in self.mlp.state_dict().items()}
        named["norm.weight"] = self.norm.weight
        for index, deeper in enumerate(self.deeper, 1):
            named |= {f"layers.{index}.{key}": value for key, value in deeper.state_dict().items()}
        if self.mask is not None:
            named["mask_hidden"] = self.mask_hidden if layout == FLAT else self.mask_hidden[None]
        for index, norm in enumerate(self.feature_norms):
            named["input_norm.weight" if self.norms == "one" else f"fc_norm.{index}.weight"] = (
                norm.get_parameter("weight")
            )
        if self.own_embedding:
            named["embed_tokens.weight"] = self.embed.weight
        if self.proposed < VOCABULARY:
            named["d2t"] = self.ids - torch.arange(self.proposed)
            named["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, self.ids, True)
        return write(folder, named, self._described(layout))

    def adopt(self, theirs: dict[str, torch.Tensor]) -> None:
        """Take from the target what the head does not have."""
        if not self.own_embedding:
            self.embed.weight.data = theirs["model.embed_tokens.weight"]

    def _described(self, layout: str) -> dict[str, object]:
        layers = 1 + len(self.deeper)
        inner = {**_SIZES, "model_type": self.family, "rope_theta": 10000.0, "num_hidden_layers": layers}
        flags = {
            "norm_before_residual": self.residual_is_normed,
            "norm_before_fc": self.norms == "one",
            "fc_norm": self.norms == "each",
            "norm_output": self.feed_normed,
            "draft_vocab_size": self.proposed,
        }
        if layout == FLAT:
            masks = {} if self.mask is None else {"ptd_token_id": self.mask}
            kind = {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32"}
            return {**inner, **flags, **masks, **kind}
        ids: dict[str, object] = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
        if self.mask is not None:
            kind = {"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"]}
            masks = {"mask_token_id": self.mask, "num_depths": 3}
            return {**kind, **masks, **flags, **ids, "transformer_layer_config": inner}
        kind = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        return {**kind, **flags, **ids, "transformer_layer_config": inner}


class FirstOracle(nn.Module):
    """An EAGLE-1 head made of transformers' own decoder layer."""

    width = HIDDEN
    proposed = VOCABULARY

    def __init__(
        self, bias: bool = False, norms: bool = False, own_embedding: bool = True, own_head: bool = False
    ) -> None:
        super().__init__()
        config: Any = transformers.LlamaConfig(**_SIZES)
        config._attn_implementation = "eager"
        self.bias, self.norms = bias, norms
        self.own_embedding, self.own_head = own_embedding, own_head
        self.layer: Any = llama.LlamaDecoderLayer(config, 0)
        self.rotary: Any = llama.LlamaRotaryEmbedding(config)
        self.embedding_layernorm: Any = nn.Identity()
        self.pre_lm_head_layernorm: Any = nn.Identity()
        if norms:
            self.embedding_layernorm = llama.LlamaRMSNorm(HIDDEN, eps=1e-5)
            self.pre_lm_head_layernorm = llama.LlamaRMSNorm(HIDDEN, eps=1e-5)
        else:
            self.layer.input_layernorm = nn.Identity()
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=bias)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        randomise(self)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A causal chunk [rows] with vectors [rows, hidden]: logits [rows, vocabulary] and own vectors."""
        count = len(tokens)
        x = self.fc(torch.cat((self.embedding_layernorm(self.embed(tokens)), vectors), -1))[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotation = self.rotary(x, torch.arange(count)[None])
        own = self.layer(x, position_embeddings=rotation, attention_mask=mask)[0]
        return self.head(self.pre_lm_head_layernorm(own)), own

    def save(self, folder: Path, layout: str) -> Path:
        """Write it as a checkpoint."""
        layer, fc = ("layers.0", "fc") if layout == FLAT else ("transformer", "fusion_fc")
        named = {f"{layer}.{key}": value for key, value in self.layer.state_dict().items()}
        named |= {f"{fc}.{key}": value for key, value in self.fc.state_dict().items()}
        if self.norms:
            named["embedding_layernorm.weight"] = self.embedding_layernorm.weight
            named["pre_lm_head_layernorm.weight"] = self.pre_lm_head_layernorm.weight
        if self.own_embedding:
            named["embed_tokens.weight"] = self.embed.weight
        if self.own_head:
            named["lm_head.weight"] = self.head.weight
        return write(folder, named, self._described(layout))

    def adopt(self, theirs: dict[str, torch.Tensor]) -> None:
        """Take from the target what the head does not have."""
        embedding = theirs["model.embed_tokens.weight"]
        if not self.own_embedding:
            self.embed.weight.data = embedding
        if not self.own_head:
            self.head.weight.data = theirs.get("lm_head.weight", embedding)

    def _described(self, layout: str) -> dict[str, object]:
        inner = {**_SIZES, "model_type": "llama", "rope_theta": 10000.0}
        if layout == FLAT:
            return {**inner, "architectures": ["LlamaForCausalLM"], "bias": self.bias}
        kind = {"speculators_model_type": "eagle", "architectures": ["EagleSpeculator", "LlamaDecoderLayer"]}
        flags = {"fusion_bias": self.bias, "layernorms": self.norms}
        return {**kind, **flags, "transformer_layer_config": inner}
