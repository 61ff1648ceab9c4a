"""Handwritten digits on one process or several: the same run, up to rounding.

    accelerate launch --multi_gpu --num_processes 2 examples/many.py    # two
    torchrun --nproc-per-node 2 examples/many.py                        # two
    python examples/many.py                                             # one

Without GPUs the processes run on the CPU. On another number of them sums are rounded differently.
Where the bits must be the same, use ``TrainState.create(..., exact=True)``.

With --resume FOLDER you can kill it and start it again, on any number of processes.
"""

import argparse

import torch
from mnist import accuracy, digits
from torch import nn
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop.schedules import one_cycle

TOGETHER = 64  # images in an update, in all processes together


def small_cnn():
    """Return a CNN without BatchNorm, whose results would depend on the size of a batch."""
    first, second = nn.Conv2d(1, 16, 3, stride=2), nn.Conv2d(16, 32, 3, stride=2)  # 28 -> 13 -> 6
    layers = first, nn.ReLU(), second, nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(32 * 6 * 6, 10))


@fl.middleware("step")
def note_share(share):
    """Note on how many images of each update this process has trained."""

    def wrap(step):
        def noted(state, batch):
            state, out = step(state, batch)
            share.append(out.weight)
            return state, out

        return noted

    return wrap


def main():
    parser = argparse.ArgumentParser(description="A small CNN learns digits on many processes.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", help="folder for checkpoints to resume from")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = small_cnn()
    state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True))
    hooks = [fl.progress(), fl.halt_on_nonfinite()]
    if args.resume:
        state = fl.resume(args.resume, state)
        hooks.append(fl.every(steps=20)(fl.checkpoint(args.resume)))  # written by the main process

    processes, share = state.backend.world_size, []
    train, valid = digits()
    held_out = DataLoader(valid, batch_size=100)
    shuffled = DataLoader(train, batch_size=TOGETHER // processes, shuffle=True)
    loaders = {"train": shuffled, "valid": held_out}
    middleware = (
        fl.metric(accuracy=accuracy),
        fl.clip(1.0),
        fl.schedule(one_cycle()),
        note_share(share),
    )
    step = fl.pipeline(*middleware)(fl.supervised(nn.CrossEntropyLoss()))
    state = fl.fit(step, state, loaders, epochs=args.epochs, hooks=hooks)

    # Every process runs these lines on its share of the images, and gets the result of all.
    found = fl.evaluate(step, state, held_out)
    guesses = fl.predict(lambda model, batch: model(batch[0]).argmax(dim=1), state, held_out)
    guesses = torch.cat([*guesses])
    shares = fl.gather(sum(share))
    if state.backend.main:
        print(state.history)
        images = f"{len(guesses):,} images held out"
        where = f"{processes} process" + "es" * (processes > 1)
        print(f"accuracy on the {images}: {found['accuracy']:.1%}, on {where}")
        sevens = (guesses == 7).sum(), (valid.tensors[1] == 7).sum()
        print(f"sevens: {sevens[0]} predicted, {sevens[1]} real")
        print(f"images that each process trained on: {', '.join(f'{n:,}' for n in shares)}")


if __name__ == "__main__":
    main()
