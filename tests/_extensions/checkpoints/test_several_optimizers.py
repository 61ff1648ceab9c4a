"""Several optimizers in a checkpoint: kept by name, and loaded all together or not at all."""

import copy
import json

import attrs
import pytest
import sample_optimizers as sample
import torch
from safetensors.torch import load_file
from sample_optimizers import SGD, Adam, CountingSaved, check_resumes, toy_state, toy_step
from saved import ONE, check_refused, sgd
from several import problem
from torch import nn

import fnloop as fl
from fnloop._extensions.checkpoints.compare import find_difference
from fnloop._extensions.checkpoints.optimizer import _merge, _Offer, _own_facts
from fnloop._extensions.checkpoints.save import check_resumable
from fnloop.extend import Ownership
from fnloop.testing import Toy, toy, toy_loss


class Pair(nn.Module):
    def __init__(self, w=0.0):
        super().__init__()
        self.first, self.second = Toy(w), Toy(w)

    def forward(self, x):
        return self.first(x) + self.second(x)


def pair(first, second, w=0.0, names=("first", "second")):
    model = Pair(w)
    made = first(model.first.parameters()), second(model.second.parameters())
    return fl.TrainState.create(model, dict(zip(names, made, strict=True)), seed=0)


pair_and_adam = lambda names=("first", "second"): pair(plain, Adam, names=names)
plain = lambda parameters: SGD(parameters, lr=1.0, momentum=0.5)
state_file = lambda path: json.loads((path / "state.json").read_text())


def contents(state):
    optimizers = {name: o.state_dict() for name, o in state.optimizer.items()}
    return copy.deepcopy((state.model.state_dict(), optimizers))


# --- the format


def test_optimizers_are_kept_by_name(tmp_path):
    one = problem()
    state = fl.fit(fl.pipeline()(one.loss_fn), one.state(), one.batches, hooks=())
    path = fl.save(state, tmp_path / "a")
    facts = state_file(path)
    assert facts["format_version"] == 2 and list(facts["optimizer"]) == ["several"]
    classes = {k: v["class"] for k, v in facts["optimizer"]["several"].items()}
    assert classes == {"matrices": "Muon", "rest": "AdamW"}
    assert facts["updates"] == {"matrices": 7, "rest": 7}
    names = load_file(path / "optimizer.safetensors").keys()
    assert "matrices/0.weight.momentum_buffer" in names and "rest/2.bias.exp_avg_sq" in names
    assert len(names) == 2 + 2 * 3


def test_the_order_of_the_names_does_not_matter(tmp_path):
    state = fl.fit(toy_step, pair(plain, Adam), [ONE] * 2, hooks=())
    path, model = fl.save(state, tmp_path / "a"), Pair()
    named = {"second": Adam(model.second.parameters()), "first": plain(model.first.parameters())}
    restored = fl.restore(path, fl.TrainState.create(model, named))
    assert restored.updates == {"second": 2, "first": 2}
    (held,) = restored.optimizer["first"].state.values()
    assert held["momentum_buffer"].item() == 1.5


# --- resumed runs


@pytest.mark.parametrize(
    "first", [CountingSaved, sample.BothSaved, sample.Averaging, sample.Slow, plain]
)
@pytest.mark.parametrize("second", [CountingSaved, plain])
def test_optimizers_of_all_kinds_resume_together(first, second, tmp_path):
    new = lambda seed=0: pair(first, second, float(seed))
    check_resumes(tmp_path, new, toy_step, [ONE] * 4, splits=[3])


# --- what does not fit


ONE_ADAM = r"one optimizer without a name \(Adam\)"
TWO = r"the optimizers first \(SGD\), second \(Adam\)"


