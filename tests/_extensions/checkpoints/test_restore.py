"""What a restore takes from a checkpoint, and what it refuses."""

import itertools
import warnings

import attrs
import pytest
import torch
from crafted import craft
from safetensors.torch import load_file, save_file
from saved import ONE, check_continues, check_refused, sgd, step, train
from torch import nn

import fnloop as fl
from fnloop._extensions.checkpoints import files
from fnloop._extensions.checkpoints.compare import find_difference
from fnloop._extensions.checkpoints.parts import weights_kept_on_error
from fnloop._extensions.checkpoints.serialize import encode
from fnloop.testing import Toy, small, toy, toy_loss


@pytest.mark.parametrize("names", [(), ("weight",), ("weight", "bias")])
def test_weights_that_were_half_loaded_are_put_back(names):
    module = nn.Linear(2, 1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    values = {name: torch.full_like(before[name], 7.0) for name in names}
    with pytest.raises(OSError), weights_kept_on_error(module, values):
        for value in module.state_dict().values():
            value.fill_(5.0)
        raise OSError
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_tampered_checkpoint_is_detected_before_the_first_update(tmp_path):
    """The checksums are valid; the contents are not what these middleware keep."""
    make = fl.pipeline(fl.amp("fp16"))(toy_loss)
    state = fl.fit(make, toy(), [ONE] * 4, steps=2, hooks=())
    longer = attrs.evolve(state, slots={"amp": type(state.slots["amp"])(torch.ones(3), 0)})
    given = toy()
    restored = fl.restore(fl.save(longer, tmp_path / "a"), given)
    with pytest.raises(fl.StaleStateError):
        step(given, ONE)
    message = r"a tensor of .* with 1 dimensions where there is one of .* with 0 dimensions"
    with pytest.raises(ValueError, match=message):
        fl.fit(make, restored, [ONE] * 4, hooks=())
    state = fl.fit(step, toy(), [ONE] * 4, steps=2, hooks=())
    path = fl.save(attrs.evolve(state, metrics={"loss": fl.Sum(ONE[0])}), tmp_path / "b")
    text = (path / "state.json").read_text().replace('"value": {', '"value": "x", "other": {')
    (path / "state.json").write_text(text)
    check_refused(craft(path), toy(), "cannot be restored: TypeError: a fnloop.Sum holds")


linear_state = lambda n=2, **settings: sgd(nn.Linear(n, 1, **settings), lr=0.1)


class Refuses(Toy):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, extra):
        raise ValueError("not mine") if extra == {"a": 1} and self.w.item() == 3.0 else None


def test_a_restore_that_is_not_strict_restores_everything_that_matches(tmp_path):
    problem = small()

    def new():
        model = problem.state().model
        adafactor = torch.optim.Adafactor(model.parameters(), lr=0.01)
        return fl.TrainState.create(model, adafactor, seed=0)

    make = fl.pipeline()(problem.loss_fn)
    check_continues(tmp_path, new, make, problem.batches, splits=[3], strict=False)


def test_another_dtype_is_refused_but_weights_alone_are_cast(tmp_path):
    path, double = fl.save(toy(w=3.0), tmp_path / "a"), sgd(Toy().double())
    check_refused(path, double, "of another dtype: w: torch.float32 saved, torch.float64 here")
    w = fl.restore(path, double, only=("model",)).model.w
    assert (w.item(), w.dtype) == (3.0, torch.float64)


def schedule_free(problem):
    model = problem.state().model
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(model.parameters())
    return fl.TrainState.create(model, optimizer, seed=0)


@pytest.mark.parametrize("fault", ["not there", "another name", "another shape"])
def test_weights_to_train_with_that_do_not_fit_are_damage(tmp_path, fault):
    problem = small()
    state, _ = fl.pipeline()(problem.loss_fn)(schedule_free(problem), problem.batches[0])
    path = fl.save(state, tmp_path / "a")
    if fault == "not there":
        path = fl.save(problem.state(), tmp_path / "b")
        craft(path, facts=lambda facts: facts.update(training=True))
    else:
        found = load_file(file := path / "training.safetensors")
        name = min(found)
        found |= {"b": found.pop(name)} if fault == "another name" else {name: torch.zeros(9)}
        save_file(found, file)
        sizes = {"bytes": file.stat().st_size, "sha256": files.disk.checksum_of_file(file)}
        craft(path, manifest=lambda made: made["files"].update({file.name: sizes}))
    new = problem.state() if fault == "not there" else schedule_free(problem)
    before = [p.clone() for p in new.model.parameters()]
    with pytest.raises(fl.CheckpointError):
        fl.restore(path, new)
    assert all(map(torch.equal, before, new.model.parameters()))


