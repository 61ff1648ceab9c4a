"""A model takes the shapes of a checkpoint: ``shapes="file"``."""

import copy

import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import assert_same

ONES = [torch.ones(1)] * 6


class Row(nn.Module):
    """A parameter of n numbers, and a buffer of as many."""

    def __init__(self, n=1):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))
        self.register_buffer("seen", torch.zeros(n))


def loss_fn(model, x):
    return ((model.w - torch.arange(len(model.w))) ** 2 * x).mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.5)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=0.5)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2)


def of_several(model):
    return {"w": torch.optim.Adam([model.w], lr=0.5)}


MEMBERS = {lbfgs: (fl.closure(),)}


def row(n, make=sgd):
    model = Row(n)
    return fl.TrainState.create(model, make(model), seed=0)


def trained(state, updates=3, make=sgd, hooks=()):
    return fl.fit(
        fl.pipeline(*MEMBERS.get(make, ()))(loss_fn), state, ONES, steps=updates, hooks=hooks
    )


def saved(folder, n=2, make=sgd):
    return fl.save(trained(row(n, make), make=make), folder / "a")


# --- what is taken from the file


@pytest.mark.parametrize("make", [sgd, adam, adafactor, lbfgs, of_several])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_run_continues_from_another_shape_bit_for_bit(tmp_path, make, n):
    path, whole = saved(tmp_path, make=make), trained(row(2, make), 6, make)
    state = row(n, make)
    w, seen = state.model.w, state.model.seen
    state = fl.restore(path, state, shapes="file")
    assert state.model.w is w and state.model.seen is seen  # so the groups hold what is trained
    assert_same(trained(state, 6, make), whole)


@pytest.mark.parametrize("make", [sgd, adam, lbfgs])
def test_a_state_that_was_trained_takes_the_shapes_too(tmp_path, make):
    path, whole = saved(tmp_path, make=make), trained(row(2, make), 6, make)
    used = trained(row(3, make), 2, make)
    held = (used.model.w * 1).sum()  # a graph that holds the node which adds up gradients
    assert_same(trained(fl.restore(path, used, shapes="file"), 6, make), whole)
    del held


def test_the_numbers_are_those_of_the_file(tmp_path):
    """One update of rate 1/2: w is 0 and 1/2 of the mean's gradient 0 and -1."""
    path = fl.save(trained(row(2), 1), tmp_path / "a")
    state = fl.restore(path, row(4), shapes="file")
    assert state.model.w.tolist() == [0.0, 0.5]
    (held,) = state.optimizer.state.values()
    assert held["momentum_buffer"].tolist() == [0.0, -1.0]
    assert state.model.seen.shape == (2,)


def test_resume_and_follow_take_the_shapes(tmp_path):
    trained(row(2), hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path)),))
    assert fl.resume(tmp_path, row(1), shapes="file").step == 3
    assert fl.resume(tmp_path / "none", row(1), shapes="file").model.w.shape == (1,)
    (state,) = fl.follow(tmp_path, row(1), timeout=0, shapes="file")
    assert state.model.w.shape == (2,)
    with pytest.raises(fl.CheckpointError, match='with shapes="file"'):
        next(fl.follow(tmp_path, row(1), timeout=0))


def test_weights_alone_take_the_shapes_where_the_optimizer_is_new(tmp_path):
    path = saved(tmp_path)
    state = fl.restore(path, row(1), only=("model",), shapes="file")
    assert trained(state, 1).model.w.shape == (2,)
    assert fl.restore(path, row(1), only=("trained",), shapes="file").model.w.shape == (2,)


def test_what_modules_of_torch_note_of_their_sizes_is_right(tmp_path):
    def made(words):
        model = nn.Sequential(nn.Embedding(words, 2, padding_idx=-1), nn.Linear(2, words))
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    path = fl.save(made(5), tmp_path / "a")
    model = fl.restore(path, made(3), shapes="file").model
    assert (model[0].num_embeddings, model[1].out_features, model[1].in_features) == (5, 5, 2)
    assert model(torch.tensor([4])).shape == (1, 5)


def test_tied_weights_stay_tied(tmp_path):
    def made(words):
        model = nn.Sequential(nn.Embedding(words, 2), nn.Linear(2, words, bias=False))
        model[1].weight = model[0].weight
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    path = fl.save(made(5), tmp_path / "a")
    model = fl.restore(path, made(3), shapes="file").model
    assert model[1].weight is model[0].weight and model[0].weight.shape == (5, 2)


