# SPDX-License-Identifier: Apache-2.0
"""A small decoder-only transformer over bytes, in plain torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # every byte is a token


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalized first."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for `x` of shape (batch, sequence, width)."""
        batch, sequence, width = x.shape
        heads = self.query_key_value(self.norm_1(x)).view(batch, sequence, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, sequence, width))
        hidden = F.gelu(self.expand(self.norm_2(x)), approximate="tanh")
        return torch.add(x, self.contract(hidden))


class GPT(nn.Module):
    """Predicts the next byte; the output layer shares the embedding's weights.

    Args:
        num_layers: Number of blocks.
        width: Size of the residual stream; a multiple of `num_heads`.
        num_heads: Attention heads of each block.
        sequence: Longest sequence, in bytes.
    """

    def __init__(self, num_layers: int, width: int, num_heads: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte for `tokens` of shape (batch, sequence)."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy in nats per byte, computed in fp32."""
        return F.cross_entropy(self(inputs).float().flatten(0, 1), targets.flatten())
