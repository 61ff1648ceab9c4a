"""Handwritten digits on several processes. The script doesn't say how many, and what comes out doesn't depend on it.

    accelerate launch --multi_gpu --num_processes 2 examples/many.py     # two processes; without GPUs, on the CPU
    torchrun --nproc-per-node 2 examples/many.py                         # the same
    python examples/many.py                                              # one process, the same accuracy

With --resume FOLDER it can be killed and started again, on as many processes as there are by then.
"""

import argparse

import torch
from mnist import accuracy, digits
from torch import nn
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop.schedules import one_cycle

TOGETHER = 64  # images in an update, of all processes together


def small_cnn():
    """Return a CNN in which an image knows nothing of the others in its batch, which is smaller on more processes."""
    convolutions = [
        nn.Conv2d(1, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
    ]  # 28 -> 13 -> 6
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 6 * 6, 10))


@fl.middleware("step")
def note_share(share):
    """Note how many images of each update this process has trained on."""

    def wrap(step):
        def noted(state, batch):
            state, out = step(state, batch)
            share.append(out.weight)
            return state, out

        return noted

    return wrap


def main():
    parser = argparse.ArgumentParser(
        description="A small CNN learns handwritten digits, on any number of processes."
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", help="folder for checkpoints, to go on from")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = small_cnn()
    state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    state, hooks = (
        (fl.resume(args.resume, state) if args.resume else state),
        [fl.progress(), fl.halt_on_nonfinite()],
    )
    if args.resume:
        hooks.append(
            fl.every(steps=20)(fl.checkpoint(args.resume))
        )  # written once, by the main process

    processes, share = state.backend.world_size, []
    train, valid = digits()
    held_out = DataLoader(valid, batch_size=100)
    loaders = {
        "train": DataLoader(train, batch_size=TOGETHER // processes, shuffle=True),
        "valid": held_out,
    }
    middleware = (
        fl.metric(accuracy=accuracy),
        fl.clip(1.0),
        fl.schedule(one_cycle()),
        note_share(share),
    )
    step = fl.pipeline(*middleware)(fl.supervised(nn.CrossEntropyLoss()))
    state = fl.fit(step, state, loaders, epochs=args.epochs, hooks=hooks)

    # Each of these lines runs in every process, on its share of the images, and gives what one process would get.
    found = fl.evaluate(step, state, held_out)
    guesses = torch.cat(
        [*fl.predict(lambda model, batch: model(batch[0]).argmax(dim=1), state, held_out)]
    )
    shares = fl.gather(sum(share))
    if state.backend.main:
        print(state.history)
        print(
            f"accuracy on the {len(guesses):,} images held out: {found['accuracy']:.1%}, on {processes} processes"
        )
        print(
            f"taken for a seven: {(guesses == 7).sum()} of them; {(valid.tensors[1] == 7).sum()} are one"
        )
        print(f"images that each process trained on: {', '.join(f'{n:,}' for n in shares)}")


if __name__ == "__main__":
    main()
