"""A plain Llama decoder for training, with the parameter names of the Hugging Face layout.

Written for torch.compile and whole sequences: no KV cache, no batching of requests. Independent of the
engine's models, so that tests can compare the two; only scaled rotations are shared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ssd_serve.models.rope import RopeConfig, inverse_frequencies


@dataclass(frozen=True)
class Shape:
    """The sizes of one Llama decoder; embeddings and head are untied."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    context: int = 2048
    rope_theta: float = 10_000.0
    epsilon: float = 1e-5
    scaled: RopeConfig | None = None
    """Scaled rotations (RoPE scaling), if any."""


class Norm(nn.Module):
    """RMS norm with a learned weight [hidden]."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to the same shape, computed in fp32."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """Map x [batch, length, hidden] to the same shape; cos and sin are [length, head].

        `visible` is bool [length, length]: the rows that each row attends to; None: causal.
        """
        batch, length, _ = x.shape
        head = self.shape.head
        q = self.q_proj(x).view(batch, length, -1, head).transpose(1, 2)  # [batch, heads, length, head]
        k = self.k_proj(x).view(batch, length, -1, head).transpose(1, 2)  # [batch, kv_heads, length, head]
        v = self.v_proj(x).view(batch, length, -1, head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.shape.heads // self.shape.kv_heads
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None)
        result: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


class Mlp(nn.Module):
    """A SwiGLU feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to the same shape."""
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """Attention and MLP, each behind a norm, added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, visible)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Trunk(nn.Module):
    """The layers of a decoder, from the embedding to the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.epsilon)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """Map tokens [batch, length] to [batch, length, hidden]."""
        x: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, visible)
        result: Tensor = self.norm(x)
        return result


class Decoder(nn.Module):
    """A Llama decoder; its state dict has the Hugging Face names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens int64 [batch, length] to logits [batch, length, vocabulary]."""
        cos, sin = rotary_tables(self.shape, tokens.shape[1], tokens.device)
        logits: Tensor = self.lm_head(self.model(tokens, cos, sin))
        return logits


def rotary_tables(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin [length, head], fp32, for positions 0 to length - 1."""
    places = torch.arange(length, device=device, dtype=torch.float32)[:, None]
    factor = 1.0
    if shape.scaled is None:
        exponents = torch.arange(0, shape.head, 2, device=device, dtype=torch.float32) / shape.head
        angles = places / shape.rope_theta**exponents
    else:
        angles = places * inverse_frequencies(shape.scaled, shape.head).to(device)
        factor = shape.scaled.attention_factor
    angles = torch.cat((angles, angles), dim=-1)  # [length, head]
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions in the half-split form to x [batch, heads, length, head]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
