"""Train on the workers of Ray Train: ``pip install -e '.[ray]' && python examples/ray_train.py``.

Ray starts the processes and their process group, which ``TrainState.create`` joins. The rest is as
in any other script. If a worker is lost, Ray starts the function again, and it resumes.
"""

import sys
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig  # type: ignore
from ray.train.torch import TorchTrainer  # type: ignore
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl


def train(settings):
    """Train in each worker."""
    torch.manual_seed(0)
    x = torch.randn(600, 8)
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    loaders = {"train": DataLoader(data, 30, shuffle=True), "valid": DataLoader(data, 50)}
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.5), seed=0)
    state = fl.resume(settings["folder"], state)
    hooks = (fl.every(epochs=1)(fl.checkpoint(settings["folder"])),)
    step = fl.pipeline(fl.clip(1.0))(fl.supervised(nn.CrossEntropyLoss()))
    state = fl.fit(step, state, loaders, epochs=3, hooks=hooks)
    return {"processes": state.backend.world_size, "loss": state.history["valid/loss"]}


def main(folder, workers=2):
    """Start the workers, and return what the main one returns."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(Path(folder, "run").absolute())},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=str(Path(folder, "ray").absolute()),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    return trainer.fit().return_value


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "runs/ray"))
