"""Activations, gradients and updates by module: the numbers, and what they show."""

import pytest
import torch
from torch import nn
from toy_runs import of

import fnloop as fl
from fnloop.debug import watch
from fnloop.testing import small, toy, toy_loss

TWO = [torch.tensor([2.0, 2.0])]


def mean_loss(model, batch):
    return model(batch).mean()


def chain(*modules, weights=(2.0, 3.0)):
    """Linear maps of one number, without bias, with other modules between them."""
    first, last = (nn.Linear(1, 1, bias=False) for _ in range(2))
    for layer, weight in zip((first, last), weights, strict=True):
        nn.init.constant_(layer.weight, weight)
    return nn.Sequential(first, *modules, last)


def watched(model, *inputs, **settings):
    _, out = fl.pipeline(watch(**settings))(mean_loss)(
        of(model, lr=0.5), torch.tensor(inputs)[:, None]
    )
    return {name.removeprefix("watch/"): m.compute() for name, m in out.metrics.items()}


def test_the_numbers_of_two_layers_are_those_by_hand():
    found = watched(chain(nn.ReLU()), 3.0, 4.0)
    # x = 3, 4; h = 2x = 6, 8; y = 3h. dy/dv = mean h = 7; dy/dw = 3 mean x = 10.5.
    assert found == {
        "0/activation": pytest.approx(50**0.5),  # of 36 and 64 the mean is 50
        "1/activation": pytest.approx(50**0.5),
        "2/activation": pytest.approx(450**0.5),
        "0/gradient": 10.5,
        "2/gradient": 7.0,
        "0/update": pytest.approx(5.25 / 3.25),  # 2 - 0.5 * 10.5 = -3.25
        "2/update": 7.0,  # 3 - 0.5 * 7 = -0.5, changed by 3.5
    }


def test_a_dead_relu_shows_zeros_and_what_explodes_grows_with_depth():
    found = watched(chain(nn.ReLU(), weights=(-2.0, 3.0)), 3.0)
    assert found.pop("0/activation") == 6.0
    assert set(found.values()) == {0.0}
    found = watched(chain(nn.Identity(), weights=(10.0, 10.0)), 1.0, only="*")
    assert [found[f"{i}/activation"] for i in (0, 2)] == [10.0, 100.0]


def test_only_each_n_th_update_is_watched_and_others_have_no_hooks():
    hooked = []

    def loss_fn(model, batch):
        hooked.append(len(model._forward_hooks))
        return toy_loss(model, batch)

    step = fl.pipeline(watch(every=3))(loss_fn)
    state = fl.fit(step, toy(), ([torch.ones(1)] * 7, TWO), hooks=())
    assert hooked == [1, 0, 0, 1, 0, 0, 1, 0]  # the last one is an evaluation
    # w is 0, -3 and -6 where it is watched.
    assert state.history["train/watch/Toy/activation"] == (3.0,)
    assert not state.model._forward_hooks


def test_activations_are_weighted_and_gradients_are_those_of_the_window():
    step = fl.pipeline(fl.accumulate(2), watch(), fl.clip(1.0))(toy_loss)
    _, out = step(toy(w=1.0), [torch.tensor([4.0, 4.0, 4.0]), torch.tensor([8.0])])
    # Three items with 4 and one with 8; the gradient is their mean, and is clipped to 1.
    for name in ("watch/Toy/activation", "watch/Toy/gradient", "grad_norm"):
        assert out.metrics[name].compute() == 5.0


def test_an_exception_leaves_no_hooks_and_a_skipped_update_reports_nothing():
    state = toy()
    with pytest.raises(ZeroDivisionError):
        fl.pipeline(watch())(lambda model, batch: 1 / 0)(state, torch.ones(1))
    assert not state.model._forward_hooks
    _, out = fl.pipeline(watch())(lambda model, batch: fl.skip("no"))(toy(), TWO[0])
    assert out.metrics == {}


@pytest.mark.parametrize(("only", "names"), [
    ("2", ["2"]), ("*.bias", ["0", "2"]), ([lambda n, p: n == "0.bias"], ["0"]), ("9", None),
])  # fmt: skip
def test_modules_can_be_chosen(only, names):
    problem, step = small(), fl.pipeline(watch(only=only))(small().loss_fn)
    if names is None:
        message = 'watch: nothing in the Sequential has a name like "9"'
        with pytest.raises(ValueError, match=message):
            fl.fit(step, problem.state(), problem.batches)
        return
    _, out = step(problem.state(), problem.batches[0])
    assert sorted({name.split("/")[1] for name in out.metrics}) == names


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: watch(only=()), TypeError, "watch expects only as at least one selector"),
    (lambda: fl.pipeline(watch(), watch(3)), ValueError, "have one name, 'watch'"),
    (lambda: fl.pipeline(watch(), fl.cuda_graph()), ValueError, "leave one out"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_hundred_metrics_of_modules_leave_tables_lines_and_figures_readable(capsys):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(35)))
    step = fl.pipeline(watch(every=1), fl.clip(1.0))(mean_loss)
    loaders = [torch.ones(1, 2)] * 3, [torch.ones(1, 2)]
    state = fl.fit(step, of(model, lr=0.5), loaders, epochs=2, hooks=(fl.progress(),))
    assert "watch" not in capsys.readouterr().err
    table, _, note = repr(state.history).partition("left out")
    assert table.count("watch") <= 1  # the one for which there is room
    assert max(map(len, table.splitlines())) <= 80
    assert "grad_norm" in table
    assert "watch" in note
    assert len(state.history["train/watch/34/update"]) == 2
    # The loss, activations, gradients, updates, the norm of all gradients, and the learning rate.
    assert sum(axis.get_visible() for axis in state.history.plot().axes) == 6


@pytest.mark.slow
def test_compiled_code_has_no_activations_and_is_compiled_once_more_at_most():
    made = []

    def backend(graph, inputs):
        made.append(1)
        return graph.forward

    problem = small()
    step = fl.pipeline(fl.compiled(backend=backend), watch(2))(problem.loss_fn)
    state = fl.fit(step, problem.state(), [problem.batches[0]] * 9, hooks=())
    assert len(made) <= 2
    names = sorted(state.history.keys())
    assert [name for name in names if "watch" in name] == [
        f"train/watch/{module}/{what}" for module in (0, 2) for what in ("gradient", "update")
    ]
