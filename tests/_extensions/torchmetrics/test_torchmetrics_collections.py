"""A MetricCollection in one call, and metrics that compute a vector."""

import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import assert_same

torchmetrics = pytest.importorskip("torchmetrics")
classification = pytest.importorskip("torchmetrics.classification")

# of AUROC, in batches without one of the classes
pytestmark = pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
CLASSES = 3


def labels(aux, batch):
    return aux["output"], batch[1]


def identity(model, batch):
    """A model that predicts what the batch says; the loss trains it nevertheless."""
    return model(batch[0]).square().mean(), {"output": batch[0]}


def scores(*classes):
    return nn.functional.one_hot(torch.tensor(classes), CLASSES).float()


#  predicted and true: class 0: 2 right of 2 predicted and 3 true; 1: 1 of 2 and 1; 2: 0 of 1 and 1
DATA = [(scores(0, 1), torch.tensor([0, 1])), (scores(0, 1, 2), torch.tensor([0, 2, 0]))]
RECALL, PRECISION = [2 / 3, 1.0, 0.0], [1.0, 0.5, 0.0]


def collection(average="macro", **settings):
    make = {"recall": "MulticlassRecall", "precision": "MulticlassPrecision"}
    metrics = {
        name: getattr(classification, kind)(CLASSES, average=average, validate_args=False)
        for name, kind in make.items()
    }
    metrics["auroc"] = classification.MulticlassAUROC(CLASSES, validate_args=False)
    return torchmetrics.MetricCollection(metrics, **settings)


def counted(**settings):
    return fl.from_torchmetrics(collection(**settings), labels)


def numbers(metrics, **settings):
    """Return a metric function of these metrics of numbers."""
    made = torchmetrics.MetricCollection(metrics, **settings)
    return fl.from_torchmetrics(made, lambda aux, batch: (batch,))


def state():
    torch.manual_seed(1)
    model = nn.Linear(CLASSES, 1)
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)


def evaluated(*members, data=DATA):
    found = fl.evaluate(fl.pipeline(*members)(identity), state(), data)
    del found["loss"]
    return found


def test_a_collection_has_its_own_names_and_the_values_of_its_metrics():
    template = collection()
    found = evaluated(fl.metric(fl.from_torchmetrics(template, labels)))
    by_hand = collection()
    by_hand.update(torch.cat([b[0] for b in DATA]), torch.cat([b[1] for b in DATA]))
    assert found == {name: value.item() for name, value in by_hand.compute().items()}
    assert found["recall"] == pytest.approx(sum(RECALL) / 3)
    assert found["precision"] == pytest.approx(sum(PRECISION) / 3)
    assert [m.update_count for m in template.values()] == [0, 0, 0]
    out = fl.pipeline(fl.metric(counted()))(identity).evaluate(state(), DATA[0])
    assert all(name in out._repr_html_() for name in ("recall", "precision", "auroc"))


def test_prefixes_are_kept_and_a_name_is_put_before_them():
    names, metric = {"all_recall", "all_precision", "all_auroc"}, counted(prefix="all_")
    assert evaluated(fl.metric(metric)).keys() == names
    assert evaluated(fl.metric(m=metric)).keys() == {f"m/{name}" for name in names}


def test_the_metrics_of_a_group_are_updated_once_per_batch(monkeypatch):
    """In the first batch of a pass each is updated, to find the groups."""
    updates = []
    update = classification.MulticlassRecall.update
    seen = lambda self, *args: updates.append(type(self).__name__) or update(self, *args)
    monkeypatch.setattr(classification.MulticlassRecall, "update", seen)
    monkeypatch.setattr(classification.MulticlassPrecision, "update", seen)
    evaluated(fl.metric(counted()), data=5 * DATA)
    assert updates == ["MulticlassPrecision", "MulticlassRecall"] + 9 * ["MulticlassPrecision"]


def test_a_run_has_them_in_training_and_evaluation():
    member = fl.metric(counted())
    moment = fl.every(steps=1)
    done = fl.fit(
        fl.pipeline(member)(identity), state(), (DATA, DATA), hooks=(),
        evaluate_every=moment, record_every=moment,
    )  # fmt: skip
    total = evaluated(member)
    assert done.history["train/recall"][-1] == done.history["valid/recall"][0] == total["recall"]
    each = [evaluated(member, data=[batch])["recall"] for batch in DATA]
    assert done.history["recent/recall"] == tuple(each)


