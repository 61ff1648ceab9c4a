"""The optimizers of five packages resume bit for bit, or are refused by name."""

import copy
import functools
import importlib
import importlib.util
import sys
import types
import warnings

import pytest
import torch
from sample_optimizers import check_resumes
from torch import nn

import fnloop as fl
from fnloop import schedules
from fnloop.testing import assert_same

SGD, Adam = torch.optim.SGD, torch.optim.Adam
slow, long = pytest.mark.slow, pytest.mark.long  # to import the packages takes seconds


def find(package, name):
    """Return an optimizer. Make timm.optim importable without the rest, which needs torchvision."""
    if package != "timm":
        return getattr(pytest.importorskip(package), name)
    if "timm" not in sys.modules:
        found = importlib.util.find_spec("timm") or pytest.skip("timm is not installed")
        for stubbed, folder in (("timm", ""), ("timm.optim", "/optim")):
            sys.modules[stubbed] = stub = types.ModuleType(stubbed)
            stub.__path__ = [f"{path}{folder}" for path in found.submodule_search_locations]
    module, _, name = name.partition(".")
    return getattr(importlib.import_module(f"timm.optim.{module}"), name)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.conv = nn.Embedding(7, 6), nn.Conv1d(3, 4, 3, padding=1)
        self.first, self.second, self.last = (
            nn.Linear(6, 8), nn.Linear(8, 6, bias=False), nn.Linear(24, 5),
        )  # fmt: skip

    def forward(self, x):
        x = self.conv(self.words(x))
        return self.last(self.second(torch.tanh(self.first(x))).flatten(1))


GENERATOR = torch.Generator().manual_seed(3)
drawn = lambda *size, below: torch.randint(0, below, size, generator=GENERATOR)


DATA = [(drawn(4, 3, below=7), drawn(4, below=5)) for _ in range(6)]
loss_fn = lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


step = fl.pipeline(fl.schedule(schedules.exponential(0.9)))(loss_fn)
ADAPT_THEIR_RATE = {"pytorch_optimizer.ASGD"}  # a schedule refuses to overwrite their rate
words = lambda text: text.split()


def using(package, name, parameters, **settings):
    return f"{package}.{name}", lambda net: find(package, name)(parameters(net), **settings)


def plainly(package, name, **settings):
    return using(package, name, nn.Module.parameters, **{"lr": 0.01, **settings})


def matrices(package, name):
    return using(package, name, lambda net: [p for p in net.parameters() if p.ndim == 2])


def muon(name):
    def make(net):
        others, hidden = ([p for p in net.parameters() if (p.ndim == 2) == x] for x in (0, 1))
        groups = [
            {"params": hidden, "use_muon": True, "lr": 0.02},
            {"params": others, "use_muon": False, "lr": 0.01},
        ]
        return find("pytorch_optimizer", name)(groups)

    return f"pytorch_optimizer.{name}", make


def around(package, name, inner=Adam, **settings):
    return using(package, name, lambda net: inner(net.parameters(), lr=0.01), **settings)


