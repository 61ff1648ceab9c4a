"""A small model's gradients are averaged in one message, with the bits of DDP."""

from collections import Counter

import pytest
import torch
from joined import flat, logged
from process_data import batches, loader
from process_problems import adamw, by_tokens, created, entropy
from torch import nn

import fnloop as fl
from fnloop._extensions.engines import distributed, exchanges, one_message

pytestmark = pytest.mark.slow
COUNTS = (2, 3)
calls = [0]


class Branches(nn.Module):
    """Two layers, of which the batch says whether the second is used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x):
        calls[0] += 1
        return self.second(self.first(x)) if calls[0] < 3 else self.first(x)


def rarely(model, batch):
    return fl.skip("left out") if int(batch[3][0]) % 3 else entropy(model, batch)


CASES = {  # middleware, the loss function, arguments of `created`
    "plain": ((), entropy, {}),
    "window, clip": ((fl.accumulate(3), fl.clip(0.3)), entropy, {}),
    "pieces": ((fl.microbatch(1),), entropy, {}),
    "items": ((), by_tokens, {}),
    "left out": ((), rarely, {}),
    "unused": ((), entropy, {"make": Branches}),
    "unused, window": ((fl.accumulate(2),), entropy, {"make": Branches}),
    "in double": ((), lambda m, b: entropy(m, [b[0].double(), *b[1:]]),
                  {"make": lambda: nn.Linear(6, 3).double()}),
}  # fmt: skip


def trained(case, steps=9):
    """Return the weights after some updates, the losses, and what was logged."""
    listed, loss, settings = CASES[case]
    calls[0] = 0
    torch.manual_seed(0)
    state = created(optimizer=adamw, **settings)
    with logged() as lines:
        made = fl.fit(fl.pipeline(*listed)(loss), state, loader(), steps=steps, epochs=9, hooks=())
    losses = [record.metrics["train/loss"] for record in made.history]
    return [flat(made.model.parameters()), losses, [*lines]]


def both(folder):
    found, make_ddp = {}, distributed._ddp_of
    for case in CASES:
        made = []
        finds = "unused" in case  # which parameters are: as in one message, they are left alone
        distributed._ddp_of = lambda state, params, unused, made=made, finds=finds: (
            made.append(1) or make_ddp(state, params, unused or finds)
        )
        small, number = trained(case), len(made)
        one_message.LARGEST, kept = 0, one_message.LARGEST
        found[case] = {"small": small, "ddp": trained(case), "made": [number, len(made)]}
        one_message.LARGEST = kept
    return found


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("case", CASES)
def test_one_message_has_the_bits_of_ddp(launched, case, n):
    """Of three processes the last bit depends on where a gradient is in its message."""
    for found in launched(both, n):
        small, ddp = found[case]["small"], found[case]["ddp"]
        assert found[case]["made"] == [0, 1]
        if n == 2:
            assert small == ddp
        else:
            assert small[0] == pytest.approx(ddp[0], rel=1e-5, abs=1e-6)
            assert small[2] == ddp[2]


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "abc":
            setattr(self, name, nn.Parameter(torch.ones(1)))


def of_its_kind(model, batch):
    """Use one parameter: a batch is its number, and a value."""
    return (getattr(model, "abc"[int(batch[0])]) * batch[1]).sum()


def with_skips(model, batch):
    return fl.skip("left out") if batch[1] > 9 else of_its_kind(model, batch)


def decaying(parameters):
    return torch.optim.SGD(parameters, lr=1.0, weight_decay=0.5)


TWO = (fl.accumulate(2),)
WINDOWS = {  # the batches of the two processes, in turn; what a window has, the loss function
    "in a part of a window": ([(0, 1), (0, 2), (1, 3), (1, 4)], TWO, of_its_kind),
    "in another part": ([(1, 3), (0, 2), (0, 1), (1, 4)], TWO, of_its_kind),
    "where memory is asked for": ([(0, 1), (0, 2), (1, 3), (1, 4)],
                                  (fl.retry_on_oom(), fl.accumulate(2)), of_its_kind),
    "by one process": ([(0, 3), (1, 7)], (), of_its_kind),
    "beside padding": ([(0, 3), (1, 7), (1, 1)], (), of_its_kind),
    "beside batches left out": ([(2, 10), (0, 3), (2, 10), (1, 7)], TWO, with_skips),
    "after batches left out": ([(2, 10), (2, 10), (0, 3), (1, 7)], TWO, with_skips),
    "before batches left out": ([(0, 3), (1, 7), (2, 10), (2, 10)], TWO, with_skips),
}  # fmt: skip


def windows(folder):
    """Return the three parameters after one epoch, in one message and by DDP."""
    found = {}
    for largest in (one_message.LARGEST, 0):
        one_message.LARGEST, kept = largest, one_message.LARGEST
        for name, (data, listed, loss) in WINDOWS.items():
            state = created(make=Three, optimizer=decaying)
            data = [torch.tensor(each, dtype=torch.float32) for each in data]
            made = fl.fit(fl.pipeline(*listed)(loss), state, data, hooks=())
            found[f"{name}, {largest > 0}"] = [p.item() for p in made.model.parameters()]
        one_message.LARGEST = kept
    return found


@pytest.mark.parametrize("way", [True, False], ids=["one message", "DDP"])
@pytest.mark.parametrize("name", WINDOWS)
def test_what_a_part_of_an_update_uses_is_averaged_and_the_rest_left_alone(launched, name, way):
    """From 1, at a rate of 1 and a decay of 1/2: 1 - 1/2 - the mean over batches that count."""
    for found in launched(windows, 2):
        a, b, c = found[f"{name}, {way}"]
        if "part" in name or "memory" in name:
            assert (a, b, c) == (1 - 0.5 - 3 / 4, 1 - 0.5 - 7 / 4, 1.0)
        elif name == "beside padding":
            first = (1 - 0.5 - 3 / 2, 1 - 0.5 - 7 / 2)
            assert (a, b, c) == (first[0], first[1] * 0.5 - 1, 1.0)
        else:
            assert (a, b, c) == (1 - 0.5 - 3 / 2, 1 - 0.5 - 7 / 2, 1.0)


def warned(folder):
    """Return b, which the second window does not use, and the warnings; in windows, and guarded."""

    def less_and_less(model, batch):
        return (model.a + (0 if batch > 5 else model.b + model.c)).sum()

    data, found = [torch.tensor([x]) for x in (1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0)], {}
    one_message.LARGEST, kept = 0, one_message.LARGEST
    for name, listed in {"windows": TWO, "guarded": (fl.retry_on_oom(), *TWO)}.items():
        state = created(make=Three, optimizer=decaying)
        with logged() as lines:
            made = fl.fit(fl.pipeline(*listed)(less_and_less), state, data, hooks=())
        found[name] = [made.model.b.item(), [line for line in lines if "uses some" in line]]
    one_message.LARGEST = kept
    return found


@pytest.mark.parametrize("name", ["windows", "guarded"])
def test_ddp_says_that_it_decays_what_a_window_did_not_use(launched, name):
    """From 1 to 1 - 1/2 - 1, and to half of that."""
    for found in launched(warned, 2):
        b, lines = found[name]
        assert b == -0.25 and len(lines) == 1 and "but not in others (b, c). With" in lines[0]


def doubled(folder):
    """Return the dtype and the weight of a model that is made double between two calls of `fit`."""
    state, step = created(make=lambda: nn.Linear(1, 1, bias=False)), fl.pipeline()(third)
    ones = [torch.ones(1)] * 2
    state = fl.fit(step, state, ones, hooks=())
    state.model.double().weight.data.zero_()
    state = fl.fit(step, state, ones, hooks=(), epochs=2)
    return [str(state.model.weight.dtype), state.model.weight.item()]


def third(model, batch):
    return model.weight.sum() / 3


def test_gradients_are_averaged_in_the_dtype_that_parameters_have_now(launched):
    """The gradient is 1/3 and the rate 0.1: in double, 0.1 / 3 has 16 digits."""
    for dtype, weight in launched(doubled, 2):
        assert dtype == "torch.float64" and abs(weight + 0.1 / 3) < 1e-15


def sent(folder):
    """Return what a second call of `fit` with 12 updates sends, by the names of its messages."""
    step, state, data = fl.pipeline()(entropy), created(), batches(3)[:12]
    state = fl.fit(step, state, data, hooks=())
    names, begin, before = [], exchanges.begin_exchange, exchanges.counted_collectives()
    exchanges.begin_exchange = lambda what: names.append(what) or begin(what)
    state = fl.fit(step, state, data, epochs=3, hooks=())
    exchanges.begin_exchange = begin
    return dict(Counter(names)), exchanges.counted_collectives() - before, state.step


def test_a_call_of_fit_sends_its_gradients_and_few_messages(launched):
    """Two epochs, of 6 updates each."""
    for names, gradients, step in launched(sent, 2):
        assert step == 18 and gradients == 12
        names.pop("the exchange between two updates", 0)  # as many as the time says
        ends = {name: n for name, n in names.items() if name.startswith("the end of ")}
        assert sum(ends.values()) == names.pop("an exchange of metrics") == 2
        assert {name for name in names if name not in ends} == {
            "the comparison of the pipelines", "a comparison of the data", "how batches weigh",
        }  # fmt: skip


def kinds(folder):
    of = lambda model: one_message.fits(model, [*model.parameters()])
    return {
        "small": of(nn.Linear(500, 500)),
        "large": of(nn.Linear(600, 500)),
        "narrow": of(nn.Linear(3, 3).bfloat16()),
        "mixed": of(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())),
        "sparse": of(nn.Embedding(3, 3, sparse=True)),
    }


def test_only_small_dense_gradients_of_one_dtype_are_sent_so():
    """500 * 500 numbers are 1.0 MB and 600 * 500 are 1.2; a message has at most 1 MiB."""
    assert {name for name, fit in kinds(None).items() if fit} == {"small"}