@pytest.mark.parametrize(("saved", "new", "said"), [
    (lambda: toy_state(Adam), pair_and_adam, f"has {ONE_ADAM}, and this state has {TWO}"),
    (pair_and_adam, lambda: toy_state(Adam), f"has {TWO}, and this state has {ONE_ADAM}"),
    (pair_and_adam, lambda: pair_and_adam(("first", "rest")),
     rf"{TWO}, .* has the optimizers first \(SGD\), rest \(Adam\)"),
    (pair_and_adam, lambda: pair(Adam, plain), "the state of SGD, and the optimizer is Adam"),
])  # fmt: skip
def test_other_optimizers_are_refused(saved, new, said, tmp_path):
    path, state = fl.save(saved(), tmp_path / "a"), new()
    check_refused(path, state, said, only=("optimizer",))
    assert fl.fit(toy_step, state, [ONE], hooks=()).step == 1


def test_of_other_names_the_updates_are_counted_and_the_weights_restored(tmp_path):
    state = fl.fit(toy_step, pair_and_adam(), [ONE] * 3, hooks=())
    path, other = fl.save(state, tmp_path / "a"), pair_and_adam(("first", "rest"))
    assert fl.restore(path, other, only=("counters",)).updates == {"first": 3, "rest": 3}
    assert fl.restore(path, toy_state(Adam), only=("counters",)).updates == {}
    path = fl.save(state, tmp_path / "b", only=("model", "optimizer"))
    restored = fl.restore(path, pair_and_adam(), only=("model", "optimizer"))
    assert find_difference(contents(state), contents(restored), "") is None
    assert restored.updates == {"first": 0, "second": 0}
    weights = fl.save(state, tmp_path / "c", only=("model",))
    assert fl.restore(weights, sgd(Pair()), only=("model",)).updates == {}


@pytest.mark.parametrize("second", [plain, CountingSaved])
@pytest.mark.parametrize("first", [plain, CountingSaved, sample.Averaging])
@pytest.mark.parametrize("order", [1, -1])
def test_if_one_fails_to_load_none_is_loaded(first, second, order, tmp_path):
    class Breaks(CountingSaved):
        def load_state_dict(self, saved):
            super().load_state_dict(saved)
            if saved["updates"] == 4:
                raise ZeroDivisionError

    def new(w=0.0):
        model = nn.ModuleList([Toy(w), Toy(w), Toy(w)])
        made = zip((first, second, Breaks)[::order], model, strict=True)
        named = {f"n{i}": make(part.parameters()) for i, (make, part) in enumerate(made)}
        for optimizer in named.values():
            optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        return fl.TrainState.create(model, named)

    step = fl.pipeline()(lambda model, x: sum(part(x).mean() for part in model))
    path = fl.save(fl.fit(step, new(), [ONE] * 4, hooks=()), tmp_path / "a")
    state = fl.fit(step, new(7.0), [ONE] * 2, hooks=())
    for optimizer in state.optimizer.values():
        optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    before = contents(state)
    with pytest.raises(fl.CheckpointError, match=r"Breaks.load_state_dict does not accept"):
        fl.restore(path, state)
    assert find_difference(before, contents(state), "") is None


def test_an_optimizer_that_cannot_be_resumed_is_named(tmp_path, caplog):
    state = pair(plain, sample.Counting)
    said = r"a run with Counting \('second'\) cannot be resumed bit for bit: its attribute updates"
    with pytest.raises(fl.CheckpointError, match=said):
        fl.fit(toy_step, state, [ONE], hooks=(fl.checkpoint(tmp_path / "runs"),))
    check_resumable(pair(plain, CountingSaved))
    fl.save(state, tmp_path / "a")
    fl.save(state, tmp_path / "a")
    assert caplog.text.count("save: a run with Counting ('second')") == 1