@pytest.mark.parametrize("window", [2, 3])
def test_a_window_counts_each_batch_once(window):
    member = fl.metric(counted())
    step = fl.pipeline(member, fl.accumulate(window))(identity)
    done = fl.fit(step, state(), [*DATA, *DATA, DATA[0]], hooks=())
    expected = evaluated(member, data=[*DATA, *DATA, DATA[0]])
    assert {name: done.history[f"train/{name}"][0] for name in expected} == expected


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_resumes_bit_for_bit(tmp_path, steps):
    def make():
        vector = fl.from_torchmetrics(recall(), labels, names=("a", "b", "c"))
        wrapped = torchmetrics.ClasswiseWrapper(recall(), labels=list(NAMES))  # has no states
        wrapped = fl.from_torchmetrics(wrapped, labels)
        return fl.pipeline(fl.metric(counted()), fl.metric(r=vector, w=wrapped))(identity)

    data = [*DATA, *DATA]
    whole = fl.fit(make(), state(), data, hooks=())
    part = fl.fit(make(), state(), data, steps=steps, hooks=())
    half = fl.restore(fl.save(part, tmp_path / "a"), state())
    assert_same(fl.fit(make(), half, data, hooks=()), whole)
    assert whole.history["train/w/multiclassrecall_cat"] == pytest.approx((2 / 3,))


def test_a_group_is_saved_once(tmp_path):
    member = fl.metric(counted())
    part = fl.fit(fl.pipeline(member)(identity), state(), [*DATA, *DATA], steps=2, hooks=())
    (metric,) = [m for name, m in part.metrics.items() if name != "loss"]
    parts = metric.to_parts()["members"]
    assert parts["recall"] == {"like": "precision"}
    again = metric.from_parts(metric.to_parts())
    assert again.compute() == metric.compute()
    more = counted()({"output": DATA[0][0]}, DATA[0])
    assert again.combine(more).compute() == metric.combine(more).compute()


def test_parts_can_be_combined_in_any_grouping_and_none_is_changed():
    batches = [*DATA, (scores(2, 2), torch.tensor([2, 1]))]
    a, b, c = (counted()({"output": x}, (x, y)).to_accumulator() for x, y in batches)
    before = [part.compute() for part in (a, b, c)]
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    whole = counted()({"output": x}, (x, y)).compute()
    assert a.combine(b).combine(c).compute() == whole == a.combine(b.combine(c)).compute()
    assert a.to_cpu().combine(b.combine(c).to_cpu()).compute() == whole
    assert [part.compute() for part in (a, b, c)] == before


def one(aux, batch):
    return 1.0


HINT = r', or give the collection a prefix: MetricCollection\(..., prefix="my_"\)'


@pytest.mark.parametrize("other", [
    lambda: fl.metric(recall=one), lambda: fl.metric(recall=one, on="training"),
    lambda: fl.metric(recall=one, on="evaluation"),
    lambda: fl.metric(recall=one, loaders=("test",)),
    lambda: fl.metric(counted(prefix=""), more=one), lambda: fl.derive(recall=lambda m: 1.0),
])  # fmt: skip
def test_a_name_that_a_collection_has_too_is_refused_when_composing(other):
    for members in ((fl.metric(counted()), other()), (other(), fl.metric(counted()))):
        with pytest.raises(ValueError, match=rf"and .* both report '\w+': rename one{HINT}"):
            fl.pipeline(*members)
    with pytest.raises(ValueError, match=rf"metric reports 'recall' twice: rename one{HINT}"):
        fl.metric(counted(), recall=one)


@pytest.mark.parametrize(("mine", "other"), [
    ({"on": "training"}, {"on": "evaluation"}), ({"on": "training"}, {"loaders": ("test",)}),
    ({"loaders": ("train", "valid")}, {"loaders": ("test",)}),
])  # fmt: skip
def test_a_collection_may_have_a_name_that_another_has_for_other_loaders(mine, other):
    for here, there in ((mine, other), (other, mine)):
        fl.pipeline(fl.metric(counted(), **here), fl.metric(recall=one, **there))


def test_a_name_that_is_found_twice_at_a_report_is_refused_then():
    twice = fl.metric(counted()), fl.metric(lambda aux, batch: {"recall": 1.0})
    with pytest.raises(ValueError, match=rf"two metrics report 'recall': rename one{HINT}") as info:
        evaluated(*twice)
    assert info.value.__notes__ == ["while in the metric 'recall'"]


def test_it_shows_the_names_of_its_metrics():
    metric = fl.from_torchmetrics(collection(), labels, names=("a", "b", "c"))
    assert repr(metric) == (
        "from_torchmetrics(MetricCollection(auroc, precision, recall), labels, "
        "names=('a', 'b', 'c'))"
    )


# --- vectors

NAMES = ("cat", "dog", "cow")


def recall(average=None):
    return classification.MulticlassRecall(CLASSES, average=average)


def test_a_vector_has_a_name_for_each_element():
    vector = fl.from_torchmetrics(recall(), labels, names=list(NAMES))
    step = fl.pipeline(fl.metric(recall=vector))(identity)
    done = fl.fit(step, state(), (DATA, DATA), hooks=())
    found = [done.history[f"valid/recall/{name}"][0] for name in NAMES]
    assert found == pytest.approx(RECALL)
    assert {name for name in done.history[-1].metrics if "recall" in name} == {
        f"{loader}/recall/{name}" for loader in ("train", "valid") for name in NAMES
    }
    mean = torchmetrics.MeanMetric()
    mean = fl.from_torchmetrics(mean, lambda a, b: (b[1].float(),), names=("x",))
    assert evaluated(fl.metric(m=mean)) == {"m/x": pytest.approx(0.6)}  # 3 of 5


