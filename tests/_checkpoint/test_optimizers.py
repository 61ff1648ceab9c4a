"""Every optimizer resumes bit for bit, or is refused by name before the first update."""

import copy
import enum
import functools
import importlib
import importlib.util
import json
import random
import sys
import threading
import types
from collections import deque

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fnloop as fl
from fnloop import schedules
from fnloop._checkpoint import files, optimizer_save, trial
from fnloop._checkpoint.compare import find_difference
from fnloop._checkpoint.optimizer import NamedOptimizer
from fnloop._checkpoint.optimizer_save import encode_optimizer
from fnloop._checkpoint.trial import check_resumable
from fnloop._checkpoint.trial_copy import copy_small
from fnloop._core.serialize import decode, encode
from fnloop.testing import Toy, assert_same, toy, toy_loss

ONE = torch.ones(1)
SGD, Adam = torch.optim.SGD, torch.optim.Adam
toy_step = fl.pipeline()(toy_loss)


# --- the optimizers of four packages


@functools.cache
def has_timm():
    """Let timm.optim be imported without the rest of timm, which needs torchvision, and return whether it is installed."""
    if (found := importlib.util.find_spec("timm")) is None:
        return False
    for package, folder in (("timm", ""), ("timm.optim", "/optim")):
        sys.modules[package] = stub = types.ModuleType(package)
        stub.__path__ = [f"{path}{folder}" for path in found.submodule_search_locations]
    return True


def timm(name):
    if not has_timm():
        pytest.skip("timm is not installed")
    module, _, name = name.partition(".")
    return getattr(importlib.import_module(f"timm.optim.{module}"), name)


def of(package, name):
    return timm(name) if package == "timm" else getattr(pytest.importorskip(package), name)


class Net(nn.Module):
    """An embedding, a convolution, matrices and vectors."""

    def __init__(self):
        super().__init__()
        self.words, self.conv = nn.Embedding(7, 6), nn.Conv1d(3, 4, 3, padding=1)
        self.first, self.second, self.last = (
            nn.Linear(6, 8),
            nn.Linear(8, 6, bias=False),
            nn.Linear(24, 5),
        )

    def forward(self, x):
        x = self.conv(self.words(x))
        return self.last(self.second(torch.tanh(self.first(x))).flatten(1))


GENERATOR = torch.Generator().manual_seed(3)
DATA = [
    (
        torch.randint(0, 7, (4, 3), generator=GENERATOR),
        torch.randint(0, 5, (4,), generator=GENERATOR),
    )
    for _ in range(6)
]


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


step = fl.pipeline(fl.schedule(schedules.exponential(0.9)))(loss_fn)
ADAPT_THEIR_RATE = {"pytorch_optimizer.ASGD"}  # a schedule refuses to overwrite what they have set


def plainly(package, name, **settings):
    return f"{package}.{name}", lambda net: of(package, name)(
        net.parameters(), **{"lr": 0.01, **settings}
    )


def matrices(package, name, **settings):
    return f"{package}.{name}", lambda net: of(package, name)(
        [p for p in net.parameters() if p.ndim == 2], **settings
    )


def muon(name):
    def make(net):
        others = {
            "params": [p for p in net.parameters() if p.ndim != 2],
            "use_muon": False,
            "lr": 0.01,
        }
        hidden = {
            "params": [p for p in net.parameters() if p.ndim == 2],
            "use_muon": True,
            "lr": 0.02,
        }
        return of("pytorch_optimizer", name)([hidden, others])

    return f"pytorch_optimizer.{name}", make


def around(package, name, inner=Adam, **settings):
    return f"{package}.{name}", lambda net: of(package, name)(
        inner(net.parameters(), lr=0.01), **settings
    )


def words(text):
    return text.split()


