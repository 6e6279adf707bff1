"""Train a language model of letters on alice.txt; go on where it was stopped. Six lines are distrun's (docs/torch.md).

Alone:            python examples/torch_lm.py
With a launcher:  distrun launch -n 2 -s 2 --launcher local python examples/torch_lm.py --checkpoint lm.pt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import distrun_runtime.torch as dt

LENGTH = 64
"""Letters of a sequence."""


class Model(nn.Module):
    """Scores of the letter that follows each letter of sequences (n, length)."""

    def __init__(self, letters: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, hidden)
        self.recur = nn.GRU(hidden, hidden, batch_first=True)
        self.decode = nn.Linear(hidden, letters)

    def forward(self, text: Tensor) -> Tensor:
        return self.decode(self.recur(self.embed(text))[0])


def loss_of(net: nn.Module, text: Tensor) -> Tensor:
    """Return the mean loss of a letter, in nats."""
    return cross_entropy(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a worker takes for a step (default 16)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of AdamW (default 0.01)")
    parser.add_argument("--checkpoint", metavar="FILE", default="torch_lm.pt", help="written after each epoch")
    options = parser.parse_args()

    text = Path(__file__).with_name("alice.txt").read_text("utf-8").lower()
    letters = sorted(set(text))
    numbers = torch.tensor([letters.index(letter) for letter in text])
    rows = numbers[: len(numbers) // LENGTH * LENGTH].reshape(-1, LENGTH)
    train, valid = TensorDataset(rows[200:]), rows[:200]

    torch.manual_seed(0)
    net = Model(len(letters), 64)
    opt = torch.optim.AdamW(net.parameters(), options.lr)
    loader = DataLoader(train, options.batch_size, sampler=dt.DistributedSampler(train))
    start = dt.resume(options.checkpoint, net, opt, epoch=0).epoch
    opt = dt.DistributedOptimizer(opt, net)
    for epoch in range(start, options.epochs):
        loader.sampler.set_epoch(epoch)
        for (batch,) in loader:
            loss_of(net, batch).backward()
            clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            print("Epoch %d: loss %.6f" % (epoch, float(loss_of(net, valid))), flush=True)
        dt.save(options.checkpoint, net, opt, epoch=epoch + 1)


if __name__ == "__main__":
    main()
