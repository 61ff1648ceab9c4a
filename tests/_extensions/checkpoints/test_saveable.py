"""What no checkpoint can hold is found before the first update, and by a save in the same words."""

import pathlib

import attrs
import pytest
import torch
from saved import ONE, sgd, step, stop_at
from torch import nn

import fnloop as fl
from fnloop._extensions.checkpoints import torch_compat
from fnloop._extensions.checkpoints.save import check_saveable
from fnloop.testing import Toy, assert_same, toy, toy_loss

PATH = pathlib.Path("a")


class Counted:
    """A loss function that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return toy_loss(model, batch)


class Extra(Toy):
    """A toy with extra state."""

    def __init__(self, extra=PATH):
        super().__init__()
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


class Buffered(Toy):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("kept", buffer)


def nothing(kind):
    """Return a tensor of a dtype that safetensors does not hold, if torch makes one."""
    return torch.zeros(2, dtype=torch.uint8).view(kind)


@fl.middleware("update", init=lambda state: {"where": [PATH]})
def keeps():
    return lambda step: step


def with_group(value):
    return sgd_groups([{"params": Toy().parameters(), "mine": value}])


def sgd_groups(groups):
    model = Toy()
    groups = [{**group, "params": [*model.parameters()]} for group in groups]
    return fl.TrainState.create(model, torch.optim.SGD(groups, lr=1.0), seed=0)


UNSAVEABLE = [
    (lambda: attrs.evolve(toy(), extra={"args": {"data": PATH}}), "extra.args.data is a PosixPath"),
    (lambda: sgd(Extra()), "model._extra_state is a PosixPath"),
    (lambda: sgd(Extra({"a": [PATH]})), "model._extra_state.a.0 is a PosixPath"),
    (lambda: with_group(b"a"), "param_groups.0.mine is a bytes"),
    (lambda: with_group(1j), "param_groups.0.mine is a complex"),
    (lambda: with_group((range(3),)), "param_groups.0.mine.0 is a range"),
    (lambda: with_group({"a": slice(2)}), "param_groups.0.mine.a is a slice"),
    (lambda: sgd(Buffered(torch.zeros(2).to_sparse())), "model.kept is a tensor (torch.sparse_coo"),
    (
        lambda: sgd(Buffered(nothing(torch.float4_e2m1fn_x2))),
        "model.kept is a tensor (torch.float4_e2m1fn_x2), which safetensors cannot hold",
    ),
]


@pytest.mark.parametrize(("make", "message"), UNSAVEABLE, ids=[m for _, m in UNSAVEABLE])
def test_it_is_found_before_the_first_update_and_by_save_in_the_same_words(tmp_path, make, message):
    loss_fn, texts = Counted(), []
    hook = fl.every(epochs=1)(fl.checkpoint(tmp_path / "run"))
    with pytest.raises(fl.CheckpointError) as at_once:
        fl.fit(fl.pipeline()(loss_fn), make(), [ONE], hooks=(hook,))
    assert loss_fn.calls == 0 and not (tmp_path / "run").exists()
    with pytest.raises(fl.CheckpointError) as by_save:
        fl.save(make(), tmp_path / "a")
    texts = [str(error.value) for error in (at_once, by_save)]
    assert texts[0] == texts[1] and message in texts[0]
    assert fl.fit(fl.pipeline()(loss_fn), make(), [ONE], hooks=()).step == 1  # it may train


def test_a_slot_of_a_middleware_is_found_before_the_first_update(tmp_path):
    loss_fn = Counted()
    with pytest.raises(fl.CheckpointError, match=r"slots\.keeps\.where\.0 is a PosixPath"):
        fl.fit(
            fl.pipeline(keeps())(loss_fn), toy(), [ONE], hooks=(fl.checkpoint(tmp_path / "run"),)
        )
    assert loss_fn.calls == 0


def test_only_the_parts_that_are_saved_are_tried(tmp_path):
    state = attrs.evolve(toy(), extra={"data": PATH})
    saves = fl.checkpoint(tmp_path, only=("model",))
    assert fl.fit(fl.pipeline(keeps())(toy_loss), state, [ONE], hooks=(saves,)).step == 1


def test_what_a_hook_sets_later_is_refused_at_the_save(tmp_path):
    @fl.every(steps=1)
    def note(state):
        return attrs.evolve(state, extra={"seen": [PATH]})

    hooks = note, fl.every(steps=1)(fl.checkpoint(tmp_path))
    with pytest.raises(fl.CheckpointError, match=r"extra\.seen\.0 is a PosixPath") as raised:
        fl.fit(step, toy(), [ONE] * 2, hooks=hooks)
    assert raised.value.state.step == 1


def test_the_trial_reads_and_copies_no_tensor():
    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func._schema.name)
            return func(*args, **kwargs or {})

    called: list[str] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    state = fl.TrainState.create(model, torch.optim.Adam(model.parameters()), seed=0)
    state = attrs.evolve(state, extra={"seen": torch.ones(3)})
    loss_fn = lambda model, batch: model(batch).mean()
    state = fl.fit(fl.pipeline(fl.ema(0.5))(loss_fn), state, [torch.randn(4, 8)], hooks=())
    with Watching():
        check_saveable(state)
    assert set(called) <= {"aten::detach", "aten::empty_like"}


def test_a_model_whose_sizes_the_first_batch_decides_is_tried_without_its_weights(tmp_path):
    model = nn.Sequential(nn.LazyLinear(1), nn.LazyBatchNorm1d())
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), 0.1), seed=0)
    trained = fl.pipeline()(lambda model, batch: model(batch).mean())
    with pytest.raises(fl.CheckpointError, match=r"model\.0\.weight is a tensor \(whose size"):
        fl.save(state, tmp_path / "a")
    state = fl.fit(trained, state, [torch.ones(3, 2)], hooks=(fl.checkpoint(tmp_path / "run"),))
    assert state.step == 1 and fl.latest(tmp_path / "run") is not None


def test_a_dry_run_reports_what_cannot_be_saved(tmp_path):
    for tried, state in (
        (fl.pipeline(keeps())(toy_loss), toy()),
        (fl.pipeline()(toy_loss), attrs.evolve(toy(), extra={"where": [PATH]})),
    ):
        report = fl.dry_run(tried, state, [ONE] * 3, (fl.checkpoint(tmp_path / "run"),))
        assert len(report.problems) == 2  # of the hook, and of a resume
        assert all("where.0 is a PosixPath" in str(problem) for problem in report.problems)


# --- tensors


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_tensor_of_any_dtype_is_restored_or_refused(tmp_path):
    refused = set()
    for name in dir(torch):
        kind = getattr(torch, name)
        if not isinstance(kind, torch.dtype):
            continue
        try:
            value = torch.ones(3 * kind.itemsize, dtype=torch.uint8).view(kind)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        make = lambda kind=kind: sgd(Buffered(torch.empty(3, dtype=kind)))
        state = sgd(Buffered(value))
        state = attrs.evolve(state, extra={"a": value})
        try:
            path = fl.save(state, tmp_path / "a")
        except fl.CheckpointError as error:
            assert str(kind) in str(error)
            refused.add(str(kind).removeprefix("torch."))
            continue
        found = fl.restore(path, make())
        bits = lambda tensor: tensor.contiguous().view(torch.uint8)
        for tensor in (found.model.kept, found.extra["a"]):
            assert tensor.dtype is kind and torch.equal(bits(tensor), bits(value))
    kept = {"complex32", "complex128", "bfloat16", "float8_e8m0fnu", "uint64", "bool"}
    assert "float4_e2m1fn_x2" in refused and not refused & kept


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_half_complex_numbers_are_restored_in_a_model_an_average_and_beside_a_model(tmp_path):
    numbers = torch.tensor([1 + 2j, -0.5j], dtype=torch.complex32)

    def new():
        model, beside = Buffered(numbers.clone()), nn.Parameter(numbers.clone())
        beside.requires_grad_(False)
        optimizer = torch.optim.SGD([*model.parameters(), beside], lr=1.0)
        return fl.TrainState.create(model, optimizer, seed=0)

    averaging = fl.pipeline(fl.ema(0.5))(toy_loss)
    state = fl.fit(averaging, new(), [ONE], hooks=())
    path = fl.save(state, tmp_path / "a")
    other = new()
    other.model.kept.zero_()
    other.optimizer.param_groups[0]["params"][1].data.zero_()
    found = fl.restore(path, other)
    beside = found.optimizer.param_groups[0]["params"][1]
    for tensor in (found.model.kept, beside):
        assert tensor.dtype is torch.complex32
        assert torch.view_as_real(tensor).tolist() == [[1, 2], [0, -0.5]]
    assert found.slots["ema"]["kept"].tolist() == [1 + 2j, -0.5j]


class Coded(torch.Tensor):
    """It only wraps another one, and does not say which, as ``__tensor_flatten__`` would."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = lambda x: x.codes.float() if isinstance(x, cls) else x
        if func in (torch.ops.aten.detach.default, *cls.copies):
            return cls(func(args[0].codes))
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].codes.copy_(plain(args[1]).half())
            return args[0]
        return func(*torch.utils._pytree.tree_map(plain, args), **(kwargs or {}))

    copies = (torch.ops.aten.clone.default,)