momentum = functools.partial(SGD, momentum=0.9)
TORCH = [
    *(
        plainly("torch.optim", name)
        for name in words("ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam Rprop")
    ),
    plainly("torch.optim", "RMSprop", momentum=0.9, centered=True),
    plainly("torch.optim", "SGD", momentum=0.9),
    plainly("torch.optim", "LBFGS", max_iter=3),
    matrices("torch.optim", "Muon"),
]
TIMM = words("""
    adabelief.AdaBelief adafactor.Adafactor adamp.AdamP adamw.AdamWLegacy adan.Adan adopt.Adopt kron.Kron lamb.Lamb
    laprop.LaProp lars.Lars lion.Lion madgrad.MADGRAD mars.Mars muon.Muon nadam.NAdamLegacy nadamw.NAdamW
    nvnovograd.NvNovoGrad radam.RAdamLegacy rmsprop_tf.RMSpropTF sgdp.SGDP sgdw.SGDW
""")
PYTORCH_OPTIMIZER = words("""
    ADOPT APOLLO ASGD BCOS CAME DASH FOCUS FTRL LARS MADGRAD MARS MSVAG PID PNM QHM RACS ROSE SCION SGDP SGDW SM3 SRMM
    SWATS TAM VSGD AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaFactor AdaGC AdaMax AdaMod AdaNorm AdaPNM AdaShift
    AdaSmooth AdaTAM Adai Adalite AdamC AdamG AdamP AdamS AdamWSN Adan AggMo Aida Alice Amos Ano ApolloDQN AvaGrad
    DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD DiffGrad DualAdam EXAdam EmoFact EmoLynx EmoNavi FAdam Fira
    FlashAdamW Fromage GaLore Grams Gravity GrokFastAdamW Kate Kron LaProp Lamb Lion Nero NovoGrad PAdam Prodigy QHAdam
    RAdam Ranger SCIONLight SGDSaI SPlus SaRA ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD Shampoo SignSGD
    SimplifiedAdEMAMix StableAdamW Tiger Yogi
""")
SCHEDULEFREE = words("""
    AdamWScheduleFree AdamWScheduleFreeReference AdamWScheduleFreePaper RAdamScheduleFree SGDScheduleFree
    SGDScheduleFreeReference AdamWScheduleFreeClosure RAdamScheduleFreeClosure SGDScheduleFreeClosure
""")
OPTIMIZERS = dict(
    [
        *TORCH,
        *(plainly("timm", name) for name in TIMM),
        plainly("timm", "adafactor_bv.AdafactorBigVision", momentum=0.9),
        around("timm", "lookahead.Lookahead", momentum, k=2),
        *(plainly("pytorch_optimizer", name) for name in PYTORCH_OPTIMIZER),
        plainly("pytorch_optimizer", "SOAP", precondition_frequency=2),
        plainly("pytorch_optimizer", "SPAM", density=0.5, update_proj_gap=3),
        plainly("pytorch_optimizer", "StableSPAM", update_proj_gap=3),
        plainly("pytorch_optimizer", "Ranger21", num_iterations=40),
        ("pytorch_optimizer.AdamMini", lambda net: of("pytorch_optimizer", "AdamMini")(net)),
        matrices("pytorch_optimizer", "SpectralSphere"),
        *map(muon, ("Muon", "AdaMuon", "AdaGO", "NorMuon", "MuonClip")),
        *(
            around("pytorch_optimizer", name)
            for name in ("TRAC", "OrthoGrad", "PCGrad", "Magma", "ScheduleFreeWrapper")
        ),
        around("pytorch_optimizer", "Lookahead", momentum, k=2, pullback_momentum="pullback"),
        *(plainly("schedulefree", name) for name in SCHEDULEFREE),
    ]
)
REFUSED = {  # they keep objects in their state, which torch pickles
    "Conda": lambda net: of("pytorch_optimizer", "Conda")(net.parameters()),
    "GaLore": lambda net: of("pytorch_optimizer", "GaLore")(
        [
            {
                "params": [net.first.weight],
                "rank": 2,
                "update_proj_gap": 2,
                "scale": 1.0,
                "projection_type": "std",
            }
        ]
    ),
    "ScalableShampoo": lambda net: of("pytorch_optimizer", "ScalableShampoo")(net.parameters()),
}


