"""Processes that update by themselves, and average their weights every few updates."""

import itertools

import pytest
import torch
import torch.distributed as dist
from joined import difference, flat, in_double, logged, rank, said, world
from launch import reads, written_by
from process_data import SIZE, loader, samples
from process_problems import adamw, created, entropy, network, sgd
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import clip_grad_norm_

import fnloop as fl
from fnloop._extensions.engines import exchanges

pytestmark = pytest.mark.slow
COUNTS = (2, 3)
EVERY, EPOCHS = 4, 3
clip, two = fl.clip(0.3), fl.accumulate(2)
momentum = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
nesterov = lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)
half = lambda params: torch.optim.SGD(params, lr=0.5)
CASES = {  # middleware, optimizer, the window, outer
    "plain": ((), sgd, 1, None),
    "left out": ((two,), adamw, 2, None),
    "momentum": ((), momentum, 1, None),
    "clip": ((clip,), adamw, 1, None),
    "window, clip": ((two, clip), momentum, 2, None),
    "clip, window": ((clip, two), momentum, 2, None),
    "pieces": ((fl.microbatch(1),), momentum, 1, None),
    "outer": ((), adamw, 1, nesterov),
    "half": ((two,), sgd, 2, half),
}


def step_of(case):
    listed, _, _, outer = CASES[case]
    loss_fn = picky if case == "left out" else entropy
    return fl.pipeline(*listed, fl.local_sgd(EVERY, outer))(loss_fn)


def picky(model, batch):
    """A loss that leaves out most batches in training: in some updates all of a process."""
    return fl.skip("it is picky") if model.training and is_out(batch) else entropy(model, batch)


is_out = lambda batch: int(batch[3][0]) % 5 < 3


def data():
    """Return loaders, of which the last round leaves a process without a batch."""
    return {"train": loader(size=4 - world()), "valid": loader(size=5)}