MANIFESTS = {
    "format": lambda made: made.update(format_version="1"),
    "no format": lambda made: made.pop("format_version"),
    "measured": lambda made: made.update(measured=[]), "phase": lambda made: made.update(phase=3),
    "position": lambda made: made.update(position=["x"]),
    "files": lambda made: made.update(files=3), "a list": "[]",
    "deep": "[" * 200_000 + "]" * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_malformed_manifest_is_refused_and_skipped(tmp_path, change):
    train(tmp_path, toy(), 2, best="train/loss")
    path = tmp_path / "step-00000002"
    craft(path, change) if callable(change) else (path / "manifest.json").write_text(change)
    check_refused(path, toy(), "damaged")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (found := fl.best(tmp_path)) is None or found.name == "step-00000001"
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert fl.latest(tmp_path).name == "step-00000001"
        assert fl.resume(tmp_path, toy()).step == 1


DRAWN = encode([{"python": (1,), "numpy": 2}], {}, "")
FACTS = {
    "step": lambda facts: facts.update(step="x"),
    "batch": lambda facts: facts.update(batch=-3),
    "no seed": lambda facts: facts.pop("seed"),
    "stop": lambda facts: facts.update(stop=3),
    "extra": lambda facts: facts.update(extra=[1]),
    "metrics": lambda facts: facts.update(metrics={"loss": 5}),
    "slots": lambda facts: facts.update(slots={"a": {"$tensor": "not there"}}),
    "lr": lambda facts: facts["optimizer"]["param_groups"][0].update(lr="evil"),
    "optimizer": lambda facts: facts["optimizer"].update(state={"w": 3}),
    "generators": lambda facts: facts.update(generators=DRAWN),
    "python": lambda facts: facts["generators"][0].update(
        python={"$tuple": [3, {"$tuple": [1, 2]}, None]}
    ),
    "history": lambda facts: facts.update(history=[{"epoch": 1}]),
    "model": lambda facts: facts.update(model=3),
    "seconds": lambda facts: facts.update(seconds="1"),
    "negative seconds": lambda facts: facts.update(seconds=-1.0),
    "NaN seconds": lambda facts: facts.update(seconds=float("nan")),
    "endless seconds": lambda facts: facts.update(seconds=float("inf")),
    **{
        f"positions {crafted}": lambda facts, crafted=crafted: facts.update(positions=crafted)
        for crafted in (3, [3], [{}], "text", None)
    },
}


@pytest.mark.parametrize("change", FACTS.values(), ids=FACTS)
def test_invalid_facts_are_refused_and_the_state_is_unchanged(tmp_path, change):
    path = fl.save(fl.fit(step, toy(), [ONE] * 4, steps=2, hooks=()), tmp_path / "a")
    message = "damaged|cannot be restored|a parameter group|the optimizer's state|position"
    check_refused(craft(path, facts=change), toy(w=7.0), message)


def linear_with(optimizer):
    model = nn.Linear(2, 1)
    return lambda: fl.TrainState.create(model, optimizer([*model.parameters()]))


@pytest.mark.parametrize(("given", "message"), [
    (toy, r"another model \(Linear\).*"
     "missing in the checkpoint: w; not in the model: bias, weight"),
    (lambda: linear_state(3), r"of another shape: weight: \(1, 2\) saved, \(1, 3\) here"),
    (lambda: linear_state(bias=False), "not in the model: bias.*strict=False"),
    (linear_with(torch.optim.Adam),
     r"has the state of SGD, and the optimizer is Adam.*only=\('model',\)"),
    (linear_with(lambda p: torch.optim.SGD(p[::-1], lr=0.1)),
     "the same parameters in other groups, or in another order"),
    (linear_with(lambda p: torch.optim.SGD(p[:1], lr=0.1)), "only in the checkpoint: bias"),
])  # fmt: skip
def test_another_model_or_optimizer_is_refused(tmp_path, given, message):
    check_refused(fl.save(linear_state(), tmp_path / "a"), given(), message)


def test_a_module_that_rejects_its_extra_state_is_left_unchanged(tmp_path):
    path = fl.save(sgd(Refuses(3.0)), tmp_path / "a")
    check_refused(path, sgd(Refuses(7.0)), "cannot be restored: ValueError: not mine")


def test_matching_tensors_of_another_model_are_restored(tmp_path, caplog):
    path = fl.save(linear_state(), tmp_path / "a")
    saved = load_file(path / "model.safetensors")
    state = fl.restore(path, linear_state(3), only=("model",), strict=False)
    assert torch.equal(state.model.bias, saved["bias"])
    assert "left unchanged: of another shape: weight" in caplog.text


@pytest.mark.parametrize(("call", "path", "message"), [
    (fl.restore, "nowhere", "there is no such folder"),
    (fl.restore, ".", r"it has no manifest\.json"),
    (fl.resume, "cut", r"it has no manifest\.json"),
    (fl.resume, "notes.txt", "is a file: resume expects a folder"),
    (lambda path, state: fl.save(state, path), ".", "is not a checkpoint: save to another path"),
])  # fmt: skip
def test_an_error_says_why_a_path_is_not_a_checkpoint(tmp_path, call, path, message):
    (tmp_path / "notes.txt").write_text("mine")
    (fl.save(toy(), tmp_path / "cut") / "manifest.json").unlink()
    with pytest.raises(fl.CheckpointError, match=message):
        call(tmp_path / path, toy())
    assert (tmp_path / "notes.txt").read_text() == "mine"


NUMBERED = lambda n: lambda made: made.update(format_version=n)


@pytest.mark.parametrize("n", [7, 99])
def test_a_newer_format_asks_for_a_newer_fnloop_and_is_not_skipped(tmp_path, n):
    train(tmp_path, toy(), 2)
    path = craft(tmp_path / "step-00000002", NUMBERED(n))
    message = rf"has format {n}, and this fnloop reads .* up to 6.*install a newer fnloop"
    check_refused(path, toy(), message)
    for call in (lambda: fl.resume(tmp_path, toy()), lambda: fl.latest(tmp_path)):
        with pytest.raises(fl.CheckpointError, match="install a newer fnloop"):
            call()


@pytest.mark.parametrize("name", ["../a/b.safetensors", "/etc/passwd", "x.pt", ".safetensors", ""])
def test_a_manifest_names_files_of_its_own_folder_only(tmp_path, name):
    path = fl.save(toy(), tmp_path / "a")
    craft(path, lambda made: made["files"].update({name: made["files"]["model.safetensors"]}))
    check_refused(path, toy(), "no file of a checkpoint is named")


def test_a_position_within_an_epoch_names_the_number_of_processes_that_saved_it(tmp_path):
    """Two processes have other shards than one, so a sharded loader cannot continue the epoch."""
    data, by_two = [ONE] * 4, lambda facts: facts.update(processes=2)
    half = fl.fit(step, toy(), data, steps=2, hooks=())
    restored = fl.restore(craft(fl.save(half, tmp_path / "a"), facts=by_two), toy())
    assert (half.saved_on, restored.saved_on) == (None, 2)
    for state in (fl.snapshot(restored), restored):
        with pytest.raises(ValueError, match="written in mid-epoch by 2 processes"):
            fl.fit(step, state, fl.sharded(data), hooks=())
    later = fl.fit(step, restored, data, steps=3, hooks=())
    assert later.saved_on == 2
    whole = fl.fit(step, later, data, epochs=1, hooks=())
    assert whole.saved_on is None  # at the end of an epoch there is no position within one
    assert fl.restore(craft(fl.save(whole, tmp_path / "b"), facts=by_two), toy()).saved_on is None


# --- the position of the training loader

POSITION = {
    "epoch": 0, "batch": 3, "shards": 1, "keeper": "Stream", "next": 7,
    "state": {"at": 1 << 70, "rng": torch.tensor([1, 2], dtype=torch.uint8), 3: (None, 0.5)},
}  # fmt: skip


def saved_position(tmp_path, **changes):
    state = attrs.evolve(toy(), batch=3, position={**POSITION, **changes})
    return fl.save(state, tmp_path / "a")


def test_the_position_is_kept_for_as_many_processes(tmp_path):
    path = saved_position(tmp_path)
    assert find_difference(fl.restore(path, toy()).position, POSITION, "") is None
    assert fl.restore(path, toy(), only=("model",)).position is None
    assert fl.restore(saved_position(tmp_path, shards=2), toy()).position is None


@pytest.mark.parametrize("name", ["epoch", "batch", "shards", "keeper", "next"])
def test_a_position_of_other_types_is_refused(name, tmp_path):
    wrong = lambda facts: facts["positions"][0].update({name: [1]})
    path = craft(saved_position(tmp_path), facts=wrong)
    check_refused(path, toy(), f"{name} of a position of the loader")


@pytest.mark.parametrize(
    ("only", "old", "expected"),
    [(None, False, [2.0, 4.0]), (None, True, [2.0, 3.0]), (("model",), False, [2.0])],
    ids=["all", "of an older version", "the model alone"],
)
def test_the_time_comes_with_the_counters(monkeypatch, tmp_path, only, old, expected):
    """Each update takes a second, and an epoch has two. The run is cut after three.

    A checkpoint of an older version knows the time of its newest record only.
    """
    clock = itertools.count(100.0)
    now = [next(clock)]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def slow(model, batch):
        now[0] = next(clock)
        return toy_loss(model, batch)

    make, stop = fl.pipeline()(slow), lambda state: attrs.evolve(state, stop="interrupted")
    cut = fl.when(lambda state: state.step == 3)(stop)
    path = fl.save(fl.fit(make, toy(), [ONE] * 2, epochs=2, hooks=(cut,)), tmp_path / "a")
    if old:
        craft(path, facts=lambda facts: facts.pop("seconds"))
    state = fl.fit(make, fl.restore(path, toy(), only=only), [ONE] * 2, hooks=())
    assert [record.seconds for record in state.history] == expected


# --- modules whose buffers get their sizes from data


BATCHES = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]
new = lambda kind: sgd(nn.Sequential(kind()), lr=0.1)


