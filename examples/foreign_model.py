"""gem-kernels in somebody's own torch model: no trainer, no configuration, no plugin of ours but the kernels.

    python3 -m pip install gem-kernels
    python3 examples/foreign_model.py

Users have histories of different lengths, packed without padding. The model learns whether a user clicks an item: yes, mostly, if the history holds
an item of the same kind. It runs on a CPU in a few seconds, and on a GPU if there is one.
"""

import torch
from torch import Tensor, nn

from gem_core.ops import pooled_attention
from gem_kernels.nn import GdpaAttention, JaggedAttention

ITEMS, KINDS, WIDTH, HEADS, LONGEST = 20, 10, 32, 4, 12


class ClickModel(nn.Module):
    """Two attention layers over the history, then the candidate asks the history (one learned step of pooling)."""

    def __init__(self, softmax_backend: str | None) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.mix = GdpaAttention(WIDTH, HEADS, activation="silu")
        self.order = JaggedAttention(WIDTH, HEADS, causal=True, backend=softmax_backend)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.top = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        self.softmax_backend = softmax_backend

    def forward(self, history: Tensor, offsets: Tensor, longest: int, candidate: Tensor) -> Tensor:
        """Logits ``[users]`` from packed histories ``[events]`` and candidates ``[users]``."""
        x = self.items(history)
        x = x + self.mix(self.norms[0](x), offsets, longest)
        x = x + self.order(self.norms[1](x), offsets, longest)
        k, v = self.key_value(self.norms[2](x)).unflatten(-1, (2, HEADS, WIDTH // HEADS)).unbind(1)
        asked = self.items(candidate)
        seeds = asked.view(-1, 1, HEADS, WIDTH // HEADS)
        found = pooled_attention(seeds, k, v, offsets, max_k=longest, backend=self.softmax_backend).flatten(1)
        logits: Tensor = self.top(torch.cat([found, asked], dim=1))[:, 0]
        return logits


def batch(users: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
    """Packed histories, offsets, longest history, candidates and labels; the kind of an item is its number modulo ``KINDS``."""
    lengths = torch.randint(0, LONGEST + 1, (users,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    history = torch.randint(0, ITEMS, (int(offsets[-1]),), generator=generator)
    candidate = torch.randint(0, ITEMS, (users,), generator=generator)
    user = torch.repeat_interleave(torch.arange(users), lengths)
    same = (history % KINDS == candidate[user] % KINDS).to(torch.int64)
    seen = torch.zeros(users, dtype=torch.int64).index_add_(0, user, same) > 0
    label = torch.where(torch.rand(users, generator=generator) < 0.95, seen, ~seen).float()
    return history, offsets, int(lengths.max()), candidate, label


def main(steps: int = 100, users: int = 128) -> list[float]:
    """Train, print the loss, return it for every step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ClickModel("sdpa").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        history, offsets, longest, candidate, label = batch(users, generator)
        logits = model(history.to(device), offsets.to(device), longest, candidate.to(device))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d}   loss {sum(losses[-10:]) / len(losses[-10:]):.4f}")
    return losses


if __name__ == "__main__":
    main()