def new_state(make, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    net = Net().to(dtype)
    optimizer = make(net)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return fl.TrainState.create(net, optimizer, seed=0)


def resumes(folder, new, step=step, data=DATA, splits=(5,)):
    """Assert that a run that is saved and restored ends as one that is not, in weights and in the optimizer's state_dict."""
    check_resumable(new())
    whole = fl.fit(step, new(), data, epochs=2, hooks=())
    for split in splits:
        half = fl.fit(step, new(), data, steps=split, hooks=())
        resumed = fl.restore(
            fl.save(half, folder / "half"), new(1)
        )  # a new model begins with other weights
        assert_same(resumed, half)
        assert_same(fl.fit(step, resumed, data, epochs=2, hooks=()), whole)


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, caplog, name):
    scheduled = fl.pipeline()(loss_fn) if name in ADAPT_THEIR_RATE else step
    resumes(tmp_path, lambda seed=0: new_state(OPTIMIZERS[name], seed), scheduled)
    assert "could not try whether" not in caplog.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["timm.adafactor.Adafactor", "pytorch_optimizer.Kron", "pytorch_optimizer.QHAdam"]
)
def test_state_that_load_state_dict_casts_to_bfloat16_keeps_its_dtype(tmp_path, name):
    resumes(tmp_path, lambda seed=0: new_state(OPTIMIZERS[name], seed, torch.bfloat16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_those_that_cannot_be_resumed_are_refused_before_the_first_update(tmp_path, name):
    state = new_state(REFUSED[name])
    before = copy.deepcopy(state.model.state_dict())
    with pytest.raises(
        fl.CheckpointError,
        match=rf"a run with {name} cannot be resumed bit for bit: .* an? \w+.*leave out",
    ):
        fl.fit(step, state, DATA, hooks=(fl.every(epochs=1)(fl.checkpoint(tmp_path)),))
    assert all(torch.equal(value, before[key]) for key, value in state.model.state_dict().items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_save_by_hand_says_so_and_keeps_the_weights(tmp_path, name, caplog):
    state = new_state(REFUSED[name])
    path = fl.save(state, tmp_path / "a")
    assert "save: a run with" in caplog.text and "cannot be resumed bit for bit" in caplog.text
    restored = fl.restore(path, new_state(REFUSED[name], 1), only=("model",))
    assert all(
        torch.equal(a, b)
        for a, b in zip(restored.model.parameters(), state.model.parameters(), strict=True)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "name", ["schedulefree.AdamWScheduleFree", "pytorch_optimizer.ScheduleFreeWrapper"]
)
def test_the_mode_of_an_optimizer_without_a_schedule_is_kept(tmp_path, name, mode):
    whole = fl.fit(step, new_state(OPTIMIZERS[name]), DATA, steps=4, hooks=())
    getattr(whole.optimizer, mode)()
    resumed = fl.restore(fl.save(whole, tmp_path / "a"), new_state(OPTIMIZERS[name], 1))
    assert_same(resumed, whole)
    for state in (whole, resumed):
        state.optimizer.train()
    assert_same(resumed, whole)
    assert_same(*(fl.fit(step, state, DATA, steps=8, hooks=()) for state in (resumed, whole)))


# --- what optimizers do, one by one. The model has one weight of 0, and each update of SGD(lr=1) subtracts 1 from it


def toy_state(make, w=0.0):
    model = Toy(w)
    return fl.TrainState.create(model, make(model.parameters()), seed=0)


def toy_resumes(folder, make):
    resumes(
        folder,
        lambda seed=0: toy_state(make, w=7.0 * seed),
        toy_step,
        [ONE] * 6,
        splits=range(1, 12),
    )


class Slow(torch.optim.Optimizer):
    """Half way back to where it was two updates ago, every second update: a wrapper whose own ``state`` is empty."""

    def __init__(self, params):
        self.inner, self.state = SGD(params, lr=1.0, momentum=0.5), {}
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        for group in self.param_groups:
            group["updates"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for group in self.param_groups:
            group["updates"] += 1
            for p in group["params"]:
                slow = self.inner.state[p].setdefault("slow", torch.zeros_like(p))
                if group["updates"] % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, saved):
        self.inner.load_state_dict(saved)
        self.param_groups = self.inner.param_groups


class Forgetful(Slow):
    """As the former, but it does not look for the groups that loading has made."""

    def load_state_dict(self, saved):
        self.inner.load_state_dict(saved)


class Both(torch.optim.Optimizer):
    """Two optimizers of the same parameters; its ``state`` shows the first one's only."""

    def __init__(self, params):
        params = list(params)
        self.first, self.second = SGD(params, lr=1.0, momentum=0.5), Adam(params, lr=0.5)
        super().__init__(params, {})
        self.param_groups = [*self.first.param_groups]

    state = property(lambda self: self.first.state, lambda self, value: None)

    def step(self, closure=None):
        self.first.step()
        self.second.step()


class BothSaved(Both):
    def state_dict(self):
        return {"first": self.first.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, saved):
        self.first.load_state_dict(saved["first"])
        self.second.load_state_dict(saved["second"])
        self.param_groups = [*self.first.param_groups]


class Counting(SGD):
    """Each update is as large as the number of updates before it: a number of its own."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.updates = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = float(self.updates)
        super().step()
        self.updates += 1


class CountingSaved(Counting):
    def state_dict(self):
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.updates = saved["updates"]


class Averaging(SGD):
    """Keeps something for all parameters together under a name."""

    def step(self, closure=None):
        super().step()
        shared = self.state.setdefault("shared", {"total": 0.0, "recent": deque(maxlen=2)})
        shared["recent"].append(1.0)
        shared["total"] += len(shared["recent"])
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= shared["total"]


class Tensors(SGD):
    """Counts in a tensor of the group, as timm's lamb does, which a new one does not have yet."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = torch.zeros(())
            group["step"].add_(1)
            for p in group["params"]:
                p.data -= group["step"]


class Typed(SGD):
    """Has a dtype and functions in its groups."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        for group in self.param_groups:
            group.update(momentum_dtype=torch.float16, shape_of=max, scale=lambda x: 2 * x)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["scale"](p.grad.to(group["momentum_dtype"]))


class Objects(SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = object()


class Modules(Objects):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = nn.Linear(1, 1)  # which has a state_dict


@pytest.mark.parametrize(
    "make", [Slow, Forgetful, BothSaved, CountingSaved, Averaging, Tensors, Typed]
)
def test_what_an_optimizer_keeps_comes_back(tmp_path, make):
    toy_resumes(tmp_path, make)


def test_numbers_by_hand(tmp_path):
    state = fl.fit(toy_step, toy_state(CountingSaved), [ONE] * 4, hooks=())
    assert state.model.w.item() == -(0 + 1 + 2 + 3)
    state = fl.restore(fl.save(state, tmp_path / "a"), toy_state(CountingSaved))
    state = fl.fit(toy_step, state, [ONE] * 2, epochs=2, hooks=())
    assert state.model.w.item() == -(0 + 1 + 2 + 3 + 4 + 5)
    state = fl.fit(
        toy_step, toy_state(Tensors), [ONE] * 3, hooks=()
    )  # each subtracts 0.001, and the count
    state = fl.restore(fl.save(state, tmp_path / "a"), toy_state(Tensors))
    assert isinstance(state.optimizer.param_groups[0]["step"], torch.Tensor)
    state = fl.fit(toy_step, state, [ONE] * 2, epochs=2, hooks=())
    assert round(state.model.w.item()) == -(1 + 2 + 3 + 4 + 5)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (
            Counting,
            "its attribute updates is not in its state_dict: it was 3, and is 0 after a restore",
        ),
        (Both, "Both.load_state_dict does not restore what its state_dict returned"),
        (Objects, "w.seen is a object, which a checkpoint cannot hold"),
        (Modules, "w.seen is a Linear, an object, which could not be reconstructed"),
    ],
)
def test_what_is_lost_is_found_before_the_first_update(tmp_path, make, fault):
    state = toy_state(make)
    with pytest.raises(
        fl.CheckpointError,
        match=f"a run with {make.__name__} cannot be resumed bit for bit: .*{fault}",
    ):
        fl.fit(toy_step, state, [ONE] * 3, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path)),))
    assert (
        state.model.w.item() == 0.0 and not state.optimizer.state and not list(tmp_path.iterdir())
    )
    assert (
        fl.fit(toy_step, toy_state(make), [ONE] * 3, hooks=()).step == 3
    )  # without the hook it is nobody's business


def test_a_period_that_begins_anew_is_found():
    class Periodic(SGD):
        """Keeps its count where no number is to be seen, and uses it at every tenth update."""

        def step(self, closure=None):
            super().step()
            self.updates = [*getattr(self, "updates", ()), 1]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data *= 0 if len(self.updates) % 10 == 0 else 1

    with pytest.raises(
        fl.CheckpointError, match=r"a few updates after a restore, weights.w differs"
    ):
        check_resumable(toy_state(Periodic))


def test_a_schedule_that_does_not_reach_the_restored_groups_is_found():
    class Hidden(Slow):
        """Its inner optimizer is not to be found, so its groups are other ones after loading."""

        def __init__(self, params):
            super().__init__(params)
            inner, self.inner = self.inner, None
            self.reach = types.SimpleNamespace(inner=inner)

        def step(self, closure=None):
            self.reach.inner.step()

        def state_dict(self):
            return self.reach.inner.state_dict()

        def load_state_dict(self, saved):
            self.reach.inner.load_state_dict(saved)

    with pytest.raises(fl.CheckpointError, match=r"after a restore, weights.w differs"):
        check_resumable(toy_state(Hidden))


def test_the_trial_leaves_everything_as_it_was():
    calls = []
    state = fl.fit(toy_step, toy_state(Slow), [ONE] * 3, hooks=())
    state.model.w.grad = torch.full_like(state.model.w, 7.0)
    for optimizer in (state.optimizer, state.optimizer.inner):
        optimizer._optimizer_step_pre_hooks[0] = optimizer._optimizer_step_post_hooks[0] = (
            lambda *args: calls.append(args)
        )
    vars(state.optimizer)["step"] = lambda closure=None: calls.append(
        "step"
    )  # as a schedule patches it
    before, held = (
        copy.deepcopy((state.model.state_dict(), state.optimizer.state_dict())),
        id(state.optimizer.param_groups[0]),
    )
    drawn = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    check_resumable(state)
    assert (
        not calls
        and state.model.w.grad.item() == 7.0
        and id(state.optimizer.param_groups[0]) == held
    )
    assert (
        find_difference(before, (state.model.state_dict(), state.optimizer.state_dict()), "")
        is None
    )
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(drawn[0], after[0]) and drawn[1:] == after[1:]


def test_the_trial_copies_little():
    class Mine(Adam):
        pass

    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(20)))
    state = fl.TrainState.create(model, Mine(model.parameters()), seed=0)
    state = fl.fit(
        fl.pipeline()(lambda model, x: model(x).mean()), state, [torch.ones(2, 300)], hooks=()
    )
    twin = copy_small(NamedOptimizer.of_state(state), torch.Generator()).optimizer
    assert [tuple(p.shape) for p in twin.param_groups[0]["params"]] == [
        (4, 4),
        (4,),
    ]  # one of each kind
    assert sorted(tuple(t.shape) for held in twin.state.values() for t in held.values()) == [
        (),
        (),
        (4,),
        (4,),
        (4, 4),
        (4, 4),
    ]
    check_resumable(state)


class Every(SGD):
    """Halves the weights at every 50th update, by a count that derived classes keep somewhere."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)

    def step(self, closure=None):
        super().step()
        if self.count() % 50 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data /= 2


class TensorCounter(Every):
    def __init__(self, params):
        super().__init__(params)
        self.k = torch.zeros(())

    def count(self):
        return self.k.add_(1)


class DictCounter(Every):
    def __init__(self, params):
        super().__init__(params)
        self.info = {"name": "k", "k": 0}

    def count(self):
        self.info["k"] += 1
        return self.info["k"]


class Grouped(Every):
    def __init__(self, params):
        super().__init__(params)
        self.seen = []

    def count(self):
        self.seen.append("update")
        return len(self.seen)


class DefaultsCounter(Every):
    def __init__(self, params):
        super().__init__(params)
        self.defaults["k"] = 0

    def count(self):
        self.defaults["k"] += 1
        return self.defaults["k"]


class Nested(Every):
    def __init__(self, params):
        super().__init__(params)
        self.info = ({"of": [0, 7]},)

    def count(self):
        self.info[0]["of"][0] += 1
        return self.info[0]["of"][0]


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (TensorCounter, r"k is not in its state_dict: it was 3\.0, and is 0\.0"),
        (DictCounter, r"info\.k is not in its state_dict: it was 3, and is 0"),
        (DefaultsCounter, r"defaults\.k is not in its state_dict: it was 3, and is 0"),
        (Nested, r"info\.0\.of\.0 is not in its state_dict: it was 3, and is 0"),
    ],
)
def test_a_count_that_is_lost_is_found_long_before_it_matters(make, fault):
    with pytest.raises(
        fl.CheckpointError,
        match=f"a run with {make.__name__} cannot .*: its attribute {fault} after a restore",
    ):
        check_resumable(toy_state(make))


def test_a_length_that_stays_behind_is_a_count_and_that_of_a_cache_is_not():
    class Late(Every):
        """Makes its count at the first update."""

        def count(self):
            self.k = getattr(self, "k", 0) + 1
            return self.k

    class Cached(Every):
        def __init__(self, params):
            super().__init__(params)
            self.shapes = {}

        def count(self):
            return self.shapes.setdefault("w", 1)

    check_resumable(toy_state(Cached))
    for make, path, was, now in (
        (Grouped, "seen", "of length 15", "of length 12"),
        (Late, "k", 15, 12),
    ):
        fault = f"its attribute {path} is not in its state_dict: it is {was} in an uninterrupted run, and {now} in a resumed one"
        with pytest.raises(fl.CheckpointError, match=fault):
            check_resumable(toy_state(make))


def test_a_flag_is_not_a_count():
    class Told(SGD):
        told, done, first = False, torch.tensor(False), None

        def step(self, closure=None):
            super().step()
            self.told, self.done = True, torch.tensor(True)

    check_resumable(toy_state(Told))


class HeadsLock(SGD):
    """Its momentum is in objects, and beside it are things that cannot be copied."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.lock, self.file, self.module = threading.Lock(), sys.stdout, types
        self.heads = [
            types.SimpleNamespace(m=torch.zeros_like(p))
            for group in self.param_groups
            for p in group["params"]
        ]

    @torch.no_grad()
    def step(self, closure=None):
        with self.lock:
            print("an update", file=self.file)
            for head, p in zip(self.heads, self.param_groups[0]["params"], strict=True):
                head.m.mul_(0.5).add_(p.grad)
                p.sub_(head.m)


class Flat(SGD):
    """Its momentum is in a tensor of as many elements as all parameters have."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.m = torch.zeros(sum(p.numel() for p in self.param_groups[0]["params"]))

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        self.m.mul_(0.5).add_(torch.cat([p.grad.flatten() for p in params]))
        for p, m in zip(params, self.m.split([p.numel() for p in params]), strict=True):
            p.sub_(m.view_as(p))


@pytest.mark.parametrize(
    "layers", [1, 20]
)  # of more than 8 parameters, a tiny copy has one of each kind
@pytest.mark.parametrize("make", [HeadsLock, Flat])
def test_momentum_that_is_lost_is_found_in_copies_of_full_size(capsys, make, layers):
    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(layers)))
    state = fl.TrainState.create(model, make(model.parameters()), seed=0)
    with pytest.raises(
        fl.CheckpointError,
        match=f"a run with {make.__name__} cannot .* a few updates after .*weight differs",
    ):
        check_resumable(state)
    assert not capsys.readouterr().out  # the trial writes to no file