class Growing(nn.Module):
    """Its buffer keeps every input."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        if self.training:
            self.seen = torch.cat([self.seen, x])
        return (self.w * x).mean() * self.seen.numel()


class Resizing(Growing):
    """As fake quantization does, it resizes its buffer when that is loaded."""

    def _load_from_state_dict(self, state_dict, prefix, *others):
        if f"{prefix}seen" in state_dict:
            self.seen = torch.zeros_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *others)


def grown(kind):
    step = fl.pipeline()(lambda model, batch: model(batch))
    return fl.fit(step, new(kind), BATCHES, steps=2, hooks=())


def test_a_module_that_resizes_its_buffers_is_resumed(tmp_path):
    step = fl.pipeline()(lambda model, batch: model(batch))
    check_continues(tmp_path, lambda: new(Resizing), step, BATCHES, splits=[2])
    resumed = fl.restore(tmp_path / "half", new(Resizing))
    assert resumed.model[0].seen.tolist() == [1.0, 2.0]
    # Another optimizer, so that the restore fails
    model = nn.Sequential(Resizing())
    adam = fl.TrainState.create(model, torch.optim.Adam(model.parameters()), seed=0)
    check_refused(tmp_path / "half", adam, "the optimizer is Adam")
    assert model[0].seen.shape == (0,) and model[0].w.item() == 0.0


class Ignoring(Growing):
    """It takes no value for its buffer."""

    def _load_from_state_dict(self, state_dict, prefix, *others):
        state_dict.pop(f"{prefix}seen", None)
        super()._load_from_state_dict(state_dict, prefix, *others)


class Hooked(Resizing):
    """A hook, which knows the module itself, changes it when a copy is loaded."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda *_: self.seen.resize_(7))