def updates(n):
    """Return the batches of this process in each update of an epoch."""
    size = 4 - world()
    parts = [samples()[i : i + size] for i in range(0, SIZE, size)]
    assert len(parts) % world()  # uneven
    mine, rounds = parts[rank() :: world()], -(-len(parts) // world())
    return [mine[i : i + n] for i in range(0, rounds, n)]


def means(tensors):
    found = [t.detach().clone() for t in tensors]
    for t in found:
        dist.all_reduce(t)
    return [t / world() for t in found]


def by_hand(case):
    """Return the average at the end of a plain loop, and the mean losses of its epochs."""
    listed, optimizer_of, n, outer_of = CASES[case]
    torch.manual_seed(0)
    model, losses = network(), []
    params = [*model.parameters()]
    shared = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer, outer, step = optimizer_of(params), outer_of and outer_of(shared), 0
    for _ in range(EPOCHS):
        total = torch.zeros(2)
        for window in updates(n):
            window = [batch for batch in window if not (case == "left out" and is_out(batch))]
            items, sums = sum(len(x) for x, *_ in window), [torch.zeros_like(p) for p in params]
            for batch in window:
                optimizer.zero_grad()
                loss = entropy(model, batch)[0]
                loss.backward()
                total += torch.tensor([loss.item(), 1.0]) * len(batch[0])
                if listed[:1] == (clip,):
                    clip_grad_norm_(params, 0.3)
                for added, p in zip(sums, params, strict=True):
                    added += p.grad * len(batch[0]) / items
            for added, p in zip(sums, params, strict=True):
                p.grad = added
            if listed[1:] == (clip,):
                clip_grad_norm_(params, 0.3)
            if window:
                optimizer.step()
            step += 1
            if step % EVERY:
                continue
            for kept, mean in zip(shared, means(params), strict=True):
                kept.grad = kept.detach() - mean
                kept.data.copy_(kept if outer else mean)
            if outer:
                outer.step()
            for p, kept in zip(params, shared, strict=True):
                p.data.copy_(kept)
        ((loss, items),) = means([total])
        losses.append((loss / items).item())
    return flat(means(params)), losses


def read_alone(path, batches, model):
    """Return the model that a checkpoint has, read without fnloop, and its mean loss."""
    model.load_state_dict(load_file(path / "model.safetensors"))
    with torch.no_grad():
        losses = [len(b[0]) * entropy(model.eval(), b)[0].item() for b in batches]
    return model, sum(losses) / SIZE


@in_double
def against_loops(folder):
    found = {}
    for case, (_, optimizer, *_) in CASES.items():
        # Of one tensor in a message, or of all: that must not matter.
        exchanges.PIECE = 10 if case == "momentum" else 1 << 25
        step, state = step_of(case), created(optimizer=optimizer)
        state = fl.fit(step, state, data(), epochs=EPOCHS, hooks=())
        mean, losses = by_hand(case)
        model, loss = read_alone(fl.save(state, folder / case), loader(size=5), network())
        evaluated = fl.evaluate(step, state, loader(size=5))["loss"]
        found[case] = {
            "returned": flat(state.model.parameters()),
            "by hand": mean,
            "saved": flat(model.parameters()),
            "losses": [losses, state.history["train/loss"]],
            "evaluated": [loss, evaluated, state.history["valid/loss"][-1]],
        }
    return found


@pytest.mark.parametrize("n", COUNTS)
def test_it_equals_a_loop_written_by_hand(launched, n):
    """With momentum, clipping, windows, an outer optimizer, and a process without a batch."""
    every = launched(against_loops, n)
    for case, found in itertools.product(CASES, every):
        mine, first = found[case], every[0][case]
        assert difference(mine["by hand"], mine["returned"]) < 1e-12, case
        assert difference(*mine["losses"]) < 1e-12, case
        assert mine["saved"] == mine["returned"] == first["returned"], case
        loss, *evaluated = mine["evaluated"]
        assert evaluated == pytest.approx([loss] * 2, rel=1e-12), case


# --- resumed: bit for bit on as many processes, from the average on others

RESUMED, STOPS = {"window, clip": momentum, "outer": adamw}, (4, 5, 7)  # 4 is an average


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def state_for(case, shift=0.0):
    state = created(optimizer=RESUMED[case], make=normed)
    with torch.no_grad():
        state.model[0].bias.add_(shift)
    return state


def go(case, state, steps=None, hooks=()):
    train = loader(size=2, shuffle=True, drop_last=True)  # BatchNorm takes no batch of one sample
    loaders = {"train": train, "valid": loader(size=5)}
    return fl.fit(step_of(case), state, loaders, epochs=EPOCHS, steps=steps, hooks=hooks)


def come_to(state):
    """Return all that a run has come to; what is this process's own too."""
    held = [v for one in state.optimizer.state.values() for v in one.values()]
    return {
        "average": flat([*state.model.parameters(), *state.model.buffers()]),
        "own": {name: flat([t]) for name, t in (state.slots["local_sgd"].own or {}).items()},
        "optimizer": flat([t for t in held if isinstance(t, torch.Tensor)]),
        "history": [record.metrics for record in state.history if not record.closing],
        "counters": [state.step, state.epoch, state.batch],
    }


def failed(case, at):
    """Return the state that an error has left after an update."""

    def fail(state):
        if state.step == at:
            raise ArithmeticError
        return state

    with pytest.raises(ArithmeticError) as caught:
        go(case, state_for(case), hooks=(fail,))
    return caught.value.state


def interrupted(folder):
    """Train without a stop, and save on the way; and stop in the middle, save, and continue."""
    found = {}
    for case in RESUMED:
        keeping = fl.checkpoint(folder / case, keep=None, background=True)
        saving = fl.when(lambda state: state.step in STOPS)(keeping)
        found[case] = come_to(go(case, state_for(case), hooks=(saving,)))
        for at in STOPS:
            state = go(case, state_for(case), steps=at)
            fl.save(state, folder / f"{case} at {at}")
            found[f"{case} at {at}"] = come_to(go(case, fl.snapshot(state)))
        found[f"{case} failed"] = come_to(go(case, failed(case, 6)))
    return found


@reads(interrupted, COUNTS)
def resumed(folder):
    found = {}
    for n, case in itertools.product(COUNTS, RESUMED):
        where = written_by(interrupted, n, folder)
        for at in STOPS:
            with logged() as found[f"said of {n}"]:
                state = fl.restore(where / f"{case} at {at}", state_for(case, 1.0))
            evaluated = fl.evaluate(step_of(case), state, loader(size=5))["loss"]
            path = fl.save(state, folder / f"{case} at {at} of {n}")  # a resume of a resume
            _, loss = read_alone(path, loader(size=5), normed())
            assert evaluated == pytest.approx(loss, rel=1e-5)
            state = fl.restore(path, state_for(case, 2.0))
            found[f"{case} at {at} of {n}"] = come_to(go(case, state))
            state = fl.restore(where / case / f"step-{at:08d}", state_for(case, 3.0))
            found[f"{case} in {at} of {n}"] = come_to(go(case, state))
    return found


@pytest.mark.long
@pytest.mark.parametrize("n", COUNTS)
def test_a_resumed_run_continues_from_the_weights_of_each_process(launched, n):
    for whole, again in zip(launched(interrupted, n), launched(resumed, n), strict=True):
        for case, at in itertools.product(RESUMED, STOPS):
            assert whole[f"{case} at {at}"] == whole[case], (case, at)
            assert again[f"{case} at {at} of {n}"] == whole[case], (case, at)
            assert again[f"{case} in {at} of {n}"] == whole[case], (case, at)
            assert whole[f"{case} failed"] == whole[case]
    first, second, *_ = (found["outer"] for found in launched(interrupted, n))
    assert first["average"] == second["average"]
    assert first["own"] != second["own"] and first["optimizer"] != second["optimizer"]


@pytest.mark.long
@pytest.mark.parametrize("n", COUNTS)
def test_on_another_number_of_processes_all_continue_from_the_average(launched, n):
    other = 5 - n
    for process, found in enumerate(launched(resumed, n)):
        said_of = [f"local_sgd trained on {other} processes, and this run has {n}"] * (not process)
        assert [line[9:].partition(":")[0] for line in found[f"said of {other}"]] == said_of
        for case in RESUMED:
            a, b = (found[f"{case} {how} 7 of {other}"] for how in ("at", "in"))
            assert a == b and a["counters"][1] == EPOCHS


# --- what it sends


def messages(step):
    """Return what 16 updates exchange: backward's collectives, and the names of all others."""
    names, begin = [], exchanges.begin_exchange
    train, state = loader(size=2, drop_last=True), created(optimizer=adamw, make=normed)
    before = exchanges.counted_collectives()
    exchanges.begin_exchange = lambda what: names.append(what) or begin(what)
    try:
        fl.fit(step, state, train, steps=16, epochs=9, hooks=())
    finally:
        exchanges.begin_exchange = begin
    return exchanges.counted_collectives() - before, names


def sent(folder):
    found = {}
    for every in (0, 4, 8, 16):
        listed = [fl.local_sgd(every)] if every else []
        backward, names = messages(fl.pipeline(two, clip, *listed)(entropy))
        found[every] = {"backward": backward, **{name: names.count(name) for name in names}}
    return found


WEIGHTS, BUFFERS = "an average of the weights", "an exchange of the model's buffers"


def test_updates_send_nothing_but_the_average(launched):
    """Of 16 updates every 4th sends the weights in one message, and the buffers in another."""
    for found in launched(sent, 2):
        assert found["0"]["backward"] >= 16 and found["0"][BUFFERS] >= 16
        for every in (4, 8, 16):
            own = found[str(every)]
            assert own.pop("backward") == 0
            assert own.pop(WEIGHTS) == own.pop(BUFFERS) == 16 // every
            assert not own.keys() - found["0"].keys()


# --- hooks, and what is refused

step = fl.pipeline(fl.local_sgd(4))(entropy)


class Exchanging(torch.optim.SGD):
    def step(self, closure=None):
        dist.all_reduce(torch.ones(1))
        return super().step()


def exchanging(model, batch):
    dist.all_reduce(torch.ones(1))
    return entropy(model, batch)


def trained(state, hooks=(), step=step, **settings):
    loaders = {"train": loader(size=2, drop_last=True), "valid": loader(size=5)}
    return fl.fit(step, state, loaders, **{"epochs": 2, "hooks": hooks, **settings})


def as_they_are(state):
    """Return the weights of every process."""
    return exchanges.gather_objects(flat(state.model.parameters()))


def look(state, path):
    """Return what reads the weights in the middle of a run, and what it should have read."""
    valid = loader(size=5)
    evaluated = fl.evaluate(step, state, valid)["loss"]
    predicted = [*fl.predict(lambda model, batch: model(batch[0]).sum().item(), state, valid)]
    before = as_they_are(state)
    alone, loss = read_alone(fl.save(state, path, only=("model",)), valid, network())
    with torch.no_grad():
        expected = [alone(b[0]).sum().item() for b in valid]
    return {
        "apart": before[0] != before[1],
        "unchanged": before == as_they_are(state),
        "saved": [flat(alone.parameters()), torch.tensor(before).mean(0).tolist()],
        "evaluated": [evaluated, loss],
        "predicted": [predicted, expected],
    }


def at_work(folder):
    found = {}

    @fl.when(lambda state: state.step in (3, 4, 6))
    def looking(state):
        found[f"look {state.step}"] = look(state, folder / f"{state.step}")
        return state

    bias = lambda state: {"bias": state.model[2].bias.sum().item()}
    measured = fl.measure(bias, name="own", every=fl.every(epochs=1))
    state = trained(created(optimizer=adamw), (looking, measured))
    found["measured"] = [state.history["own/bias"][-1], state.model[2].bias.sum().item()]
    keeping = fl.restore_best("valid/loss", mode="max")
    best = trained(created(optimizer=adamw), (keeping,))
    loss = fl.evaluate(step, best, loader(size=5))["loss"]
    found["best"] = [loss, max(best.history["valid/loss"])]

    freezing = fl.when(lambda state: state.step == 6)(lambda state: fl.freeze(state, "0"))
    frozen = trained(created(optimizer=adamw), (freezing,), steps=8)
    found["frozen"] = as_they_are(frozen), frozen.slots["local_sgd"].moved
    yielded = fl.run(step, created(), loader(size=2), epochs=2, hooks=())
    found["yielded"] = [as_they_are(one) for one in yielded]

    found["without"] = said(lambda: trained(state, step=fl.pipeline()(entropy), epochs=3))
    other = trained(created(optimizer=adamw), steps=6)
    with torch.no_grad():
        for p in other.model.parameters():
            p.fill_(0.25)
    with logged() as found["other weights"]:
        other = trained(other, steps=7)
    found["moved"] = (other.model[2].bias - 0.25).abs().max().item()
    for name, tried, given in (
        ("sharded", step, created(True)),
        ("loss", fl.pipeline(fl.local_sgd())(exchanging), created()),
        ("optimizer", step, created(optimizer=lambda params: Exchanging(params, lr=0.1))),
    ):
        found[name] = said(lambda tried=tried, given=given: trained(given, step=tried))
    return found


def test_hooks_read_the_average_and_training_does_not_notice(launched):
    for found in launched(at_work, 2):
        for at in (3, 4, 6):
            seen = found[f"look {at}"]
            assert seen["apart"] == (at != 4) and seen["unchanged"]
            for name in ("saved", "evaluated", "predicted"):
                assert seen[name][0] == pytest.approx(seen[name][1], rel=1e-5, abs=1e-5), name
        for name in ("measured", "best"):
            assert found[name][0] == found[name][1]
        (one, two), moved = found["frozen"]
        assert one == two and not moved  # what was frozen meanwhile is in the next average
        assert [one == two for one, two in found["yielded"]] == [True, True]


def test_what_several_processes_are_refused_with(launched):
    for process, found in enumerate(launched(at_work, 2)):
        lines = ["was given other weights" in line for line in found["other weights"]]
        assert lines == [True] * (not process)
        assert 0 < found["moved"] < 0.2  # by one update, from where the caller has put it
        without = "ValueError: this state was trained with local_sgd, so each process has its own"
        assert without in found["without"]
        assert "leave fully_shard or the mesh out" in found["sharded"]
        assert "exchanging exchanges something with the other processes" in found["loss"]
        assert "local_sgd: Exchanging exchanges something" in found["optimizer"]
