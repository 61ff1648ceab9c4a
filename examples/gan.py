"""A small DCGAN learns to draw digits: scikit-learn's 1,797 images of 8 × 8 pixels.

    python examples/gan.py --out gan --resume runs/gan

Discriminator and generator take turns on each batch. After each epoch, a picture of new digits is
written to a file. With --resume you can kill it and start it again: it resumes where it left off,
and the result is the same, bit for bit.
"""

import argparse
from pathlib import Path

import torch
from matplotlib import image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl

NOISE = 32  # numbers from which an image is made


def digits():
    """Return the images; shape=(1797, 1, 8, 8), from -1 (black) to 1 (white)."""
    pixels, _ = load_digits(return_X_y=True)  # from 0 to 16
    return torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 8 - 1


def generator():
    """Return the net that makes images of noise: 1 -> 2 -> 4 -> 8 pixels."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 128, 2, bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def discriminator():
    """Return the net that tells real images (a number above 0) from made ones (below)."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Dropout2d(0.3),
        nn.Conv2d(64, 128, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(128),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(128 * 2 * 2, 1),
    )


def noise(n):
    return torch.randn(n, NOISE, 1, 1)


def taken_for(label, scores):
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def d_loss(model, batch):
    """The discriminator is to tell real images from made ones."""
    (real,) = batch
    made = model["g"](noise(len(real)))
    return taken_for(0.9, model["d"](real)) + taken_for(0.0, model["d"](made))


def g_loss(model, batch):
    """The generator is to make images that the discriminator takes for real."""
    (real,) = batch
    return taken_for(1.0, model["d"](model["g"](noise(len(real)))))


def made_of(model, z):
    return model["g"](z)


def drawing(folder):
    """Return a hook that writes a picture of 10 × 10 images, made by the averaged weights."""
    folder.mkdir(parents=True, exist_ok=True)
    fixed = torch.randn(100, NOISE, 1, 1, generator=torch.Generator().manual_seed(0))

    def draw(state):
        made = fl.predict(made_of, fl.averaged(state), [fixed])
        framed = nn.functional.pad(torch.cat([*made]), (1, 1, 1, 1), value=-1.0)
        picture = framed.view(10, 10, 10, 10).transpose(1, 2).reshape(100, 100)
        large = picture.repeat_interleave(4, 0).repeat_interleave(4, 1)
        path = folder / f"epoch_{state.epoch:03}.png"
        image.imsave(path, large.numpy(), cmap="gray", vmin=-1, vmax=1)
        return state

    return draw


def main():
    parser = argparse.ArgumentParser(description="A small DCGAN learns to draw digits.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("gan"), help="folder for the pictures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="folder for checkpoints to resume from")
    args = parser.parse_args()

    torch.set_num_threads(1)  # nets this small are fastest on one core
    torch.manual_seed(args.seed)
    loader = DataLoader(TensorDataset(digits()), batch_size=64, shuffle=True, drop_last=True)
    model = nn.ModuleDict({"d": discriminator(), "g": generator()})
    optimizers = {
        name: torch.optim.Adam(model[name].parameters(), lr=1e-3, betas=(0.5, 0.999), fused=True)
        for name in ("d", "g")
    }
    steps = {"d": fl.pipeline()(d_loss), "g": fl.pipeline()(g_loss)}
    step = fl.pipeline(fl.ema(0.99))(fl.alternate(steps))  # the average smooths what is drawn
    state = fl.TrainState.create(model, optimizers)
    hooks = [fl.progress(), fl.halt_on_nonfinite(), fl.every(epochs=1)(drawing(args.out))]
    if args.resume:
        state = fl.resume(args.resume, state)
        hooks.append(fl.every(epochs=5)(fl.checkpoint(args.resume)))
    state = fl.fit(step, state, loader, epochs=args.epochs, hooks=hooks)
    if state.stop:  # such as Ctrl-C
        return
    d, g = (state.history.latest(f"train/{name}/loss") for name in ("d", "g"))
    print(f"losses in the last epoch: discriminator {d:.3f}, generator {g:.3f}")
    print(f"the pictures are in {args.out}; the last: epoch_{state.epoch:03}.png")


if __name__ == "__main__":
    main()
