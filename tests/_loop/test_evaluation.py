"""Records, ``evaluate`` and ``predict``."""

import pytest
import torch
from loop_cases import ONE, fit, generators, step

import fnloop as fl
from fnloop.testing import assert_same, stochastic, toy, toy_loss


def test_epoch_means_are_exact_over_uneven_batches():
    data = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])]
    state = fit(toy(w=1.0, lr=0.0), loaders=(data, data))
    assert state.history["train/loss"] == state.history["valid/loss"] == (4.0,)


def test_a_record_has_its_epoch_and_step():
    state = fit(epochs=2)
    assert [(r.epoch, r.step) for r in state.history] == [(1, 3), (2, 6)]
    assert 0 < state.history[0].seconds < state.history[1].seconds


@pytest.mark.parametrize(
    ("when_to", "evaluated", "records"),
    [
        (fl.every(epochs=1), [3, 6, 9, 12], [3, 6, 9, 12]),
        (fl.every(epochs=2), [6, 12], [3, 6, 9, 12]),
        (fl.every(epochs=0.5), [2, 3, 5, 6, 8, 9, 11, 12], [2, 3, 5, 6, 8, 9, 11, 12]),
        (fl.every(steps=5), [5, 10], [3, 5, 6, 9, 10, 12]),
        (fl.when(lambda state: state.step in (4, 12)), [4, 12], [3, 4, 6, 9, 12]),
        (None, [], [3, 6, 9, 12]),
    ],
    ids=repr,
)
def test_evaluation_happens_when_it_is_due_and_each_epoch_has_a_record(when_to, evaluated, records):
    state = fit(loaders=([ONE] * 3, [ONE]), epochs=4, evaluate_every=when_to)
    assert [r.step for r in state.history] == records
    assert [r.step for r in state.history if "valid/loss" in r.metrics] == evaluated


def test_a_mid_epoch_record_has_the_running_mean():
    """w is 0, -1, -2: the losses are 0, -1, -2, and their running means 0, -0.5, -1."""
    state = fit(evaluate_every=fl.every(steps=1))
    assert state.history["train/loss"] == (0.0, -0.5, -1.0)


def test_an_interrupted_epoch_has_the_mean_of_the_whole_epoch():
    state = fit(fit(steps=2))
    assert [(r.step, r.metrics["train/loss"], r.closing) for r in state.history] == [
        (2, -0.5, True),
        (3, -1.0, False),
    ]


@pytest.mark.parametrize("wrong", [2, "epoch", lambda state: True])
def test_evaluate_every_must_be_a_trigger(wrong):
    with pytest.raises(
        TypeError, match=r"every\(epochs=1\), every\(steps=100\), when\(predicate\) or None"
    ):
        fit(evaluate_every=wrong)


def test_evaluate_leaves_the_state_unchanged():
    problem = stochastic()
    make = fl.pipeline()(problem.loss_fn)
    state = fl.fit(make, problem.state(), problem.batches, hooks=())
    state.model[1].eval()
    before, drawn = fl.snapshot(state), generators()
    first = fl.evaluate(make, state, problem.batches)
    assert first == fl.evaluate(make, state, problem.batches)
    assert generators() == drawn
    assert [m.training for m in state.model] == [True, False, True, True, True]
    assert_same(state, before)


def test_evaluation_does_not_change_training():
    problem = stochastic()
    make = fl.pipeline()(problem.loss_fn)
    shuffled = torch.utils.data.DataLoader(problem.batches, batch_size=None, shuffle=True)
    plain = fl.fit(make, problem.state(), shuffled, epochs=2, hooks=())
    watched = fl.fit(
        make,
        problem.state(),
        {"train": shuffled, "valid": shuffled},
        epochs=2,
        hooks=(lambda state: (torch.rand(3), state)[1],),
        evaluate_every=fl.every(steps=2),
    )
    for mine, theirs in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_empty_evaluation_is_an_error():
    with pytest.raises(ValueError, match="gave no batch"):
        fl.evaluate(step, toy(), [])


def test_evaluating_a_new_state_does_not_create_a_scheduler():
    warm = fl.torch_scheduler(lambda opt, run: torch.optim.lr_scheduler.ConstantLR(opt, 0.1))
    state = toy(lr=1.0)
    fl.evaluate(fl.pipeline(warm)(toy_loss), state, [ONE])
    assert (state.optimizer.param_groups[0]["lr"], dict(state.slots)) == (1.0, {})


def test_an_evaluation_does_not_call_set_epoch():
    class Told(torch.utils.data.TensorDataset):
        def set_epoch(self, epoch):
            told.append(epoch)

    told: list[int] = []
    data = torch.utils.data.DataLoader(Told(torch.ones(2)))
    first = fl.pipeline()(
        lambda model, batch: toy_loss(model, batch[0] if isinstance(batch, list) else batch)
    )
    fl.evaluate(first, toy(), data)
    fl.fit(first, toy(), ([ONE], data), epochs=2, hooks=())
    assert told == []


def test_predict_is_lazy_and_in_order():
    asked = []

    def batches():
        for x in (1.0, 2.0, 3.0):
            asked.append(x)
            yield torch.tensor([x])

    results = fl.predict(lambda model, batch: model(batch).item(), toy(w=2.0), batches)
    assert next(results) == 2.0 and asked == [1.0]
    assert list(results) == [4.0, 6.0]


def test_between_predictions_the_model_is_unchanged():
    state = toy()
    for flag in fl.predict(
        lambda model, batch: (model.training, torch.is_grad_enabled()), state, [ONE, ONE]
    ):
        assert flag == (False, False)
        assert state.model.training and torch.is_grad_enabled()


def test_predict_requires_a_function_first():
    with pytest.raises(
        TypeError, match=r"predict\(lambda model, batch: model\(batch\), state, loader\)"
    ):
        fl.predict(toy(), lambda model, batch: batch, [ONE])
