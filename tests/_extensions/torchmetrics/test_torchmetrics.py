"""Metrics of torchmetrics: combined over batches, and computed once."""

import sys

import pytest
import torch

import fnloop as fl
from fnloop import from_torchmetrics
from fnloop._core.metrics import Metrics
from fnloop.testing import toy, toy_loss

ONE, TWO, FOUR = (torch.tensor([value]) for value in (1.0, 2.0, 4.0))

#  (prediction, target)                      true +  false +  false -  F1
F1_BATCHES = [
    (torch.tensor(predicted), torch.tensor(true))
    for predicted, true in [
        ([1, 0], [1, 1]),  #                  1       0        1        2/3
        ([1], [0]),  #                        0       1        0        0
        ([1, 1, 0], [1, 1, 0]),  #            2       0        0        1
    ]
]  # all together: 3 true positives, 1 false positive, 1 false negative: 2·3 / (2·3 + 1 + 1) = 0.75


def binary_f1():
    return pytest.importorskip("torchmetrics.classification").BinaryF1Score()


def f1_parts(template=None):
    f1 = from_torchmetrics(template or binary_f1(), lambda aux, batch: (aux["output"], batch))
    return [f1({"output": prediction}, target) for prediction, target in F1_BATCHES]


@pytest.mark.parametrize("seen", [False, True], ids=["inputs that wait", "inputs that were seen"])
def test_f1_over_uneven_batches_is_f1_over_everything_at_once(seen):
    a, b, c = parts = [part.to_accumulator() if seen else part for part in f1_parts()]
    alone = [pytest.approx(2 / 3), 0.0, 1.0]
    assert [part.compute() for part in parts] == alone
    waiting = f1_parts()[2]
    for whole in (
        *(a.combine(b).combine(c), a.combine(b.combine(c)), c.combine(b).combine(a)),
        *(a.combine(b).combine(waiting), waiting.combine(a).combine(b)),
    ):
        assert whole.compute() == 0.75
    assert [part.compute() for part in parts] == alone  # none was changed
    running = Metrics().update_({"m": a}).update_({"m": b})
    assert running["m"].compute() == 0.5  # 1 true positive, 1 false positive, 1 false negative
    assert Metrics(running).update_({"m": c})["m"].compute() == 0.75


def test_the_template_is_never_updated_and_its_earlier_updates_do_not_count():
    template = binary_f1()
    template.update(torch.tensor([1, 1, 1]), torch.tensor([0, 0, 0]))
    a, b, c = f1_parts(template)
    running = {}
    for part in (a, b, c):
        running = Metrics(running).update_({"f1": part})
    assert running["f1"].compute() == 0.75
    a.to_accumulator().combine(b.to_accumulator()).compute()
    assert (template.update_count, template.tp.sum(), template.fp.sum()) == (1, 0, 3)


def labels(aux, batch):
    """Return the batch as predictions, and 0 as the targets."""
    return batch.long(), 0 * batch.long()


def accuracy():
    classification = pytest.importorskip("torchmetrics.classification")
    right = classification.MulticlassAccuracy(3, average="micro")
    return fl.metric(acc=from_torchmetrics(right, labels))


RIGHT, WRONG = torch.tensor([0.0]), torch.tensor([1.0])


@pytest.mark.parametrize(("window", "batches"), [
    (1, [RIGHT, WRONG, WRONG]), (2, [[RIGHT, RIGHT], [WRONG, WRONG], [WRONG]]),
], ids=["a batch", "a window"])  # fmt: skip
def test_the_metrics_of_an_output_do_not_change_with_the_next_step(window, batches):
    step, state = fl.pipeline(accuracy(), fl.accumulate(window))(toy_loss), toy()
    outs = []
    for batch in batches:
        state, out = step(state, batch)
        outs.append(out)
    assert [out.metrics["acc"].compute() for out in outs] == [1.0, 0.0, 0.0]
    step(state, batches[0])
    assert [out.metrics["acc"].compute() for out in outs] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_metric_that_cannot_be_merged_works_in_one_process(window):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Digits(torchmetrics.Metric):
        full_state_update = True

        def __init__(self):
            super().__init__()
            self.add_state("number", torch.tensor(0.0))

        def update(self, digit):
            self.number = self.number * 10 + digit[0]

        def compute(self):
            return self.number

    digits = fl.metric(n=from_torchmetrics(Digits(), lambda aux, batch: (batch,)))
    step = fl.pipeline(digits, fl.accumulate(window))(toy_loss)
    state = fl.fit(step, toy(), ([ONE, TWO, FOUR], [FOUR, ONE]), hooks=())
    assert (state.history["train/n"], state.history["valid/n"]) == ((124.0,), (41.0,))


def test_two_are_equal_if_they_have_the_same_metric_object():
    f1, other = binary_f1(), binary_f1()
    made, again = (from_torchmetrics(f1, labels) for _ in range(2))
    assert made == again != from_torchmetrics(other, labels) and len({made, again}) == 1
    assert made != from_torchmetrics(f1, toy_loss)
    assert (
        fl.metric(f1=made) == fl.metric(f1=again) != fl.metric(f1=from_torchmetrics(other, labels))
    )
    assert repr(made) == "from_torchmetrics(BinaryF1Score(), labels)"


def test_inputs_are_detached():
    mean = pytest.importorskip("torchmetrics").MeanMetric()
    weight = torch.tensor(2.0, requires_grad=True)
    part = from_torchmetrics(mean, lambda aux, batch: (aux * batch,))(weight, torch.tensor(3.0))
    assert part.compute() == 6.0
    assert not part.inputs[0][0].requires_grad


def test_inputs_must_be_a_tuple_of_arguments():
    f1 = from_torchmetrics(binary_f1(), lambda aux, batch: batch)
    with pytest.raises(TypeError, match="must return a tuple of arguments for update; got Tensor"):
        f1({}, torch.tensor([1]))


def test_without_torchmetrics_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"torchmetrics: pip install 'fnloop\[torchmetrics\]'"):
        from_torchmetrics(None, len)
