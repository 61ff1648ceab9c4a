"""Projects that change the optimizer half-way: against a loop by hand, and cut at every update."""

import math

import attrs
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam

import fnloop as fl
from fnloop.testing import assert_same


def seeded(make):
    torch.manual_seed(0)
    return make()


def check_cuts(create, script, folder):
    """Check that the script continues from the checkpoint of every update, and of every end."""
    paths, keeps = [], [True]

    def save(state):
        if keeps:
            paths.append(fl.save(state, folder / f"{len(paths)}"))
        return state

    hooks = (fl.every(steps=1)(save), fl.every(epochs=1)(save))
    whole = script(create(), hooks=hooks)
    assert len(paths) > whole.step
    keeps.clear()
    for path in paths:
        assert_same(script(fl.restore(path, create()), hooks=hooks), whole)


# --- PINN: Adam, then L-BFGS

POINTS = torch.linspace(0, math.pi, 24, dtype=torch.float64)[:, None]


def solution():
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def residual(model, x):
    """u'' = -sin(x) with u = 0 at both ends, whose solution is sin(x)."""
    x = x.detach().clone().requires_grad_()
    u = model(x)
    first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    loss = (second + x.sin()).square().mean() + u[0].square().mean() + u[-1].square().mean()
    return loss, {"weight": 1}


def adam_and_lbfgs(model):
    lbfgs = LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    return {"adam": Adam(model.parameters(), lr=0.02), "lbfgs": lbfgs}


def pinn():
    model = seeded(solution)
    return fl.TrainState.create(model, adam_and_lbfgs(model), seed=0)


def train_pinn(state, hooks=()):
    for name, updates in (("adam", 6), ("lbfgs", 4)):
        step = fl.pipeline(fl.using(name))(residual)
        state = fl.fit(step, state, [POINTS], epochs=updates, phase=name, hooks=hooks)
    return state


def test_adam_then_lbfgs_is_the_loop_by_hand():
    model = seeded(solution)
    adam, lbfgs = adam_and_lbfgs(model).values()
    for _ in range(6):
        adam.zero_grad()
        residual(model, POINTS)[0].backward()
        adam.step()

    def closure():
        lbfgs.zero_grad()
        loss = residual(model, POINTS)[0]
        loss.backward()
        return loss

    losses = [lbfgs.step(closure).item() for _ in range(4)]
    state = train_pinn(pinn())
    assert state.updates == {"adam": 6, "lbfgs": 4}
    assert [*state.history["train/loss"][6:]] == losses and losses[-1] < losses[0] / 3
    for ours, theirs in zip(state.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_adam_then_lbfgs_continues_from_every_update(tmp_path):
    check_cuts(pinn, train_pinn, tmp_path)


# --- AWD-LSTM: SGD until the validation loss stalls, then ASGD, whose average is evaluated


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.out = nn.Linear(5, 6)

    def forward(self, tokens):
        return self.out(self.lstm(self.embedding(tokens))[0])


def next_token(model, tokens):
    output = model(tokens[:, :-1])
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten())


def texts():
    torch.manual_seed(1)
    steps = torch.randint(0, 3, (5, 4, 8)).cumsum(-1) % 6
    return [*steps[:3]], [*steps[3:]]


TRAINING, HELD_OUT = texts()
RATE, EPOCHS = 10.0, 7


def sgd_and_asgd(model):
    asgd = torch.optim.ASGD(model.parameters(), lr=RATE, t0=0, lambd=0.0, weight_decay=1e-5)
    return {"sgd": SGD(model.parameters(), lr=RATE, weight_decay=1e-5), "asgd": asgd}


def stalls(losses, n=1):
    """Return whether the last loss is above the best of those more than n before it."""
    return len(losses) > n and losses[-1] > min(losses[:-n])


def evaluated(model):
    with torch.no_grad():
        return sum(next_token(model, batch).item() for batch in HELD_OUT) / len(HELD_OUT)


def language():
    model = seeded(Language)
    return fl.TrainState.create(model, sgd_and_asgd(model), seed=0)


def stop_where_it_stalls(state):
    return attrs.evolve(state, stop="stalls") if stalls(state.history["valid/loss"]) else state


def train_language(state, hooks=()):
    stop = fl.every(epochs=1)(stop_where_it_stalls)
    loaders = {"train": TRAINING, "valid": HELD_OUT}
    members = (fl.clip(0.25),)
    first = fl.pipeline(*members, fl.using("sgd"))(next_token)
    state = fl.fit(first, state, loaders, epochs=EPOCHS, phase="sgd", hooks=(*hooks, stop))
    then = fl.pipeline(*members, fl.using("asgd"))(next_token)
    return fl.fit(then, state, loaders, epochs=3, phase="asgd", hooks=hooks)


