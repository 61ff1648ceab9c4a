"""What ``stack`` gains: 16 MLPs on handwritten digits, trained alone and all at once.

    python tests/benchmarks/stacked.py

All make the same updates of 50 images, 5 epochs of them, with AdamW and other learning rates. By
hand means without fnloop imported. "By hand, stacked" is the floor: ``torch.func.vmap`` of the
gradients, and one fused update of the stacked parameters, for which all rates are the same. How it
is measured is in ``apart.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import apart
from costs import loss_fn
from search import digits

MODELS, EPOCHS = 16, 5
RATES = [0.001 * (i + 1) for i in range(MODELS)]


def make(lr: float, seed: int) -> Any:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def made() -> list[Any]:
    return [make(lr, seed) for seed, lr in enumerate(RATES)]


def alone_by_hand() -> apart.Once:
    from by_hand import train

    batches, _ = digits(shuffled=False)

    def once() -> float:
        models = made()
        begin = apart.Clock.now()
        for model, optimizer in models:
            for _ in range(EPOCHS):
                train(model, optimizer, batches)
        return apart.Clock.now() - begin

    return once


def stacked_by_hand() -> apart.Once:
    import torch
    from torch.func import functional_call, grad_and_value, stack_module_state, vmap

    batches, _ = digits(shuffled=False)

    def once() -> float:
        models = [model for model, _ in made()]
        given, _ = stack_module_state(models)
        params = {name: torch.nn.Parameter(value) for name, value in given.items()}
        optimizer = torch.optim.AdamW(params.values(), lr=RATES[0], fused=True)
        base = models[0]

        def loss_of(values: Any, x: Any, y: Any) -> Any:
            return torch.nn.functional.cross_entropy(functional_call(base, values, (x,)), y)

        update = vmap(grad_and_value(loss_of), in_dims=(0, None, None))
        begin = apart.Clock.now()
        total = torch.zeros(MODELS)
        for _ in range(EPOCHS):
            for x, y in batches:
                gradients, losses = update(params, x, y)
                for name, value in params.items():
                    value.grad = gradients[name]
                optimizer.step()
                total += losses.detach() * len(y)
        total.tolist()
        return apart.Clock.now() - begin

    return once


def by_fnloop(stacked: bool) -> Callable[[], apart.Once]:
    def set_up() -> apart.Once:
        import fnloop as fl

        batches, _ = digits(shuffled=False)
        step = fl.pipeline()(loss_fn)

        def once() -> float:
            states = {f"m{i}": fl.TrainState.create(*each) for i, each in enumerate(made())}
            together = {"all": fl.stack(states)} if stacked else states
            begin = apart.Clock.now()
            for state in together.values():
                fl.fit(step, state, batches, epochs=EPOCHS, hooks=())
            return apart.Clock.now() - begin

        return once

    return set_up


CONTENDERS = {
    "16 MLPs: by hand, alone": alone_by_hand,
    "16 MLPs: by hand, stacked": stacked_by_hand,
    "16 MLPs: fnloop, alone": by_fnloop(stacked=False),
    "16 MLPs: fnloop, stacked": by_fnloop(stacked=True),
}

if __name__ == "__main__":
    apart.main(CONTENDERS)