def test_vectors_of_a_collection_have_them_too():
    found = evaluated(fl.metric(fl.from_torchmetrics(collection(None), labels, names=NAMES)))
    assert [found[f"precision/{name}"] for name in NAMES] == pytest.approx(PRECISION)
    assert [*found] == [
        "auroc", *(f"precision/{name}" for name in NAMES), *(f"recall/{name}" for name in NAMES),
    ]  # fmt: skip


@pytest.mark.parametrize(("metric", "names", "message"), [
    (recall(), "cat dog", r"MulticlassRecall\(\) computes: that is 3; got 2: cat, dog. Write 3 "
     r"names in metric\(...=from_torchmetrics\(..., names=\(...\)\)\)"),
    (recall("macro"), "cat dog", "that is 1; got 2: cat, dog. It is one number"),
    (classification.MulticlassConfusionMatrix(CLASSES), "a b c d e f g h i",
     r"an array of shape \(3, 3\); got 9: .*inspect"),
    (recall(), None, r"computes \(3,\)\. Choose .*names=\(\"cat\", \"dog\"\)"),
    (recall(), None, r'one number, but MulticlassRecall\(\) computes \(3,\).*average="macro"'),
    (collection(None), None, r"'precision' computes \(3,\)"),
    (collection(None), "cat", "what 'precision' computes: that is 3; got 1: cat"),
    (collection(), "a b c", "one number for each metric, and got a, b, c: leave out"),
], ids=repr)  # fmt: skip
def test_a_wrong_number_of_names_is_an_error(metric, names, message):
    names = names and tuple(names.split())
    member = fl.metric(m=fl.from_torchmetrics(metric, labels, names=names))
    with pytest.raises(ValueError, match=message) as info:
        evaluated(member)
    assert "while in the metric 'm'" in info.value.__notes__
    with pytest.raises(ValueError, match=message) as info:
        fl.fit(fl.pipeline(member)(identity), state(), DATA, hooks=())
    assert info.value.__notes__[0] == "while in the metric 'train/m'"


@pytest.mark.parametrize(("names", "error", "message"), [
    (("a", "a"), ValueError, "each once"),
    (NAMES, TypeError, "expects a name for MulticlassRecall"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error_when_composing(names, error, message):
    with pytest.raises(error, match=message):
        fl.metric(fl.from_torchmetrics(recall(), labels, names=names))
    with pytest.raises(ValueError, match="at least one metric"):
        numbers({})


class Total(torchmetrics.Metric):
    """A metric that is updated in place."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, numbers, *others):
        self.total.add_(numbers.sum())

    def compute(self):
        return self.total


class Replaced(Total):
    """A metric whose update makes a new tensor, which others of its group do not have."""

    def update(self, numbers):
        self.total = self.total + numbers.sum()


class Half(Total):
    def compute(self):
        return self.total / 2


class ReplacedHalf(Half, Replaced):
    pass


def test_a_group_is_one_whatever_an_update_makes_of_its_states():
    sums = numbers({"part": ReplacedHalf(), "total": Replaced()})
    first, second = (
        sums({}, torch.ones(n)).to_accumulator().update_(sums({}, torch.ones(n))) for n in (1, 3)
    )
    for found, total in ((first, 2.0), (second, 6.0), (first.combine(second), 8.0)):
        assert found.to_parts()["members"]["total"] == {"like": "part"}
        assert found.from_parts(found.to_parts()).compute() == {"part": total / 2, "total": total}
        assert found.compute() == {"part": total / 2, "total": total}


def test_metrics_without_states_of_their_own_share_none():
    metric = numbers({"a": Total() + 1, "b": Total() + 2})
    found = metric({}, torch.ones(4)).to_accumulator()
    parts = found.to_parts()["members"]
    assert "like" not in parts["a"] and "like" not in parts["b"]
    assert found.compute() == metric({}, torch.ones(1)).from_parts(found.to_parts()).compute()
    assert found.compute() == {"a": 5.0, "b": 6.0}


class ForwardInside(torchmetrics.Metric):
    """A metric that calls another one, as some wrappers do."""

    full_state_update = False

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def update(self, *numbers):
        self.inside(*numbers)

    def compute(self):
        return self.inside.compute()


@pytest.mark.parametrize("wrap", [lambda metric: metric, ForwardInside])
def test_a_metric_never_speaks_to_other_processes_by_itself(wrap):
    def speak(*args, **kwargs):
        raise AssertionError

    settings = {"distributed_available_fn": lambda: True, "dist_sync_fn": speak}
    numbers = lambda aux, batch: (batch,)
    metric = fl.from_torchmetrics(wrap(torchmetrics.SumMetric(**settings)), numbers)
    found = metric({}, torch.ones(2)).to_accumulator()
    assert found.update_(metric({}, torch.ones(3))).compute() == 5.0
