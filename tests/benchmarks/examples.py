"""Two of the examples beside their loops by hand: a small GPT on text, a small CNN on images.

    python tests/benchmarks/examples.py                  # each round takes some 10 s
    python tests/benchmarks/examples.py --only text

How it is measured is in ``apart.py``. Models, data and loss functions are those of
``examples/text.py`` and ``examples/finetune.py``, each on one thread. By hand means the same
updates at their best: fused AdamW, gradients clipped with foreach, each loss read once an epoch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apart

sys.path.append(str(Path(__file__).parent.parent.parent / "examples"))  # which has a by_hand too
SNIPPETS, IMAGES = 480, 1280  # of a turn: 60 batches of 8, 20 of 64


def text_parts() -> tuple[Any, dict[str, Any], Any, Any]:
    """Return the model, its optimizers, the loader and the module of the example."""
    import text
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    torch.manual_seed(0)
    padded = functools.partial(pad_sequence, batch_first=True, padding_value=text.PAD)
    loader: Any = DataLoader(text.snippets()[:SNIPPETS], 8, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    model = text.GPT()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW(rest, lr=8e-3, weight_decay=0.1, fused=True)
    return model, {"matrices": muon, "rest": adamw}, loader, text


def text_by_hand() -> apart.Once:
    import torch
    from by_hand import MAX_NORM, WINDOW
    from torch.nn.functional import cross_entropy
    from torch.nn.utils import clip_grad_norm_

    model, optimizers, loader, text = text_parts()
    params = list(model.parameters())

    def once() -> None:
        model.train()
        total, seen, window = torch.zeros(()), 0, []
        for batch in loader:
            window.append(batch)
            if len(window) < WINDOW:
                continue
            number = sum(int((b[:, 1:] != text.PAD).sum()) for b in window)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            for b in window:
                logits = model(b[:, :-1].clamp(min=0)).flatten(0, 1)
                wanted = b[:, 1:].flatten()
                loss = cross_entropy(logits, wanted, ignore_index=text.PAD, reduction="sum")
                (loss / number).backward()
                total += loss.detach()
            clip_grad_norm_(params, MAX_NORM)
            for optimizer in optimizers.values():
                optimizer.step()
            seen, window = seen + number, []
        (total / seen).item()

    return once


def text_fitted() -> apart.Once:
    import fnloop as fl

    model, optimizers, loader, text = text_parts()
    step = fl.pipeline(fl.accumulate(4), fl.clip(1.0))(text.next_character)
    return _fitted(step, fl.TrainState.create(model, optimizers), loader)


def image_parts() -> tuple[Any, Any, Any]:
    """Return the model, its optimizer and the loader."""
    import finetune
    import torch
    from mnist import digits
    from torch.utils.data import DataLoader, Subset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, _ = digits()
    model = finetune.model_in_two_parts()
    model.head = torch.nn.Linear(64 * 3 * 3, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    return model, optimizer, DataLoader(Subset(images, range(IMAGES)), 64, shuffle=True)


def images_by_hand() -> apart.Once:
    import torch
    from torch.nn.functional import cross_entropy

    model, optimizer, loader = image_parts()

    def once() -> None:
        model.train()
        total, right, seen = torch.zeros(()), torch.zeros((), dtype=torch.int64), 0
        for x, y in loader:
            optimizer.zero_grad()
            output = model(x)
            loss = cross_entropy(output, y)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(y)
            right += (output.detach().argmax(-1) == y).sum()
            seen += len(y)
        (total / seen).item(), (right / seen).item()

    return once


def images_fitted() -> apart.Once:
    import torch
    from mnist import accuracy

    import fnloop as fl

    model, optimizer, loader = image_parts()
    step = fl.pipeline(fl.metric(accuracy=accuracy))(fl.supervised(torch.nn.CrossEntropyLoss()))
    return _fitted(step, fl.TrainState.create(model, optimizer), loader)


def _fitted(step: Any, state: Any, loader: Any) -> apart.Once:
    import fnloop as fl

    nowhere = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    hooks = fl.progress(file=nowhere), fl.halt_on_nonfinite()

    def once() -> None:
        nonlocal state
        state = fl.fit(step, state, loader, hooks=hooks)

    return once


def contenders() -> Iterator[tuple[str, Any]]:
    yield "text: by hand", text_by_hand
    yield "text: fnloop", text_fitted
    yield "images: by hand", images_by_hand
    yield "images: fnloop", images_fitted


CONTENDERS = dict(contenders())

if __name__ == "__main__":
    apart.main(CONTENDERS)