def test_parameters_beside_the_model_are_kept_by_the_name_of_their_optimizer(tmp_path):
    def new(value):
        model, beside = Toy(), [nn.Parameter(torch.full((2,), value)) for _ in range(2)]
        named = {"model": plain([*model.parameters(), beside[0]]), "beside": plain([beside[1]])}
        return fl.TrainState.create(model, named, seed=0), beside

    (state, beside), (other, others) = new(3.0), new(5.0)

    def loss(model, batch):
        return toy_loss(model, batch)[0] + beside[0].sum() + 2 * beside[1].sum()

    state = fl.fit(fl.pipeline()(loss), state, [ONE], hooks=())
    fl.restore(fl.save(state, tmp_path / "a"), other)
    assert [p.tolist() for p in others] == [[2.0, 2.0], [1.0, 1.0]]


def test_a_damaged_count_of_updates_is_found(tmp_path):
    state = attrs.evolve(pair(plain, plain), updates={"first": 0, "second": -1})
    path = fl.save(state, tmp_path / "a")
    with pytest.raises(fl.CheckpointError, match=r"updates\.second is -1"):
        fl.restore(path, pair(plain, plain))


# --- what several processes keep


offer = lambda value, checksum, restored=None: _Offer(value, checksum, restored)
ENTRY = ("", "state", "w", "momentum")


@pytest.mark.parametrize(("offers", "value", "ranks"), [
    ([{}, {ENTRY: offer(5, None)}], 5, [1]),  # one process keeps it
    ([{ENTRY: offer(3, "a", "a")}, {ENTRY: offer(5, "b", "a")}], 5, [1]),  # a stale copy
    ([{ENTRY: offer(3, "a", "a")}, {ENTRY: offer(3, "a", "a")}], 3, [0, 1]),  # two copies
    ([{ENTRY: offer(5, "b")}, {ENTRY: offer(5, "b")}, {}], 5, [0, 1]),  # two of three keep it
    ([{ENTRY: offer(5, "b", "a")}, {ENTRY: offer(5, "b", "a")}], 3, None),  # all update it
])  # fmt: skip
def test_of_the_state_in_several_processes_that_which_was_updated_counts(offers, value, ranks):
    facts = {"class": "Mine", "param_groups": [], "state": {"w": {"momentum": 3}}}
    merged, local = _merge(facts, [ENTRY], offers, toy())
    assert merged["state"]["w"]["momentum"] == value
    assert merged.get("local") == (ranks and [[["state", "w", "momentum"], ranks]])
    assert local == {} and facts["state"]["w"]["momentum"] == 3


@pytest.mark.parametrize(("first", "second", "message"), [
    (offer(4, "c", "a"), offer(5, "b", "a"), "is not the same in process 0 and in process 1"),
    (offer(3, "a", "a"), offer(5, "b", ""), "began from nothing in process 1"),
])  # fmt: skip
def test_state_that_cannot_be_merged_is_named(first, second, message):
    facts = {"class": "Mine", "param_groups": [], "state": {}}
    with pytest.raises(fl.CheckpointError, match=f"w.momentum in the optimizer's state {message}"):
        _merge(facts, [ENTRY], [{ENTRY: first}, {ENTRY: second}], toy())


def test_each_process_gets_what_it_kept_and_another_number_gets_all():
    facts = {"state": {"w": {"momentum": 3, "count": 1}, "v": {"momentum": 2}, "u": {}}}
    facts["local"] = [[["state", "w", "momentum"], [0]], [["state", "v", "momentum"], [1]]]
    assert _own_facts(facts, 0, True)["state"] == {"w": {"momentum": 3, "count": 1}, "u": {}}
    own = {"w": {"count": 1}, "v": {"momentum": 2}, "u": {}}
    assert _own_facts(facts, 1, True)["state"] == own
    assert _own_facts(facts, 1, False) == facts


def test_a_snapshot_knows_what_of_the_optimizer_is_a_copy():
    state = toy()
    Ownership.of(state).notes["copies"] = {ENTRY: "a"}
    assert Ownership.of(fl.snapshot(state)).notes["copies"] == {ENTRY: "a"}
