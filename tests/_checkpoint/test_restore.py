"""What a restore takes from a checkpoint, and what it refuses."""

import json
import warnings

import attrs
import pytest
import torch
from crafted import craft
from safetensors.torch import load_file
from torch import nn

import fnloop as fl
from fnloop._checkpoint import files
from fnloop._core.serialize import encode
from fnloop.testing import Toy, assert_same, small, toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def test_a_tampered_checkpoint_is_detected_before_the_first_update(tmp_path):
    """The checksums are valid; the contents are not what these middleware keep."""
    make = fl.pipeline(fl.amp("fp16"))(toy_loss)
    state = fl.fit(make, toy(), [ONE] * 4, steps=2, hooks=())
    longer = attrs.evolve(state, slots={"amp": type(state.slots["amp"])(torch.ones(3), 0)})
    restored = fl.restore(fl.save(longer, tmp_path / "a"), toy())
    with pytest.raises(
        ValueError,
        match=r"a tensor of .* with 1 dimensions where there is one of .* with 0 dimensions",
    ):
        fl.fit(make, restored, [ONE] * 4, hooks=())
    wrong = attrs.evolve(
        fl.fit(step, toy(), [ONE] * 4, steps=2, hooks=()), metrics={"loss": fl.Sum(torch.ones(()))}
    )
    path = fl.save(wrong, tmp_path / "b")
    text = (path / "state.json").read_text().replace('"value": {', '"value": "x", "other": {')
    (path / "state.json").write_text(text)
    check_refused(craft(path), toy(), "cannot be restored: TypeError: a fnloop.Sum holds")


def test_restoring_makes_the_given_state_stale(tmp_path):
    given = toy()
    fl.restore(fl.save(toy(w=3.0), tmp_path / "a"), given)
    with pytest.raises(fl.StaleStateError):
        step(given, ONE)


def linear_state(n=2, **kwargs):
    model = nn.Linear(n, 1, **kwargs)
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


def check_refused(path, state, message, **kwargs):
    """Check that a restore is refused and leaves the state unchanged."""
    before = fl.snapshot(state)
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, state, **kwargs)
    assert_same(state, before)


def test_a_module_that_rejects_its_extra_state_is_left_unchanged(tmp_path):
    class Refuses(Toy):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, extra):
            raise ValueError("not mine") if extra == {"a": 1} and self.w.item() == 3.0 else None

    def new(w):
        model = Refuses(w)
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    state = new(7.0)
    with pytest.raises(fl.CheckpointError, match="cannot be restored: ValueError: not mine"):
        fl.restore(fl.save(new(3.0), tmp_path / "a"), state)
    assert state.model.w.item() == 7.0


@pytest.mark.parametrize("saved", [torch.tensor([0.1, 0.2]), torch.tensor([0.1])])
def test_a_learning_rate_of_another_shape_is_refused(tmp_path, saved):
    def new(w, lr):
        state = toy(w)
        state.optimizer.param_groups[0]["lr"] = lr
        return state

    path = fl.save(new(3.0, saved), tmp_path / "a")
    for here in (torch.tensor(0.1), torch.tensor([0.1, 0.2, 0.3])):
        if saved.numel() > 1 or here.ndim == 0:  # one number fits into any vector
            check_refused(path, new(7.0, here), "lr of a parameter group|cannot be restored")


def test_optimizer_state_of_parameters_of_another_shape_is_refused(tmp_path):
    check_refused(
        fl.save(linear_state(2), tmp_path / "a"),
        linear_state(3),
        r"weight: \(1, 2\) saved, \(1, 3\) here",
        only=("optimizer",),
    )


def test_a_restore_that_is_not_strict_restores_everything_that_matches(tmp_path):
    problem = small()
    make = fl.pipeline()(problem.loss_fn)

    def new():
        model = problem.state().model
        return fl.TrainState.create(
            model, torch.optim.Adafactor(model.parameters(), lr=0.01), seed=0
        )

    whole = fl.fit(make, new(), problem.batches, epochs=2, hooks=())
    half = fl.fit(make, new(), problem.batches, steps=3, hooks=())
    resumed = fl.restore(fl.save(half, tmp_path / "a"), new(), strict=False)
    assert_same(fl.fit(make, resumed, problem.batches, epochs=2, hooks=()), whole)