class Renamed(nn.Module):
    """Its state_dict has names that no submodule has."""

    def __init__(self):
        super().__init__()
        self.inner = Growing()
        self.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(module, state_dict, prefix, *_):
        for key in [*state_dict]:
            state_dict[key.replace("inner.", "outer.")] = state_dict.pop(key)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("kind", [Ignoring, Hooked, Renamed])
def test_one_that_does_not_or_cannot_be_tried_is_refused_and_stays_as_it_was(kind, tmp_path):
    path, fresh = fl.save(grown(kind), tmp_path / "a"), new(kind)
    check_refused(path, fresh, r"another shape: .*seen: \(2,\) saved, \(0,\)")
    assert [b.shape for b in fresh.model.buffers()] == [(0,)]


class Replacing(nn.Module):
    """It makes another parameter when it is loaded, which the optimizer would not know."""

    def __init__(self, size=1):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return (self.w * x).mean()

    def _load_from_state_dict(self, state_dict, prefix, *others):
        self.w = nn.Parameter(torch.zeros_like(state_dict[f"{prefix}w"]))
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_a_parameter_of_another_shape_is_refused(tmp_path):
    path = fl.save(grown(lambda: Replacing(2)), tmp_path / "a")
    check_refused(path, new(Replacing), r"another shape: 0.w: \(2,\) saved, \(1,\) here")


