"""A vocabulary that grows from text to text: as by hand, and cut after every update."""

import pytest
import torch
from torch import nn

import fnloop as fl

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a bird sat on a log"]
EPOCHS = 3
NAMES = ("embedding.weight", "head.weight", "head.bias")


class Words(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(1, 4), nn.Linear(4, 1)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


def next_word(model, ids):
    return nn.functional.cross_entropy(model(ids[:-1]), ids[1:])


def new_model(tied):
    torch.manual_seed(0)
    return Words(tied)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@torch.no_grad()
def grow(model, optimizer, size):
    """Add rows that are the mean of those there are. Those of the optimizer's state are zero."""
    known, made = len(model.embedding.weight), {}
    for name in NAMES if size > known else ():
        prefix, _, own = name.rpartition(".")
        old = model.get_parameter(name)
        if old not in made:
            added = old.mean(0).expand(size - known, *old.shape[1:])
            made[old] = new = nn.Parameter(torch.cat([old, added]))
            for group in optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]
            if old in optimizer.state:
                optimizer.state[new] = {
                    k: torch.cat([v, torch.zeros_like(added)]) if v.shape == old.shape else v
                    for k, v in optimizer.state.pop(old).items()
                }
        setattr(model.get_submodule(prefix), own, made[old])


def encoded():
    """Return the words of each text as numbers, and how many words there are then."""
    vocabulary, found = {}, []
    for text in TEXTS:
        ids = [vocabulary.setdefault(word, len(vocabulary)) for word in text.split()]
        found.append((torch.tensor(ids), len(vocabulary)))
    return found


def weights(model):
    return {name: p.tolist() for name, p in model.named_parameters()}


def by_hand(tied):
    model, seen = new_model(tied), []
    optimizer = adamw(model)
    for ids, size in encoded():
        grow(model, optimizer, size)
        for _ in range(EPOCHS):
            next_word(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(weights(model))
    return seen


class Killed(BaseException):
    pass


def script(folder, tied, seen, kill_at=None):
    """Train on all texts, a phase each, in a new process."""
    model = new_model(tied)
    state = fl.TrainState.create(model, adamw(model), seed=0)
    state = fl.resume(folder, state, shapes="file")

    def note(state):
        seen.append(weights(state.model))
        return state

    def kill(state):
        if state.step == kill_at:
            raise Killed
        return state

    hooks = (note, fl.checkpoint(folder), kill)
    for i, (ids, size) in enumerate(encoded()):
        grow(state.model, state.optimizer, size)
        state = fl.fit(
            fl.pipeline()(next_word), state, [ids], epochs=EPOCHS, phase=f"{i}", hooks=hooks
        )
    return state


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kill_at", range(10))
def test_it_has_the_bits_of_the_loop_by_hand_wherever_it_is_cut(tmp_path, tied, kill_at):
    seen = []
    if kill_at:
        with pytest.raises(Killed):
            script(tmp_path, tied, seen, kill_at)
    script(tmp_path, tied, seen)
    assert seen == by_hand(tied)
    assert [len(each["embedding.weight"]) for each in seen[::EPOCHS]] == [5, 7, 9]


def test_by_default_a_resume_is_refused_and_names_both_shapes(tmp_path):
    with pytest.raises(Killed):
        script(tmp_path, False, [], 4)
    model = new_model(False)
    message = r"embedding.weight: \(7, 4\) saved, \(1, 4\) here.*shapes=\"file\""
    with pytest.raises(fl.CheckpointError, match=message):
        fl.resume(tmp_path, fl.TrainState.create(model, adamw(model), seed=0))