def test_a_large_optimizer_is_not_copied_whole(caplog, monkeypatch):
    monkeypatch.setattr(trial, "MANY", 89)
    model = nn.Linear(9, 9)
    check_resumable(fl.TrainState.create(model, Flat(model.parameters()), seed=0))
    assert (
        "could not try whether a run with Flat resumes bit for bit (RuntimeError: " in caplog.text
    )


class Closure(SGD):
    """Its momentum is in a variable of a function."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        momentum = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

        def update():
            for m, p in zip(momentum, self.param_groups[0]["params"], strict=True):
                p.data -= m.mul_(0.5).add_(p.grad)

        self.update = update

    def step(self, closure=None):
        self.update()


def around_step(params):
    kept = {}

    class AroundStep(SGD):
        """Its momentum is in a variable around the class, and is not there yet."""

        def step(self, closure=None):
            for i, p in enumerate(self.param_groups[0]["params"]):
                kept[i] = kept.get(i, 0) / 2 + p.grad
                p.data -= kept[i]

    AroundStep.kept = staticmethod(lambda: kept)
    return AroundStep(params, lr=1.0)


@pytest.mark.parametrize(("make", "name"), [(Closure, "Closure"), (around_step, "AroundStep")])
def test_what_could_not_be_tried_is_said_once(caplog, make, name):
    first = toy_state(make)
    check_resumable(first)
    check_resumable(first)
    function = "update" if make is Closure else "step"
    assert caplog.messages == [
        f"could not try whether a run with {name} resumes bit for bit (NotImplementedError: its function {function} keeps "
        f"tensors, or might, in variables around it): compare a resumed run with an uninterrupted one"
    ]
    assert make is Closure or not first.optimizer.kept()  # the trial has left it alone


def test_other_processes_do_not_repeat_the_warning(caplog):
    class Elsewhere(Closure):
        pass

    state = toy_state(Elsewhere)
    check_resumable(attrs.evolve(state, backend=attrs.evolve(state.backend, rank=1)))
    assert not caplog.messages


def test_one_that_evaluates_the_loss_itself_is_tried_in_silence(caplog):
    class Evaluates(SGD):
        def step(self, closure):
            closure()
            super().step()

    check_resumable(toy_state(Evaluates))
    assert not caplog.messages


def test_an_update_that_fails_in_the_trial_is_said(caplog):
    class Wants(SGD):
        def step(self, closure=None):
            if closure is None:
                raise RuntimeError("a closure is needed")

    check_resumable(toy_state(Wants))
    assert "a run with Wants resumes bit for bit (RuntimeError: a closure is needed)" in caplog.text


def test_a_function_that_might_reach_the_real_parameters_is_not_tried():
    class Closed(SGD):
        def __init__(self, params):
            params = list(params)
            super().__init__(params, lr=1.0)
            self.zero = lambda: [p.data.zero_() for p in params]

        def step(self, closure=None):
            self.zero()

    state = toy_state(Closed, w=7.0)
    check_resumable(state)
    assert state.model.w.item() == 7.0


def test_hooks_that_add_to_a_state_dict_take_part(tmp_path):
    def new(tag, lr=1.0):
        state = toy_state(lambda params: SGD(params, lr=lr, momentum=0.5))
        tags = [tag]
        state.optimizer.register_state_dict_post_hook(
            lambda optimizer, saved: {**saved, "tag": tags[0]}
        )
        state.optimizer.register_load_state_dict_pre_hook(
            lambda optimizer, saved: tags.__setitem__(0, saved["tag"])
        )
        return state, tags

    half = fl.fit(toy_step, new("a")[0], [ONE] * 2, hooks=())
    state, tags = new("b", lr=0.5)
    check_resumable(state)
    restored = fl.restore(fl.save(half, tmp_path / "a"), state)
    assert tags == ["a"] and restored.optimizer.param_groups[0]["lr"] == 1.0
    assert_same(restored, half)


# --- how it is stored


def facts_of(path):
    return json.loads((path / "state.json").read_text())["optimizer"]


def test_a_person_can_read_the_settings_of_an_optimizer(tmp_path):
    state = toy_state(Typed)
    state.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    facts = facts_of(fl.save(state, tmp_path / "a"))["param_groups"][0]
    assert facts["lr"] == {"$scalar": 0.1, "dtype": "float32"}
    assert facts["momentum_dtype"] == {"$dtype": "float16"} and facts["shape_of"] == {
        "$setting": "max"
    }


@pytest.mark.parametrize("kind", [SGD, CountingSaved])
def test_a_learning_rate_may_be_a_number_or_a_tensor(tmp_path, kind):
    def new(lr):
        state = toy_state(
            lambda params: (
                kind(params) if kind is CountingSaved else kind(params, lr=0.0, foreach=False)
            )
        )
        state.optimizer.param_groups[0]["lr"] = lr
        return state

    for saved, here in (
        (0.1, torch.tensor(0.5)),
        (torch.tensor(0.1), 0.5),
        (torch.tensor(0.1), torch.tensor(0.5)),
    ):
        restored = fl.restore(
            fl.save(new(saved), tmp_path / "a"), new(here)
        ).optimizer.param_groups[0]["lr"]
        assert type(restored) is type(here) and float(restored) == pytest.approx(0.1)
        assert restored is here or isinstance(here, float)


def test_execution_settings_are_the_new_optimizers(tmp_path):
    class Mine(Adam):
        def load_state_dict(self, saved):
            super().load_state_dict(saved)

    path = fl.save(toy_state(lambda params: Mine(params, foreach=True)), tmp_path / "a")
    restored = fl.restore(path, toy_state(lambda params: Mine(params, foreach=False)))
    assert restored.optimizer.param_groups[0]["foreach"] is False


def test_a_function_that_the_new_optimizer_does_not_have_is_named(tmp_path):
    path, state = fl.save(toy_state(Typed), tmp_path / "a"), toy_state(Typed, w=7.0)
    del state.optimizer.param_groups[0]["shape_of"]
    with pytest.raises(
        fl.CheckpointError,
        match="shape_of of a parameter group was max, which a checkpoint can only name",
    ):
        fl.restore(path, state)
    assert state.model.w.item() == 7.0


STRIDED = {
    "column-major": torch.arange(12.0).view(3, 4).t(),
    "channels_last": torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "a part": torch.arange(24.0).view(4, 6)[:, :3],
    "expanded": torch.ones(3).expand(2, 3),
    "a number": torch.tensor(2.0),
}


@pytest.mark.parametrize("tensor", STRIDED.values(), ids=STRIDED)
def test_dense_strides_survive(tmp_path, tensor):
    restored = fl.restore(
        fl.save(attrs.evolve(toy(), extra={"t": tensor}), tmp_path / "a"), toy()
    ).extra["t"]
    assert torch.equal(restored, tensor)
    assert restored.stride() == torch.empty_like(tensor).stride()  # torch's own rule


@pytest.mark.parametrize(
    "value",
    [
        torch.float16,
        deque([1.0, torch.ones(1)], maxlen=3),
        torch.tensor([1 + 2j]).to(torch.complex128),
    ],
)
def test_more_plain_data_survives(value):
    tensors = {}
    encoded = json.loads(json.dumps(encode(value, tensors, "x")))
    back = decode(encoded, {name: tensor.contiguous() for name, tensor in tensors.items()})
    assert find_difference(value, back, "") is None and getattr(back, "maxlen", 3) == 3


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    "value", [Level.LOW, TwoTensor(torch.ones(1), torch.ones(1))], ids=["enum", "compressed"]
)
def test_what_would_come_back_as_something_else_is_refused(value):
    with pytest.raises(TypeError, match=r"x\.a is a (Level|tensor \(TwoTensor\))"):
        encode({"a": value}, {}, "x")


@pytest.mark.parametrize("strides", [[1, 100], [0, 0], [1 << 40, 1], [-1, 1], [1]])
def test_strides_of_no_dense_tensor_are_refused(strides):
    with pytest.raises((ValueError, RuntimeError)):
        decode({"$tensor": "x", "strides": strides}, {"x": torch.ones(3, 4)})


def test_complex128_is_kept_in_the_model_the_loss_and_the_optimizer(tmp_path):
    def new():
        model = nn.Module()
        model.z = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
        model.register_buffer("turn", torch.tensor([0.5j], dtype=torch.complex128))
        own = nn.Parameter(torch.tensor([2j], dtype=torch.complex128))
        state = fl.TrainState.create(model, Adam([model.z, own], lr=0.1), seed=0)
        return state, fl.pipeline()(
            lambda model, batch: (model.z * own * model.turn).abs().sum() * batch
        )

    def fit(pair, **kwargs):
        return fl.fit(pair[1], pair[0], [torch.tensor(1.0)] * 4, hooks=(), **kwargs)

    whole, half = fit(new()), fit(new(), steps=2)
    pair = new()
    resumed = fl.restore(fl.save(half, tmp_path / "a"), pair[0])
    assert_same(fit((resumed, pair[1]), epochs=1), whole)
    assert torch.equal(
        resumed.optimizer.param_groups[0]["params"][1], whole.optimizer.param_groups[0]["params"][1]
    )
    assert resumed.model.z.dtype is torch.complex128


# --- what does not fit


def crafted(path, change):
    """Change the optimizer's file of a checkpoint, and write the checksums that go with it."""
    tensors = load_file(path / "optimizer.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "optimizer.safetensors")
    made = json.loads((path / "manifest.json").read_text())
    del made["check"]
    file = path / "optimizer.safetensors"
    made["files"][file.name] = {
        "bytes": file.stat().st_size,
        "sha256": files.checksum_of_file(file),
    }
    (path / "manifest.json").write_text(
        json.dumps({**made, "check": files.checksum_of_manifest(made)})
    )
    return path


CRAFTED = {
    "longer": ("Adam", "exp_avg", lambda t: torch.ones(t.numel() + 1)),
    "flat": ("Adam", "exp_avg_sq", lambda t: t.flatten()),
    "whole numbers": ("Adam", "exp_avg", lambda t: t.long()),
    "a vector of steps": ("Adam", "step", lambda t: torch.ones(3)),
    "factored otherwise": ("Adafactor", "row_var", lambda t: torch.ones(7, 1)),
    "history": ("LBFGS", "prev_flat_grad", lambda t: torch.ones(9)),
}


@pytest.mark.parametrize(("name", "key", "change"), CRAFTED.values(), ids=CRAFTED)
def test_state_that_cannot_be_an_optimizers_of_torch_is_refused(tmp_path, name, key, change):
    def new():
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False)
        return fl.TrainState.create(model, getattr(torch.optim, name)(model.parameters()), seed=0)

    make = fl.pipeline()(lambda model, batch: model(batch).square().sum())
    path = fl.save(fl.fit(make, new(), [torch.ones(1, 3)] * 2, hooks=()), tmp_path / "a")
    fl.restore(path, new())  # it is a good one
    state = new()
    before = fl.snapshot(state)
    with pytest.raises(
        fl.CheckpointError,
        match=rf"{key} of weight in the optimizer's state is .* cannot continue with",
    ):
        fl.restore(
            crafted(
                path,
                lambda tensors: tensors.update({f"weight.{key}": change(tensors[f"weight.{key}"])}),
            ),
            state,
        )
    assert_same(state, before)