def test_dimensions_keep_their_order_in_memory(tmp_path):
    def made(n):
        model = nn.Conv2d(2, n, 3).to(memory_format=torch.channels_last)
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    model = fl.restore(fl.save(made(5), tmp_path / "a"), made(3), shapes="file").model
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.weight.shape == (5, 2, 3, 3)


def test_parameters_beside_the_model_take_the_shapes(tmp_path):
    def made(n):
        model, beside = Row(1), nn.Parameter(torch.full((n,), float(n)))
        return fl.TrainState.create(model, torch.optim.SGD([model.w, beside], lr=1.0))

    path = fl.save(made(2), tmp_path / "a")
    message = r'param_groups.0.1: \(2,\) saved, \(3,\) here.* with shapes="file"'
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, made(3))
    state = fl.restore(path, made(3), shapes="file")
    assert state.optimizer.param_groups[0]["params"][1].tolist() == [2.0, 2.0]


def test_the_average_has_the_shapes_too(tmp_path):
    step = fl.pipeline(fl.ema(0.5))(loss_fn)
    fl.fit(step, row(2), ONES, steps=3, hooks=(fl.checkpoint(tmp_path),))
    found = fl.fit(step, fl.resume(tmp_path, row(1), shapes="file"), ONES, steps=6, hooks=())
    whole = fl.fit(step, row(2), ONES, steps=6, hooks=())
    assert_same(fl.averaged(found), fl.averaged(whole))


def test_names_that_do_not_match_are_left_as_they_are(tmp_path):
    path, state = saved(tmp_path), row(1)
    state.model.more = nn.Parameter(torch.ones(3))
    state = fl.restore(path, state, only=("model",), strict=False, shapes="file")
    assert state.model.w.shape == (2,) and state.model.more.tolist() == [1.0, 1.0, 1.0]


# --- what is refused, and leaves everything as it was


def test_by_default_other_shapes_are_refused_and_the_message_names_the_way_out(tmp_path):
    path = saved(tmp_path)
    message = r'w: \(2,\) saved, \(1,\) here, .* take the shapes of the file, with shapes="file"'
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, row(1))
    with pytest.raises(fl.CheckpointError, match=message):
        fl.resume(tmp_path, row(1))
    model = nn.Linear(1, 1)
    other = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(fl.CheckpointError, match="of another model") as caught:
        fl.restore(path, other, shapes="file")  # other names: no shape would help
    assert "shapes=" not in str(caught.value)


def test_a_failure_puts_the_shapes_back(tmp_path):
    path, used = saved(tmp_path, make=adam), trained(row(1))  # another optimizer
    w, before = used.model.w, copy.deepcopy(used.model.state_dict())
    momentum = used.optimizer.state[w]["momentum_buffer"].clone()
    with pytest.raises(fl.CheckpointError, match="the state of Adam, and the optimizer is SGD"):
        fl.restore(path, used, shapes="file")
    assert used.model.w is w and used.model.state_dict() == before
    assert torch.equal(used.optimizer.state[w]["momentum_buffer"], momentum)
    assert_same(trained(used, 6), trained(row(1), 6))


def test_an_optimizer_that_would_keep_a_state_of_the_old_shape_is_refused(tmp_path):
    path, used = saved(tmp_path), trained(row(1))
    message = r"w: \(2,\) saved, \(1,\) here.*SGD has a state .* Restore the optimizer too"
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, used, only=("model",), shapes="file")
    assert used.model.w.shape == (1,)


def test_what_shares_memory_with_another_tensor_is_refused(tmp_path):
    path, state = saved(tmp_path), row(1)
    state.model.seen = state.model.w.data
    with pytest.raises(fl.CheckpointError, match="seen and w share memory in this Row"):
        fl.restore(path, state, shapes="file", only=("model",), strict=False)


def test_wrong_values_are_refused():
    for call in (fl.restore, fl.resume, fl.follow):
        with pytest.raises(ValueError, match='expects shapes as one of "same", "file"; got True'):
            call("x", row(1), shapes=True)
    with pytest.raises(ValueError, match="leaves the model out: add it"):
        fl.restore("x", row(1), only=("optimizer",), shapes="file")