def test_another_dtype_is_refused_but_weights_alone_are_cast(tmp_path):
    def double():
        model = Toy().double()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    path = fl.save(toy(w=3.0), tmp_path / "a")
    check_refused(path, double(), "of another dtype: w: torch.float32 saved, torch.float64 here")
    w = fl.restore(path, double(), only=("model",)).model.w
    assert (w.item(), w.dtype) == (3.0, torch.float64)


MANIFESTS = {
    "format": lambda path: craft(path, lambda made: made.update(format_version="1")),
    "no format": lambda path: craft(path, lambda made: made.pop("format_version")),
    "measured": lambda path: craft(path, lambda made: made.update(measured=[])),
    "phase": lambda path: craft(path, lambda made: made.update(phase=3)),
    "position": lambda path: craft(path, lambda made: made.update(position=["x"])),
    "files": lambda path: craft(path, lambda made: made.update(files=3)),
    "a list": lambda path: (path / "manifest.json").write_text("[]"),
    "deep": lambda path: (path / "manifest.json").write_text("[" * 200_000 + "]" * 200_000),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_malformed_manifest_is_refused_and_skipped(tmp_path, change):
    fl.fit(
        step,
        toy(),
        [ONE] * 2,
        hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path, best="train/loss")),),
    )
    change(tmp_path / "step-00000002")
    check_refused(tmp_path / "step-00000002", toy(), "damaged")
    for find in (fl.latest, fl.best):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert (found := find(tmp_path)) is None or found.name == "step-00000001"
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert fl.latest(tmp_path).name == "step-00000001"
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert fl.resume(tmp_path, toy()).step == 1


FACTS = {
    "step": lambda state: state.update(step="x"),
    "batch": lambda state: state.update(batch=-3),
    "no seed": lambda state: state.pop("seed"),
    "stop": lambda state: state.update(stop=3),
    "extra": lambda state: state.update(extra=[1]),
    "metrics": lambda state: state.update(metrics={"loss": 5}),
    "slots": lambda state: state.update(slots={"a": {"$tensor": "not there"}}),
    "lr": lambda state: state["optimizer"]["param_groups"][0].update(lr="evil"),
    "optimizer": lambda state: state["optimizer"].update(state={"w": 3}),
    "generators": lambda state: state.update(
        generators=encode([{"python": (1,), "numpy": 2}], {}, "")
    ),
    "python": lambda state: state["generators"][0].update(
        python={"$tuple": [3, {"$tuple": [1, 2]}, None]}
    ),
    "history": lambda state: state.update(history=[{"epoch": 1}]),
    "model": lambda state: state.update(model=3),
    "seconds": lambda state: state.update(seconds="1"),
    "negative seconds": lambda state: state.update(seconds=-1.0),
    "NaN seconds": lambda state: state.update(seconds=float("nan")),
    "endless seconds": lambda state: state.update(seconds=float("inf")),
}


@pytest.mark.parametrize("change", FACTS.values(), ids=FACTS)
def test_invalid_facts_are_refused_and_the_state_is_unchanged(tmp_path, change):
    path = fl.save(fl.fit(step, toy(), [ONE] * 4, steps=2, hooks=()), tmp_path / "a")
    check_refused(
        craft(path, facts=change),
        toy(w=7.0),
        "is damaged|cannot be restored|a parameter group|the optimizer's state",
    )


def test_restore_takes_only_the_parts_asked_for(tmp_path):
    path = fl.save(fl.fit(step, toy(lr=0.5), [ONE] * 4, steps=2, hooks=()), tmp_path / "a")
    tuned = fl.restore(path, toy(lr=0.1), only=("model",))
    assert (tuned.model.w.item(), tuned.step, tuned.optimizer.param_groups[0]["lr"]) == (
        -1.0,
        0,
        0.1,
    )
    counted = fl.restore(path, toy(), only=("counters",))
    assert (counted.model.w.item(), counted.step, counted.batch) == (0.0, 2, 2)
    for wrong in ("model", ("weights",)):
        with pytest.raises(ValueError, match="expects only= as a tuple of model, optimizer"):
            fl.restore(path, toy(), only=wrong)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            toy,
            r"another model \(Linear\).*"
            "missing in the checkpoint: w; not in the model: bias, weight",
        ),
        (lambda: linear_state(3), r"of another shape: weight: \(1, 2\) saved, \(1, 3\) here"),
        (lambda: linear_state(bias=False), "not in the model: bias.*strict=False"),
    ],
)
def test_another_model_is_refused_and_the_state_is_unchanged(tmp_path, given, message):
    path, state = fl.save(linear_state(), tmp_path / "a"), given()
    before = fl.snapshot(state)
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, state)
    assert_same(state, before)


