"""The loaders argument of ``fit``."""

import pytest
import torch
from loop_cases import ONE, fit, step

import fnloop as fl
from fnloop.testing import toy, toy_loss


@pytest.mark.parametrize(
    ("loaders", "keys"),
    [
        ([ONE, ONE], ("train/loss", "train/lr")),
        (([ONE], [ONE]), ("train/loss", "train/lr", "valid/loss")),
        (([ONE], None), ("train/loss", "train/lr")),
        (
            {"train": [ONE], "dev": [ONE], "test": [ONE]},
            ("train/loss", "train/lr", "dev/loss", "test/loss"),
        ),
        (lambda: (ONE for _ in range(2)), ("train/loss", "train/lr")),
        (range(0), None),
    ],
)
def test_loaders_come_in_many_forms(loaders, keys):
    if keys is None:
        with pytest.raises(ValueError, match="gave no batch in epoch 1"):
            fit(loaders=loaders)
    else:
        assert fit(loaders=loaders).history.keys() == keys


@pytest.mark.parametrize("name", ["recent", "time", "throughput", "memory"])
def test_a_name_with_which_other_metrics_begin_is_refused(name):
    with pytest.raises(ValueError, match=f'a loader cannot be named "{name}", with which'):
        fit(loaders={"train": [ONE], name: [ONE]})


@pytest.mark.parametrize(
    "call", [fl.evaluate, lambda step, *args: fl.predict(lambda model, batch: batch, *args)]
)
def test_one_loader_is_evaluated_at_a_time(call):
    with pytest.raises(
        TypeError, match=r"must be one iterable of batches; got a mapping with \['a', 'b'\]"
    ):
        call(step, toy(), {"a": [ONE], "b": [ONE]})


def test_an_iterator_can_only_be_read_once():
    iterator = iter([ONE] * 3)
    state = fit(loaders=iterator)
    assert state.step == 3
    with pytest.raises(
        ValueError, match=r"gave no batch in epoch 2\. An iterator can be read once: pass a list"
    ):
        fit(state, loaders=iterator)
    with pytest.raises(ValueError, match="which cannot start again: pass a function"):
        fit(fit(steps=2), loaders=iter([ONE] * 3))


def test_a_generator_function_resumes_in_mid_epoch():
    batches = lambda: (torch.tensor([x]) for x in (1.0, 2.0, 4.0))
    state = fit(loaders=batches, steps=2)
    assert (state.model.w.item(), state.batch) == (-3.0, 2)
    state = fit(state, loaders=batches)
    assert (state.model.w.item(), state.epoch) == (-7.0, 1)


@pytest.mark.parametrize(
    ("loaders", "error", "message"),
    [
        ({"valid": [ONE]}, ValueError, r"""one named "train" to train on; got \['valid'\]"""),
        ({"train": [ONE], "a/b": [ONE]}, ValueError, "without a slash"),
        ((ONE, ONE), TypeError, r"fit\(step, state, \[batch\]\)"),
        (3, TypeError, "must be an iterable of batches"),
        ([torch.utils.data.DataLoader([ONE])] * 2, TypeError, r"write a pair \(train, valid\)"),
        ({"train": [ONE], "valid": 3}, TypeError, "the valid loader must be an iterable"),
        (
            torch.utils.data.TensorDataset(ONE),
            TypeError,
            "the train loader is a TensorDataset.*wrap it in a DataLoader",
        ),
    ],
)
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