def test_lazy_modules_are_to_be_called_first(tmp_path):
    lazy = lambda: new(lambda: nn.LazyLinear(1))

    def learn(state, steps):
        step = fl.pipeline()(lambda model, batch: model(batch).mean())
        return fl.fit(step, state, [torch.ones(2, 3)] * 4, steps=steps, hooks=())

    fl.save(learn(lazy(), 2), tmp_path / "a")
    fresh = lazy()
    with pytest.raises(fl.CheckpointError, match=r"0.weight, 0.bias are not known.*model\(x\)$"):
        fl.restore(tmp_path / "a", fresh)
    fresh.model(torch.ones(2, 3))
    resumed = learn(fl.restore(tmp_path / "a", fresh), 4)
    assert resumed.step == 4 and resumed.model[0].weight.shape == (1, 3)


class Shared(nn.Module):
    """Tensors ``a`` and ``b``, of which some memory may be the same."""

    def __init__(self, a, b, how="apart"):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a))
        self.b = self.a if how == "tied" else nn.Parameter(torch.tensor(b))
        if how == "a view":  # of the beginning of a
            self.b.data = self.a.detach()[: len(b)]

    def forward(self, x):
        return ((self.a.sum() + self.b.sum()) * x).mean()


def shared(*arguments, momentum=0.0):
    return sgd(Shared(*arguments), momentum=momentum)


@pytest.mark.parametrize(
    "settings", [{}, {"only": ("model",)}, {"only": ("model",), "strict": False}]
)
@pytest.mark.parametrize(
    ("how", "b"), [("tied", [1.0, 3.0]), ("tied", [1.0, -0.0]), ("a view", [2.0])]
)
def test_two_values_are_not_restored_into_one_tensor(tmp_path, settings, how, b):
    path = fl.save(shared([1.0, 0.0], b), tmp_path / "a")
    message = r"different values for a, b, which share memory in this Shared.*model\.b = nn\.Param"
    check_refused(path, shared([5.0, 5.0], [5.0] * len(b), how), message, **settings)


def test_one_value_is_restored_into_tied_tensors_and_into_others(tmp_path):
    tied = fl.fit(step, shared([1.0, 2.0], [], "tied"), [ONE] * 2, hooks=())  # 2 x 2 less
    fl.save(tied, tmp_path / "tied")
    fl.save(shared([1.0, 2.0], [1.0, 2.0]), tmp_path / "apart")
    fl.save(shared([1.0, 2.0], [1.0], "a view"), tmp_path / "view")
    assert fl.restore(tmp_path / "tied", shared([0.0, 0.0], [], "tied")).model.a.tolist() == [
        -3,
        -2,
    ]
    for name, how, value in (
        ("tied", "apart", [-3, -2]),
        ("apart", "tied", [1, 2]),
        ("apart", "apart", [1, 2]),
    ):
        state = fl.restore(tmp_path / name, shared([0.0, 0.0], [0.0, 0.0], how), only=("model",))
        assert state.model.a.tolist() == state.model.b.tolist() == value, (name, how)
    state = fl.restore(tmp_path / "view", shared([0.0, 0.0], [0.0], "a view"))
    assert (state.model.a.tolist(), state.model.b.tolist()) == ([1, 2], [1])


def test_a_buffer_that_is_a_parameter_too_has_one_value(tmp_path):
    def make(value, other):
        model = Toy(value)
        model.register_buffer("kept", torch.tensor(other) if other else model.w.detach())
        return sgd(model)

    path = fl.save(make(1.0, 2.0), tmp_path / "a")
    message = r"w, kept, which share.*model\.\w+ = .*model\.\w+\.detach\(\)\.clone\(\)"
    check_refused(path, make(3.0, None), message)
    check_refused(path, make(3.0, None), message, strict=False)
    same = fl.restore(fl.save(make(2.0, 2.0), tmp_path / "b"), make(3.0, None)).model
    assert (same.w.item(), same.kept.item()) == (2.0, 2.0)


def test_a_frozen_tied_tensor_is_not_among_what_was_trained(tmp_path):
    def make(value):
        model = nn.ModuleDict({"a": Toy(value), "tied": Toy(), "head": Toy(value)})
        model["tied"].w = model["a"].w
        model["a"].requires_grad_(False)
        return sgd(model)

    state = fl.restore(fl.save(make(1.0), tmp_path / "a"), make(7.0), only=("trained",))
    assert [state.model[name].w.item() for name in ("a", "tied", "head")] == [7.0, 7.0, 1.0]
