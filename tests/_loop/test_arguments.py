"""The loaders of ``fit``, and its targets."""

import pytest
import torch
from loop_cases import ONE, fit, step
from sample_hooks import Notes

import fnloop as fl
from fnloop.testing import toy, toy_loss

TRAIN_KEYS = ("train/loss", "train/lr")


@pytest.mark.parametrize(("loaders", "keys"), [
    ([ONE, ONE], ()), (([ONE], [ONE]), ("valid/loss",)), (([ONE], None), ()),
    ({"train": [ONE], "dev": [ONE], "test": [ONE]}, ("dev/loss", "test/loss")),
    (lambda: (ONE for _ in range(2)), ()),
])  # fmt: skip
def test_loaders_come_in_many_forms(loaders, keys):
    assert fit(loaders=loaders).history.keys() == TRAIN_KEYS + keys


def test_a_generator_function_resumes_in_mid_epoch_and_an_iterator_does_not():
    batches = lambda: (torch.tensor([x]) for x in (1.0, 2.0, 4.0))
    state = fit(loaders=batches, steps=2)
    assert (state.model.w.item(), state.batch) == (-3.0, 2)
    with pytest.raises(ValueError, match="which cannot start again: pass a function"):
        fit(fl.snapshot(state), loaders=batches())
    state = fit(state, loaders=batches)
    assert (state.model.w.item(), state.epoch) == (-7.0, 1)


LOADER, TENSORS = torch.utils.data.DataLoader([ONE]), torch.utils.data.TensorDataset(ONE)


@pytest.mark.parametrize(("loaders", "error", "message"), [
    ({"valid": [ONE]}, ValueError, r"""one named "train" to train on; got \['valid'\]"""),
    ({"train": [ONE], "a/b": [ONE]}, ValueError, "without a slash"),
    ((ONE, ONE), TypeError, r"a pair of tensors, .*: write \[batch\] for this batch alone"),
    ({"x": ONE, "y": ONE}, ValueError, r"got \['x', 'y'\]. If this is one batch, write \[batch\]"),
    ([LOADER] * 2, TypeError, r"write a pair \(train, valid\)"),
    *(((loader,) * 3, TypeError, r'a tuple of 3\. Write \{"train": train, "valid": valid, "tes')
      for loader in ([ONE], LOADER)),
    ({"train": {"a": [ONE]}}, TypeError, r"the train loader .* got a mapping with \['a'\]"),
    (([ONE], (LOADER,) * 2), TypeError, "the valid loader must be one .* a tuple of 2 loaders"),
    (lambda: None, TypeError, "loader <lambda> must return an iterable .*; it returned None"),
    (lambda epoch: [ONE], TypeError, r"the train loader .* takes \(epoch\)"),
    (TENSORS, TypeError, "the train loader is a TensorDataset.*wrap it in a DataLoader"),
    *(({"train": [ONE], name: [ONE]}, ValueError, f'be named "{name}", with which')
      for name in ("recent", "time", "throughput", "memory")),
])  # fmt: skip
def test_bad_loaders_are_refused_by_name(loaders, error, message):
    with pytest.raises(error, match=message):
        fit(loaders=loaders)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hugging_face_dataset_of_samples_is_refused_and_one_of_batches_is_not(streaming):
    datasets = pytest.importorskip("datasets")
    samples = datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0, 4.0]}).with_format("torch")
    samples = samples.to_iterable_dataset() if streaming else samples
    loss = lambda model, batch: toy_loss(model, batch["x"])
    with pytest.raises(TypeError, match=r"train loader is a .*Dataset, a dataset of samples"):
        fl.fit(fl.pipeline()(loss), toy(), {"train": samples}, hooks=())
    rows = torch.utils.data.DataLoader(samples, batch_size=None)  # as the message advises
    assert fl.fit(fl.pipeline()(loss), toy(), rows, hooks=()).model.w.item() == -10.0
    state = fl.fit(fl.pipeline()(loss), toy(), samples.batch(2), hooks=())
    assert (state.step, state.model.w.item()) == (2, -5.0)  # -(1.5 + 3.5)


# --- targets: where a run ends, and what run yields on the way


@pytest.mark.parametrize(("before", "targets", "steps", "epochs", "batch"), [
    ({"steps": 0}, {}, 3, 1, 0),
    ({"steps": 2}, {}, 3, 1, 0),  # the rest of the epoch
    ({"steps": 3}, {}, 6, 2, 0),  # or one more
    ({"steps": 0}, {"epochs": 2}, 6, 2, 0), ({"steps": 0}, {"steps": 4}, 4, 1, 1),
    ({"steps": 0}, {"epochs": 2, "steps": 4}, 4, 1, 1),
    ({"steps": 0}, {"epochs": 1, "steps": 4}, 3, 1, 0),
    ({"steps": 0}, {"steps": 3}, 3, 1, 0),  # one state: not the beginning of an empty epoch
    ({"steps": 0}, {"epochs": 0}, 0, 0, 0),
])  # fmt: skip
def test_targets_are_absolute_and_the_smaller_wins(before, targets, steps, epochs, batch):
    state = fit(fit(**before), **targets)
    assert (state.step, state.epoch, state.batch) == (steps, epochs, batch)
    assert state.run is None


def test_a_second_call_with_the_same_target_reports_nothing_to_do(caplog):
    state = fit(epochs=2)
    assert list(fl.run(step, state, [ONE] * 3, epochs=2, hooks=())) == [state]
    assert fit(state, epochs=2) is state
    message = "nothing to do: the state is at epoch 2, step 6, and the target is epochs=2. To"
    assert f"{message} train longer, raise it: epochs=4" in caplog.text
    fit(epochs=0)
    assert "the target is epochs=0. To train longer, raise it: epochs=1" in caplog.text


def test_run_yields_after_every_epoch_and_at_the_end():
    states = fl.run(step, toy(), [ONE] * 3, steps=7, hooks=())
    assert [(s.step, s.epoch, s.run) for s in states] == [(3, 1, None), (6, 2, None), (7, 2, None)]


def test_a_run_completes_an_epoch_that_bare_steps_exhausted():
    state = toy()
    for _ in range(5):
        state, _ = step(state, ONE)
    assert (state.step, state.epoch, state.batch) == (5, 0, 5)
    state = fit(state, [ONE] * 5, epochs=2)
    assert (state.step, state.epoch, state.batch, state.model.w.item()) == (10, 2, 0, -10.0)


def test_leaving_a_run_closes_its_hooks():
    hook = Notes()
    for _ in fl.run(step, toy(), [ONE] * 3, epochs=5, hooks=(hook,)):
        break
    assert hook.closed == 1


def test_advancing_a_yielded_state_elsewhere_ends_the_run():
    states = fl.run(step, toy(), [ONE] * 3, epochs=5, hooks=())
    fit(next(states))
    with pytest.raises(fl.StaleStateError):
        next(states)