class NotCopied(Coded):
    """It cannot be copied either."""

    copies = ()


@pytest.mark.parametrize("kind", [Coded, NotCopied])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": x}])
def test_a_tensor_that_only_wraps_others_is_found_before_the_first_update(tmp_path, kind, wrap):
    class Keeping(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("m", wrap(kind(torch.zeros_like(p).half())))
            super().step(closure)

    model = Toy()
    state = fl.TrainState.create(model, Keeping(model.parameters(), lr=1.0), seed=0)
    with pytest.raises(fl.CheckpointError, match=rf"w\.m.* is a tensor \({kind.__name__}\)"):
        fl.fit(step, state, [ONE], hooks=(fl.checkpoint(tmp_path),))
    assert state.model.w.item() == 0


# --- buffers that change their shape


class Memory(Toy):
    """A buffer that grows with each batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0))

    def forward(self, x):
        if self.training:
            self.bank = torch.cat([self.bank, x.detach()])
        return super().forward(x) * self.bank.sum()


class Lazy(Toy):
    """A buffer that the first batch makes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", None)

    def forward(self, x):
        if self.bank is None:
            self.bank = x.detach() + 1
        return super().forward(x) * self.bank.sum()


class Registers(Toy):
    """The first batch registers a buffer."""

    def forward(self, x):
        if not hasattr(self, "bank"):
            self.register_buffer("bank", x.detach() + 1)
        return super().forward(x) * self.bank.sum()


DATA = [torch.full((2,), float(i)) for i in range(1, 5)]
inside = lambda kind: sgd(nn.Sequential(kind()), lr=0.125)
mean = lambda model, batch: model(batch).mean()


@pytest.mark.parametrize("kind", [Memory, Lazy, Registers])
@pytest.mark.parametrize("averaged", [False, True])
def test_a_run_whose_buffers_grow_is_resumed_bit_for_bit(tmp_path, kind, averaged):
    # An average cannot have what changes its shape, but what is made once it can.
    middleware = (fl.ema(0.5),) if averaged and kind is not Memory else ()
    stepped = fl.pipeline(*middleware)(mean)
    whole = fl.fit(stepped, inside(kind), DATA, epochs=2, hooks=())
    for stop in (1, 3, 6):  # each process resumes what the one before has saved
        hooks = (stop_at(stop), fl.checkpoint(tmp_path))
        state = attrs.evolve(fl.resume(tmp_path, inside(kind)), stop=None)
        fl.fit(stepped, state, DATA, epochs=2, hooks=hooks)
    state = attrs.evolve(fl.resume(tmp_path, inside(kind)), stop=None)
    assert_same(fl.fit(stepped, state, DATA, epochs=2, hooks=()), whole)


def test_a_restore_goes_back_to_a_smaller_buffer(tmp_path):
    run = lambda state, steps: fl.fit(
        fl.pipeline()(mean), state, DATA, steps=steps, hooks=(fl.checkpoint(tmp_path),)
    )
    run(run(inside(Memory), 1), 3)
    state = fl.resume(tmp_path, inside(Memory))
    back = fl.restore(tmp_path / "step-00000001", state)
    assert back.model[0].bank.tolist() == [1.0, 1.0]


def test_another_model_does_not_take_a_buffer_that_has_grown(tmp_path):
    class Other(Memory):
        def __init__(self):
            super().__init__()
            self.bank = torch.zeros(5)

    fl.fit(fl.pipeline()(mean), inside(Memory), DATA, hooks=(fl.checkpoint(tmp_path),))
    new = inside(Other)
    with pytest.raises(fl.CheckpointError, match=r"0\.bank: \(8,\) saved, \(5,\) here"):
        fl.resume(tmp_path, new)
    assert new.model[0].bank.shape == (5,)


@pytest.mark.parametrize("kind", [Memory, Lazy, Registers])
def test_a_restore_that_fails_takes_back_the_buffers_that_it_made(tmp_path, kind):
    fl.fit(fl.pipeline()(mean), inside(kind), DATA, hooks=(fl.checkpoint(tmp_path),))
    new = inside(kind)
    new.model.register_load_state_dict_post_hook(lambda *_: 1 / 0)
    before = [*vars(new.model[0])["_buffers"].items()]
    with pytest.raises(fl.CheckpointError, match="ZeroDivisionError"):
        fl.resume(tmp_path, new)
    assert [name for name, _ in before] == [*vars(new.model[0])["_buffers"]]
    assert [value for _, value in before] == [*vars(new.model[0])["_buffers"].values()]


def test_extra_state_may_be_a_tensor_of_any_shape(tmp_path):
    path = fl.save(sgd(Extra(torch.ones(3))), tmp_path / "a")
    assert fl.restore(path, sgd(Extra(torch.zeros(0)))).model.extra.tolist() == [1, 1, 1]
    path = fl.save(sgd(Extra(torch.ones(3, dtype=torch.int8))), tmp_path / "b")
    assert fl.restore(path, sgd(Extra(torch.zeros(0)))).model.extra.dtype is torch.int8
    path = fl.save(sgd(Extra({"a": 1})), tmp_path / "c")
    assert fl.restore(path, sgd(Extra(torch.zeros(0)))).model.extra == {"a": 1}


# --- a state_dict that leaves something out


class Hiding(nn.Module):
    """Its state_dict lacks what ``hidden`` names."""

    def __init__(self, hidden="body."):
        super().__init__()
        self.head, self.body, self.hidden = Toy(), Toy(), hidden

    def forward(self, x):
        return self.head(x) + self.body(x)

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        return {k: v for k, v in found.items() if not k.startswith(self.hidden)}


def test_a_state_dict_that_leaves_out_trained_weights_is_refused(tmp_path):
    message = r"the state_dict of Hiding leaves out body\.w, which is trained"
    state = sgd(Hiding())
    with pytest.raises(fl.CheckpointError, match=message):
        fl.fit(step, state, [ONE], hooks=(fl.checkpoint(tmp_path / "run"),))
    with pytest.raises(fl.CheckpointError, match=message):
        fl.save(state, tmp_path / "a")
    assert fl.save(state, tmp_path / "a", only=("model",)).exists()


def test_weights_that_are_not_trained_may_be_left_out(tmp_path):
    model = Hiding()
    model.body.w.requires_grad_(False)
    frozen = sgd(model)
    model = Hiding()
    alone = fl.TrainState.create(model, torch.optim.SGD(model.head.parameters(), 1.0), seed=0)
    for name, state in (("frozen", frozen), ("alone", alone)):
        state = fl.fit(step, state, [ONE], hooks=(fl.checkpoint(tmp_path / name),))
        assert state.model.head.w.item() == -1


class Renaming(Hiding):
    """Trained weights are there under another name: as a view, or a copy that it reads again."""

    def __init__(self, copies):
        super().__init__(hidden="never")
        self.register_state_dict_post_hook(self.rename)
        self.copies = copies
        if copies:
            self.register_load_state_dict_pre_hook(self.rename_back)

    @staticmethod
    def rename(module, state_dict, prefix, *_):
        value = state_dict.pop("body.w")
        state_dict["other.w"] = value + 1 if module.copies else value.view(())

    @staticmethod
    def rename_back(module, state_dict, *_):
        state_dict["body.w"] = state_dict.pop("other.w") - 1


@pytest.mark.parametrize("copies", [False, True])
def test_weights_under_another_name_are_there(tmp_path, copies):
    assert fl.save(sgd(Renaming(copies)), tmp_path / "a").exists()


def test_hooks_of_a_state_dict_are_noticed():
    optimizer, found = torch.optim.SGD([nn.Parameter(torch.zeros(()))]), []
    for register in ("register_step_pre_hook", "register_state_dict_post_hook"):
        found.append(torch_compat.has_state_dict_hooks(optimizer))
        getattr(optimizer, register)(lambda *_: None)
    assert [*found, torch_compat.has_state_dict_hooks(optimizer)] == [False, False, True]