def test_sgd_then_asgd_is_the_loop_by_hand():
    model = seeded(Language)
    optimizers = sgd_and_asgd(model)

    def epoch(optimizer):
        for batch in TRAINING:
            optimizer.zero_grad()
            next_token(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
        return evaluated(model)

    losses = []
    while not stalls(losses) and len(losses) < EPOCHS:
        losses.append(epoch(optimizers["sgd"]))
    switched = len(losses)
    losses += [epoch(optimizers["asgd"]) for _ in range(3)]
    assert 1 < switched < EPOCHS
    state = train_language(language())
    assert state.updates == {"sgd": 3 * switched, "asgd": 9}
    assert [r.metrics["valid/loss"] for r in state.history if not r.closing] == losses
    average = state.optimizer["asgd"].state
    for ours, theirs in zip(state.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(average[ours]["ax"], optimizers["asgd"].state[theirs]["ax"])


def test_sgd_then_asgd_continues_from_every_update(tmp_path):
    check_cuts(language, train_language, tmp_path)


# --- a new head first, then everything, with one schedule of each

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(2))
DATA = [(part, part.sum(1, keepdim=True)) for part in X.split(4)]
mse = fl.supervised(nn.MSELoss())


def network():
    return nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 1)})


def regression(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model["head"](model["body"](x).tanh()), y)


def of_parts(model):
    body = SGD(model["body"].parameters(), lr=0.1, momentum=0.9)
    return {"head": Adam(model["head"].parameters(), lr=0.1), "body": body}


def parts():
    model = seeded(network)
    return fl.TrainState.create(model, of_parts(model), seed=0)


def train_parts(state, hooks=()):
    members = (fl.clip(0.5), fl.schedule(lambda i, total: 1 - i / total))
    head = fl.pipeline(*members, fl.using("head"))(regression)
    state = fl.fit(head, state, DATA, epochs=2, hooks=hooks)
    return fl.fit(fl.pipeline(*members)(regression), state, DATA, epochs=4, hooks=hooks)


def test_a_head_first_is_the_loop_by_hand():
    model = seeded(network)
    head, body = of_parts(model).values()
    done = {"head": 0, "body": 0}

    def update(batch, total, **used):
        for one in (head, body):
            one.zero_grad()
        regression(model, batch).backward()
        params = [p for one in used.values() for g in one.param_groups for p in g["params"]]
        clipped = [p for p in model.parameters() if any(p is other for other in params)]
        nn.utils.clip_grad_norm_(clipped, 0.5)
        for name, one in used.items():
            one.param_groups[0]["lr"] = 0.1 * (1 - done[name] / total[name])
            one.step()
            done[name] += 1

    for batch in 2 * DATA:
        update(batch, {"head": 6}, head=head)
    for batch in 2 * DATA:
        update(batch, {"head": 12, "body": 6}, head=head, body=body)
    state = train_parts(parts())
    assert state.updates == {"head": 12, "body": 6}
    for ours, theirs in zip(state.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_head_first_continues_from_every_update(tmp_path):
    check_cuts(parts, train_parts, tmp_path)


# --- a new optimizer in each round


def rounds():
    model = seeded(network)
    return fl.TrainState.create(model, Adam(model.parameters(), lr=0.1), seed=0)


def train_rounds(state, hooks=()):
    """When it is started again, only the rounds that are still to begin get a new optimizer."""
    for name in ("first", "second"):
        if name not in [phase.name for phase in state.phases]:
            state = attrs.evolve(state, optimizer=Adam(state.model.parameters(), lr=0.1))
        state = fl.fit(fl.pipeline()(regression), state, DATA, epochs=2, phase=name, hooks=hooks)
    return state


def test_a_new_optimizer_in_each_round_is_the_loop_by_hand():
    model = seeded(network)
    for _ in range(2):
        adam = Adam(model.parameters(), lr=0.1)
        for batch in 2 * DATA:
            adam.zero_grad()
            regression(model, batch).backward()
            adam.step()
    state = train_rounds(rounds())
    for ours, theirs in zip(state.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_new_optimizer_in_each_round_is_made_once(tmp_path):
    check_cuts(rounds, train_rounds, tmp_path)


# --- a script that is killed and started again


@pytest.mark.parametrize("updates", [1, 4, 6, 7, 10])
def test_a_stopped_script_is_started_again(updates, tmp_path):
    """It is stopped in either half, resumes its folder, and reaches what a whole one reaches."""

    def start(*more):
        state = fl.resume(tmp_path, pinn())
        return train_pinn(state, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path)), *more))

    class Killed(BaseException):
        pass

    def kill(state):
        if state.step == updates:
            raise Killed
        return state

    with pytest.raises(Killed):
        start(fl.every(steps=1)(kill))
    assert_same(start(), train_pinn(pinn()))
