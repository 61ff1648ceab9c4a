"""Handwritten digits that grow: a CNN learns them at 14, 20 and 28 pixels, in one run.

    python examples/progressive.py --epochs 4 --resume runs/progressive

Small images are cheap, and what the CNN learns from them helps with larger ones. Each size is a
phase with its own learning rate cycle; all share one history. With --resume you can kill it in any
phase and start it again: the result is the same, bit for bit.
"""

import argparse

import torch
from mnist import accuracy, conv_block, digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop.schedules import one_cycle

SIZES = {14: 256, 20: 128, 28: 64}  # pixels of an edge to images in a batch


def cnn_for_any_size():
    blocks = conv_block(1, 16), conv_block(16, 32), conv_block(32, 64)
    return nn.Sequential(*blocks, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def resized(data, size):
    images, labels = data.tensors
    images = nn.functional.interpolate(images, size, mode="bilinear", antialias=True)
    return TensorDataset(images, labels)


def main():
    parser = argparse.ArgumentParser(description="A small CNN learns digits of growing size.")
    parser.add_argument("--epochs", type=int, default=4, help="epochs at each size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", help="folder for checkpoints to resume from")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = cnn_for_any_size()
    state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    hooks = [fl.progress(), fl.halt_on_nonfinite()]
    if args.resume:
        state = fl.resume(args.resume, state)
        hooks.append(fl.every(steps=10)(fl.checkpoint(args.resume)))

    train, valid = digits()
    middleware = fl.metric(accuracy=accuracy), fl.clip(1.0), fl.schedule(one_cycle())
    step = fl.pipeline(*middleware)(fl.supervised(nn.CrossEntropyLoss()))
    for size, together in SIZES.items():
        shuffled = DataLoader(resized(train, size), batch_size=together, shuffle=True)
        loaders = {"train": shuffled, "valid": DataLoader(resized(valid, size), batch_size=500)}
        phase = f"{size} pixels"
        state = fl.fit(step, state, loaders, epochs=args.epochs, hooks=hooks, phase=phase)

    print(state.history)
    print(f"accuracy at {max(SIZES)} pixels: {state.history.latest('valid/accuracy'):.1%}")


if __name__ == "__main__":
    main()