@pytest.mark.parametrize(
    "fails", [lambda self, saved: 1 / 0, lambda self, saved: setattr(self, "updates", -1)]
)
def test_an_optimizer_that_does_not_load_is_put_back(tmp_path, fails):
    class Breaks(CountingSaved):
        def load_state_dict(self, saved):
            super().load_state_dict(saved)
            if saved["updates"] == 4:
                for group in self.param_groups:
                    group["lr"] = 99.0
                fails(self, saved)

    path = fl.save(fl.fit(toy_step, toy_state(Breaks), [ONE] * 4, hooks=()), tmp_path / "a")
    state = fl.fit(toy_step, toy_state(Breaks, w=7.0), [ONE] * 2, hooks=())
    before, groups = (
        copy.deepcopy((state.model.w, state.optimizer.state_dict())),
        state.optimizer.param_groups,
    )
    with pytest.raises(
        fl.CheckpointError,
        match=r"Breaks.load_state_dict does not (accept|restore) what its state_dict returned",
    ):
        fl.restore(path, state)
    assert find_difference(before, (state.model.w, state.optimizer.state_dict()), "") is None
    assert state.optimizer.param_groups is groups and state.optimizer.updates == 2


def test_a_sharded_model_is_refused_where_an_optimizer_saves_itself():
    state = toy_state(CountingSaved)
    with pytest.raises(
        fl.CheckpointError,
        match="CountingSaved has its own state_dict and the model is sharded",
    ):
        encode_optimizer(
            NamedOptimizer(state.optimizer, NamedOptimizer.of_state(state).names, sharded=True), {}
        )


