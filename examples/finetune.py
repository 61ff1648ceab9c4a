"""Fine-tuning: a CNN that knows the digits 0 to 4 learns 5 to 9, from few images.

    python examples/finetune.py --epochs 8 --resume runs/finetune

First everything learns 0 to 4. Then the extractor of features is frozen, and the head learns 5 to
9. Then the extractor learns too, at a tenth of the rate. With --resume you can kill it in any phase
and start it again: the result is the same, bit for bit.
"""

import argparse
from collections import OrderedDict

import torch
from mnist import accuracy, conv_block, digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop.schedules import one_cycle

FEW = 500  # images of the digits 5 to 9 to learn from


def model_in_two_parts():
    blocks = conv_block(1, 16), conv_block(16, 32), conv_block(32, 64)  # 28 -> 14 -> 7 -> 3
    extractor, head = nn.Sequential(*blocks, nn.Flatten()), nn.Linear(64 * 3 * 3, 5)
    return nn.Sequential(OrderedDict(extractor=extractor, head=head))


def five_digits(data, first, most=None):
    """Return the images of five digits, with labels from 0 to 4."""
    images, labels = data.tensors
    chosen = ((labels >= first) & (labels < first + 5)).nonzero().flatten()[:most]
    return TensorDataset(images[chosen], labels[chosen] - first)


def main():
    parser = argparse.ArgumentParser(description="A small CNN learns five digits, then five more.")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", help="folder for checkpoints to resume from")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = model_in_two_parts()
    state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True))
    hooks = [fl.progress(), fl.halt_on_nonfinite()]
    if args.resume:
        state = fl.resume(args.resume, state)
        hooks.append(fl.every(steps=4)(fl.checkpoint(args.resume)))

    train, valid = digits()
    low = five_digits(train, 0), five_digits(valid, 0)
    high = five_digits(train, 5, FEW), five_digits(valid, 5)
    middleware = fl.metric(accuracy=accuracy), fl.schedule(one_cycle())
    step = fl.pipeline(*middleware)(fl.supervised(nn.CrossEntropyLoss()))

    def learn(phase, state, data):
        loaders = DataLoader(data[0], batch_size=64, shuffle=True), DataLoader(data[1], 500)
        return fl.fit(step, state, loaders, epochs=args.epochs, hooks=hooks, phase=phase)

    state = learn("0 to 4", state, low)
    state = fl.freeze(state, "extractor")
    state = learn("5 to 9, the head", state, high)
    state = fl.unfreeze(state, "extractor", lr=5e-4)
    state = learn("5 to 9, all of it", state, high)

    if state.stop:  # such as Ctrl-C
        return
    print(state.history)
    reached = state.history["valid/accuracy"]
    ends = [*(phase.records for phase in state.phases[1:]), len(reached)]
    for phase, end in zip(state.phases, ends, strict=True):
        print(f"{phase.name}: {reached[end - 1]:.1%}")


if __name__ == "__main__":
    main()