def test_matching_tensors_of_another_model_are_restored(tmp_path, caplog):
    path = fl.save(linear_state(), tmp_path / "a")
    saved = load_file(path / "model.safetensors")
    state = fl.restore(path, linear_state(3), only=("model",), strict=False)
    assert torch.equal(state.model.bias, saved["bias"])
    assert "left unchanged: of another shape: weight" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: torch.optim.Adam(p),
            r"has the state of SGD, and the optimizer is Adam.*only=\('model',\)",
        ),
        (
            lambda p: torch.optim.SGD(list(p)[::-1], lr=0.1),
            "the same parameters in other groups, or in another order",
        ),
        (lambda p: torch.optim.SGD(list(p)[:1], lr=0.1), "only in the checkpoint: bias"),
    ],
)
def test_another_optimizer_is_refused_and_the_state_is_unchanged(tmp_path, make, message):
    path = fl.save(linear_state(), tmp_path / "a")
    model = nn.Linear(2, 1)
    state = fl.TrainState.create(model, make(model.parameters()))
    before = fl.snapshot(state)
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, state)
    assert_same(state, before)


def test_an_error_says_why_a_path_is_not_a_checkpoint(tmp_path):
    with pytest.raises(fl.CheckpointError, match="there is no such folder"):
        fl.restore(tmp_path / "nowhere", toy())
    with pytest.raises(fl.CheckpointError, match=r"it has no manifest\.json"):
        fl.restore(tmp_path, toy())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(fl.CheckpointError, match="is not a checkpoint: save to another path"):
        fl.save(toy(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_newer_format_asks_for_a_newer_fnloop(tmp_path):
    path = fl.save(toy(), tmp_path / "a")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["check"]
    manifest["format_version"] = 99
    (path / "manifest.json").write_text(
        json.dumps({**manifest, "check": files.checksum_of_manifest(manifest)})
    )
    with pytest.raises(fl.CheckpointError, match=r"has format 99.*pip install -U fnloop"):
        fl.restore(path, toy())


def test_a_position_within_an_epoch_names_the_number_of_processes_that_saved_it(tmp_path):
    """Two processes have other shards than one, so a sharded loader cannot continue the epoch."""
    data = [ONE] * 4
    half = fl.fit(step, toy(), data, steps=2, hooks=())
    path = craft(fl.save(half, tmp_path / "a"), facts=lambda facts: facts.update(processes=2))
    restored = fl.restore(path, toy())
    assert (half.saved_on, restored.saved_on) == (None, 2)
    for state in (fl.snapshot(restored), restored):
        with pytest.raises(ValueError, match="written in mid-epoch by 2 processes"):
            fl.fit(step, state, fl.sharded(data), hooks=())
    later = fl.fit(step, restored, data, steps=3, hooks=())
    assert later.saved_on == 2
    assert fl.fit(step, later, data, epochs=1, hooks=()).saved_on is None


def test_a_checkpoint_at_the_end_of_an_epoch_has_no_position_within_one(tmp_path):
    whole = fl.fit(step, toy(), [ONE] * 2, hooks=())
    path = craft(fl.save(whole, tmp_path / "a"), facts=lambda facts: facts.update(processes=2))
    assert fl.restore(path, toy()).saved_on is None


@pytest.mark.parametrize(
    ("only", "old", "expected"),
    [(None, False, [2.0, 4.0]), (None, True, [2.0, 3.0]), (("model",), False, [2.0])],
    ids=["all", "of an older version", "the model alone"],
)
def test_the_time_comes_with_the_counters(monkeypatch, tmp_path, only, old, expected):
    """Each update takes a second, and an epoch has two. The run is cut after three.

    A checkpoint of an older version knows the time of its newest record only.
    """
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def slow(model, batch):
        clock[0] += 1.0
        return toy_loss(model, batch)

    def cut(state):
        return attrs.evolve(state, stop="interrupted") if state.step == 3 else state

    path = fl.save(
        fl.fit(fl.pipeline()(slow), toy(), [ONE] * 2, epochs=2, hooks=(cut,)), tmp_path / "a"
    )
    if old:
        craft(path, facts=lambda facts: facts.pop("seconds"))
    state = fl.restore(path, toy(), only=only)
    state = fl.fit(fl.pipeline()(slow), state, [ONE] * 2, hooks=())
    assert [record.seconds for record in state.history] == expected
