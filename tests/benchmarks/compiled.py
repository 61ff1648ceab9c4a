"""What torch.compile gains on the CPU for a tiny model, by parts of an update.

    python tests/benchmarks/compiled.py --cpu      # 3 minutes, most of which torch compiles

How it is measured is in ``apart.py``. The model is 64-64-64-10 with batches of 16, clipped by norm,
with SGD with momentum or AdamW; a round has 200 updates of batches in a list. "one graph" is by
hand: a function that makes gradients by ``torch.func``, clips them and calls the optimizer's own
step, compiled as a whole, with the learning rate as a tensor. A contender is not timed unless its
weights after 20 updates are those of the loop by hand, to 1e-4.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import apart
from apart import CLOCK

UPDATES, CHECKED, MAX_NORM = 200, 20, 1.0
Train = Callable[[list[Any]], object]


def make(kind: str) -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    widths = itertools.pairwise((64, 64, 64, 10))
    layers = [part for a, b in widths for part in (nn.Linear(a, b), nn.ReLU())][:-1]
    model = nn.Sequential(*layers)
    if kind == "SGD":
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=0.001)


def make_batches() -> list[Any]:
    import torch

    torch.manual_seed(1)
    return [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(UPDATES)]


def loss_fn(model: Any, batch: Any) -> Any:
    from torch import nn

    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def by_hand(model: Any, optimizer: Any) -> Train:
    from torch.nn.utils import clip_grad_norm_

    def train(batches: list[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()

    return train


def one_graph(model: Any, optimizer: Any) -> Train:
    import torch
    from torch.nn.utils import clip_grad_norm_

    names, params = zip(*model.named_parameters(), strict=True)
    places = tuple(range(len(params)))
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])

    def update(x: Any, y: Any) -> Any:
        def loss(*values: Any) -> Any:
            called = lambda x: torch.func.functional_call(
                model, dict(zip(names, values, strict=True)), (x,)
            )
            return loss_fn(called, (x, y))

        gradients, value = torch.func.grad_and_value(loss, places)(*(p.detach() for p in params))
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        return value

    compiled = torch.compile(update)

    def train(batches: list[Any]) -> None:
        with torch.no_grad():
            for x, y in batches:
                compiled(x, y)

    return train


def with_fnloop(model: Any, optimizer: Any, **settings: Any) -> Train:
    import fnloop as fl

    listed = [fl.compiled(**{k: v for k, v in settings.items() if v})] if settings else []
    step = fl.pipeline(*listed, fl.clip(MAX_NORM))(loss_fn)
    state = fl.TrainState.create(model, optimizer, seed=0)

    def train(batches: list[Any]) -> None:
        nonlocal state
        state = fl.fit(step, state, batches, hooks=())

    return train


BUILDS = {
    "by hand": by_hand,
    "fnloop": with_fnloop,
    "compiled()": functools.partial(with_fnloop, update=False),
    "compiled(update=True)": functools.partial(with_fnloop, update=True),
    "one graph": one_graph,
}


def set_up(build: Callable[..., Train], kind: str) -> apart.Once:
    import torch
    from torch.nn.utils import parameters_to_vector

    torch.set_num_threads(1)
    model, optimizer = make(kind)
    batches, train = make_batches(), build(model, optimizer)
    hand, its_optimizer = make(kind)
    by_hand(hand, its_optimizer)(batches[:CHECKED])
    train(batches[:CHECKED])
    made, right = map(parameters_to_vector, (model.parameters(), hand.parameters()))
    apart_by = (made - right).abs().max().item()
    if not apart_by <= 1e-4:
        raise SystemExit(f"{kind}: {build} makes other weights than the loop by hand: {apart_by}")

    def once() -> float:
        CLOCK.start()
        train(batches)
        CLOCK.stop()
        return CLOCK.seconds

    return once


def contenders() -> Iterator[tuple[str, Callable[[], apart.Once]]]:
    for kind, (name, build) in itertools.product(("SGD", "AdamW"), BUILDS.items()):
        yield f"{kind}: {name}", functools.partial(set_up, build, kind)


if __name__ == "__main__":
    apart.main(dict(contenders()))