def test_a_checkpoint_by_name_still_loads_into_an_optimizer_that_saves_itself(
    tmp_path, monkeypatch
):
    class Mine(SGD):
        def load_state_dict(self, saved):
            super().load_state_dict(saved)

    def new():
        return toy_state(lambda params: Mine(params, lr=1.0, momentum=0.5))

    whole, half = (fl.fit(toy_step, new(), [ONE] * 4, steps=n, hooks=()) for n in (4, 2))
    with monkeypatch.context() as patch:
        patch.setattr(
            optimizer_save, "has_own_state_dict", lambda optimizer: False
        )  # as it was before
        path = fl.save(half, tmp_path / "a")
    assert list(facts_of(path)) == ["class", "param_groups", "state"]
    assert_same(fl.fit(toy_step, fl.restore(path, new()), [ONE] * 4, epochs=1, hooks=()), whole)


def test_numbers_for_tensors_as_older_checkpoints_have_them_still_load(tmp_path):
    state = toy_state(lambda params: Adam(params, lr=torch.tensor(0.5), foreach=False))
    path = fl.save(toy_state(lambda params: Adam(params, lr=0.25)), tmp_path / "a")
    assert facts_of(path)["param_groups"][0]["lr"] == 0.25
    assert fl.restore(path, state).optimizer.param_groups[0]["lr"].item() == 0.25


def test_without_strictness_the_state_of_other_parameters_is_left_out(tmp_path, caplog):
    class Mine(Adam):
        def load_state_dict(self, saved):
            super().load_state_dict(saved)

    def new(size):
        model = nn.Linear(size, 1)
        return fl.TrainState.create(model, Mine(model.parameters()), seed=0)

    make = fl.pipeline()(lambda model, batch: model(batch).mean())
    path = fl.save(fl.fit(make, new(2), [torch.ones(1, 2)], hooks=()), tmp_path / "a")
    assert len(fl.restore(path, new(2), strict=False).optimizer.state) == 2
    with pytest.raises(
        fl.CheckpointError,
        match=r"of parameters of another shape: weight: \(1, 2\) saved, \(1, 3\) here",
    ):
        fl.restore(path, new(3), only=("optimizer",))
    assert not fl.restore(path, new(3), strict=False).optimizer.state
    assert "left unchanged: the state of Mine" in caplog.text