momentum = functools.partial(SGD, momentum=0.9)
PLAIN = words("ASGD Adadelta Adafactor Adagrad Adamax NAdam RAdam Rprop")
TORCH = [
    *(plainly("torch.optim", name) for name in PLAIN),
    plainly("torch.optim", "Adam", amsgrad=True), plainly("torch.optim", "AdamW", fused=True),
    plainly("torch.optim", "RMSprop", momentum=0.9, centered=True),
    plainly("torch.optim", "SGD", momentum=0.9, nesterov=True),
    plainly("torch.optim", "LBFGS", max_iter=3, history_size=4), matrices("torch.optim", "Muon"),
]  # fmt: skip
TIMM = words("""
    adabelief.AdaBelief adafactor.Adafactor adamp.AdamP adamw.AdamWLegacy adan.Adan adopt.Adopt
    kron.Kron lamb.Lamb laprop.LaProp lars.Lars lion.Lion madgrad.MADGRAD mars.Mars muon.Muon
    nadam.NAdamLegacy nadamw.NAdamW nvnovograd.NvNovoGrad radam.RAdamLegacy rmsprop_tf.RMSpropTF
    sgdp.SGDP sgdw.SGDW
""")
PYTORCH_OPTIMIZER = words("""
    ADOPT APOLLO ASGD BCOS CAME DASH FOCUS FTRL LARS MADGRAD MARS MSVAG PID PNM QHM RACS ROSE SCION
    SGDP SGDW SM3 SRMM SWATS TAM VSGD AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaFactor AdaGC
    AdaMax AdaMod AdaNorm AdaPNM AdaShift AdaSmooth AdaTAM Adai Adalite AdamC AdamG AdamP AdamS
    AdamWSN Adan AggMo Aida Alice Amos Ano ApolloDQN AvaGrad DAdaptAdaGrad DAdaptAdam DAdaptAdan
    DAdaptLion DAdaptSGD DiffGrad DualAdam EXAdam EmoFact EmoLynx EmoNavi FAdam Fira FlashAdamW
    Fromage GaLore Grams Gravity GrokFastAdamW Kate Kron LaProp Lamb Lion Nero NovoGrad PAdam
    Prodigy QHAdam RAdam Ranger SCIONLight SGDSaI SPlus SaRA ScheduleFreeAdamW ScheduleFreeRAdam
    ScheduleFreeSGD Shampoo SignSGD SimplifiedAdEMAMix StableAdamW Tiger Yogi
""")
SCHEDULEFREE = words("""
    AdamWScheduleFree AdamWScheduleFreeReference AdamWScheduleFreePaper RAdamScheduleFree
    SGDScheduleFree SGDScheduleFreeReference AdamWScheduleFreeClosure RAdamScheduleFreeClosure
    SGDScheduleFreeClosure
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
        ("pytorch_optimizer.AdamMini", lambda net: find("pytorch_optimizer", "AdamMini")(net)),
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
SOME = ("timm.lion.Lion", "pytorch_optimizer.SOAP", "schedulefree.AdamWScheduleFree")  # not long
GALORE = {"rank": 2, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}
REFUSED = {  # their state contains objects, which torch would pickle
    "Conda": lambda net: find("pytorch_optimizer", "Conda")(net.parameters()),
    "GaLore": lambda net: find("pytorch_optimizer", "GaLore")(
        [{"params": [net.first.weight], **GALORE}]
    ),
    "ScalableShampoo": lambda net: find("pytorch_optimizer", "ScalableShampoo")(net.parameters()),
}


def new_state(make, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    net = Net().to(dtype)
    optimizer = make(net)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return fl.TrainState.create(net, optimizer, seed=0)


@pytest.mark.filterwarnings("ignore")  # warnings of the packages
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in dict(TORCH) else slow if name in SOME else long)
    for name in OPTIMIZERS
])  # fmt: skip
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, caplog, name):
    scheduled = fl.pipeline()(loss_fn) if name in ADAPT_THEIR_RATE else step
    with torch.compiler.set_stance("force_eager"):  # some compile themselves, for half a minute
        check_resumes(tmp_path, lambda seed=0: new_state(OPTIMIZERS[name], seed), scheduled, DATA)
    assert "could not try whether" not in caplog.text


@slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["timm.adafactor.Adafactor", "pytorch_optimizer.Kron", "pytorch_optimizer.QHAdam"]
)
def test_state_that_load_state_dict_casts_to_bfloat16_keeps_its_dtype(tmp_path, name):
    new = lambda seed=0: new_state(OPTIMIZERS[name], seed, torch.bfloat16)
    check_resumes(tmp_path, new, step, DATA)


@slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_be_resumed_are_refused_at_once(tmp_path, name, caplog):
    """A save by hand warns and saves the weights."""
    state = new_state(REFUSED[name])
    before = copy.deepcopy(state.model.state_dict())
    message = rf"a run with {name} cannot be resumed bit for bit: .* an? \w+.*leave out"
    with pytest.raises(fl.CheckpointError, match=message):
        fl.fit(step, state, DATA, hooks=(fl.every(epochs=1)(fl.checkpoint(tmp_path / "run")),))
    assert all(torch.equal(value, before[key]) for key, value in state.model.state_dict().items())
    path = fl.save(state, tmp_path / "a")
    assert "save: a run with" in caplog.text and "cannot be resumed bit for bit" in caplog.text
    restored = fl.restore(path, new_state(REFUSED[name], 1), only=("model",))
    assert all(map(torch.equal, restored.model.parameters(), state.model.parameters()))


@slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "name", ["schedulefree.AdamWScheduleFree", "pytorch_optimizer.ScheduleFreeWrapper"]
)
def test_the_mode_of_a_schedule_free_optimizer_is_restored(tmp_path, name, mode):
    whole = fl.fit(step, new_state(OPTIMIZERS[name]), DATA, steps=4, hooks=())
    getattr(whole.optimizer, mode)()
    resumed = fl.restore(fl.save(whole, tmp_path / "a"), new_state(OPTIMIZERS[name], 1))
    assert_same(resumed, whole)
    for state in (whole, resumed):
        state.optimizer.train()
    assert_same(resumed, whole)
    assert_same(*(fl.fit(step, state, DATA, steps=8, hooks=()) for state in (resumed, whole)))


class Wide(nn.Module):
    """Its first matrix has 8192 numbers: torchao keeps fewer than 4096 as they are."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 512), nn.Linear(512, 5)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


@slow
@pytest.mark.parametrize(
    "name",
    ["Adam8bit", *(pytest.param(f"AdamW{bits}", marks=long) for bits in ("8bit", "4bit", "Fp8"))],
)
def test_a_low_bit_optimizer_resumes(tmp_path, name, caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its import
        kind = getattr(pytest.importorskip("torchao.optim"), name)

    def new(seed=0):
        torch.manual_seed(seed)
        model = Wide()
        return fl.TrainState.create(model, kind(model.parameters(), lr=1e-2), seed=0)

    batches = [(torch.randn(4, 16, generator=GENERATOR), DATA[0][1]) for _ in range(4)]
    saves = fl.every(steps=2)(fl.checkpoint(tmp_path / "run"))
    with torch.compiler.set_stance("force_eager"):
        whole = fl.fit(step, new(), batches, epochs=2, hooks=())
        half = fl.fit(step, new(), batches, steps=2, hooks=(saves,))
        resumed = fl.resume(tmp_path / "run", new(1))
        assert_same(resumed, half)
        held = resumed.optimizer.state[resumed.model.first.weight]["exp_avg"]
        assert type(held).__name__.startswith("OptimState")
        resumed = fl.fit(step, fl.snapshot(resumed), batches, epochs=1, hooks=(saves,))
        resumed = fl.resume(tmp_path / "run", new(2))
        assert_same(fl.fit(step, resumed, batches, epochs=2, hooks=()), whole)
    assert "could not try" not in caplog.text
