"""Sequences in windows: numbers that can be checked in the head, and PyTorch's own example."""

import math

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import fnloop as fl
from fnloop import schedules
from fnloop.testing import Problem, assert_same, check_laws, toy, toy_loss


def running_sum(model, batch, carry):
    """The loss is w times the sum of all x so far: that sum is the gradient, and the carry."""
    carry = batch.sum() + (0 if carry is None else carry)
    return model.w * carry, {"output": carry}, carry


def ones(*shape):
    return torch.ones(1, *shape)


def fit(batches, *members, loss_fn=running_sum, state=None, length=2, **kwargs):
    step = fl.pipeline(fl.tbptt(length), *members)(loss_fn)
    return fl.fit(step, toy() if state is None else state, batches, **{"hooks": (), **kwargs})


# --- updates, windows and the carry


def test_a_batch_makes_an_update_for_each_window_and_the_carry_crosses_batches():
    state = fit([ones(4), ones(3)])  # sums of 2, 4, 6, 7
    assert (state.step, state.model.w.item(), state.slots["tbptt"].item()) == (4, -19.0, 7.0)


def test_the_carry_begins_with_each_epoch():
    state = fit([ones(4)], epochs=2)  # 2 + 4, twice
    assert (state.step, state.model.w.item()) == (4, -12.0)


def test_bare_steps_carry_on_and_count():
    step = fl.pipeline(fl.tbptt(2))(running_sum)
    state, out = step(toy(), ones(4))
    state, out = step(state, ones(1))
    assert (state.step, state.batch, state.model.w.item()) == (3, 2, -11.0)
    assert out.aux["output"].item() == 5.0
    assert [*out.aux] == ["output"]


@pytest.mark.parametrize(("dim", "shape"), [(0, (5, 1)), (1, (1, 5)), (2, (1, 1, 5))])
def test_time_may_be_any_dimension(dim, shape):
    step = fl.pipeline(fl.tbptt(2, dim=dim))(running_sum)
    state, _ = step(toy(), torch.ones(shape))
    assert (state.step, state.model.w.item()) == (3, -11.0)


def test_tensors_without_the_dimension_and_other_values_are_given_whole():
    seen = []

    def loss_fn(model, batch, carry):
        seen.append((batch["x"].shape[1], batch["scale"].shape, batch["names"], carry))
        return (model.w * batch["x"]).mean(), {"weight": 1}, len(seen)

    batch = {"x": ones(5), "scale": torch.ones(3), "names": ["a", "b"]}
    fl.pipeline(fl.tbptt(2))(loss_fn)(toy(), batch)
    whole = ((3,), ["a", "b"])
    assert seen == [(2, *whole, None), (2, *whole, 1), (1, *whole, 2)]


def test_the_carry_is_detached_within_containers():
    def loss_fn(model, batch, carry):
        h = model.w * batch.sum() + (0 if carry is None else carry["h"][0])
        return h, {"output": h}, {"h": (h, [h]), "n": 1}

    step = fl.pipeline(fl.tbptt(1))(loss_fn)
    state, _ = step(toy(w=1.0), ones(3))
    carry = state.slots["tbptt"]
    assert not carry["h"][0].requires_grad and not carry["h"][1][0].requires_grad
    assert (state.model.w.item(), carry["n"]) == (-2.0, 1)  # the gradient is 1 in each window


@pytest.mark.parametrize("last", [True, False])
def test_clip_and_schedule_act_in_each_window_wherever_tbptt_is_listed(last):
    rates = []

    def rate(i, total):
        rates.append((i, total))
        return 1.0

    others = (fl.clip(1.0), fl.schedule(rate))
    members = (*others, fl.tbptt(2)) if last else (fl.tbptt(2), *others)
    state = fl.fit(fl.pipeline(*members)(running_sum), toy(), [ones(6)], hooks=())
    assert state.model.w.item() == pytest.approx(-3.0, abs=1e-5)
    assert rates == [(0, None), (1, None), (2, None)]
    assert state.history["train/grad_norm"] == (4.0,)  # the mean of 2, 4, 6


def test_a_schedule_that_needs_the_length_of_the_run_needs_steps():
    cosine = fl.schedule(schedules.cosine())
    with pytest.raises(ValueError, match=r"an update for each of its windows: call fit\(.*steps="):
        fit([ones(6)], cosine)
    assert fit([ones(6)], cosine, steps=3).step == 3


def test_a_run_ends_with_the_batch_in_which_it_reaches_its_steps():
    assert fit([ones(6)] * 3, steps=4, epochs=None).step == 6


# --- what is reported


def test_windows_weigh_by_their_positions_and_dim_0_by_time_too():
    def loss_fn(model, batch, carry):
        loss = (batch - model.w * 0).mean()
        return loss, {"output": batch}, None

    values = torch.tensor([[1.0, 1.0, 4.0], [1.0, 1.0, 4.0]])
    means = {"m": lambda aux, batch: aux["output"].mean()}
    for batch, dim, weight in ((values, 1, 6), (values.T, 0, 3)):
        step = fl.pipeline(fl.tbptt(2, dim=dim), fl.metric(**means))(loss_fn)
        state, out = step(toy(), batch)
        assert (out.loss.item(), out.weight, out.metrics["m"].compute()) == (2.0, weight, 2.0)
        assert fl.evaluate(step, state, [batch]) == {"loss": 2.0, "m": 2.0}


def test_aux_weight_is_kept():
    def loss_fn(model, batch, carry):
        return (model.w * 0 + batch).mean(), {"weight": int(batch.sum())}, None

    step = fl.pipeline(fl.tbptt(2))(loss_fn)
    _, out = step(toy(), torch.tensor([[1.0, 1.0, 4.0]]))
    assert (out.loss.item(), out.weight) == (3.0, 6)  # (1 * 2 + 4 * 4) / 6


def test_a_skipped_window_moves_the_carry_on_and_nothing_else():
    @fl.middleware("gradient")
    def skip_second():
        def wrap(step):
            def skipping(state, batch):
                state, out = step(state, batch)
                if out.aux["output"] == 4:
                    return state, attrs.evolve(out, skip="second")
                return state, out

            return skipping

        return wrap

    events = []

    def note(state):
        events.append((state.step, state.skipped, "update" in state.events))
        return state

    state = fit([ones(6), ones(4)], skip_second(), hooks=(note,))
    assert state.model.w.item() == -(2 + 6 + 8 + 10)
    assert events == [(2, 1, True), (4, 1, True)]
    state = fit([ones(4)], skip_second(), hooks=(note,))
    assert events[-1] == (1, 1, True)  # the last window was skipped, the first was not


def test_every_steps_is_due_when_a_batch_passes_a_multiple():
    due = []

    def note(state):
        due.append(state.step)
        return state

    fit([ones(6)] * 4, hooks=(fl.every(steps=4)(note),))  # 3 updates per batch
    assert due == [6, 9, 12]


# --- evaluation


def test_an_evaluation_has_a_carry_of_its_own_in_the_same_windows():
    seen = []

    def loss_fn(model, batch, carry):
        seen.append((model.training, batch.shape[1], None if carry is None else carry.item()))
        return running_sum(model, batch, carry)

    state = fit(
        {"train": [ones(4), ones(4)], "valid": [ones(3), ones(1)]},
        loss_fn=loss_fn,
        evaluate_every=fl.every(steps=2),
    )
    train = [(True, 2, None), (True, 2, 2.0), (True, 2, 4.0), (True, 2, 6.0)]
    valid = [(False, 2, None), (False, 1, 2.0), (False, 1, 3.0)]
    assert seen == [*train[:2], *valid, *train[2:], *valid]
    assert state.slots["tbptt"].item() == 8.0
    before = state.slots["tbptt"]
    step = fl.pipeline(fl.tbptt(2))(running_sum)
    # w is -20: losses of -40, -60 and -80, with weights 2, 1 and 1
    assert fl.evaluate(step, state, [ones(3), ones(1)]) == {"loss": -55.0}
    assert step.evaluate(state, ones(2)).loss.item() == -40.0
    assert state.slots["tbptt"] is before


def test_an_average_carries_on_from_what_it_has_computed_itself():
    def sum_of_weights(model, batch, carry):
        carry = model.w + (0 if carry is None else carry)
        return carry, {}, carry

    members = (fl.ema(0.5), fl.tbptt(2))
    state, _ = fl.pipeline(*members)(running_sum)(toy(), ones(2))  # w is -2, and its average -1
    step, batches = fl.pipeline(*members)(sum_of_weights), [ones(4), ones(2)]
    # three windows: -2, -4, -6 and -1, -2, -3
    assert fl.evaluate(step, state, batches) == {"loss": -4.0, "ema/loss": -2.0}
    averaged = fl.averaged(state)
    assert fl.evaluate(step, averaged, batches) == {"loss": -2.0}


# --- what cannot be


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fl.tbptt(0), ValueError, "length as an int >= 1"),
        (lambda: fl.tbptt(2.0), TypeError, "length as an int"),
        (lambda: fl.tbptt(2, dim=-1), ValueError, "dim as an int >= 0"),
        (lambda: fl.pipeline(fl.tbptt(2), fl.accumulate(2)), ValueError, r"accumulate\(2\) makes"),
        (lambda: fl.pipeline(fl.cuda_graph(), fl.tbptt(2)), ValueError, "a new carry"),
        (lambda: fl.pipeline(fl.tbptt(2))(toy_loss), TypeError, "takes .model, batch, carry."),
    ],
)
def test_what_cannot_be_is_refused_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda loss: loss, r"returned tensor\("),
        (lambda loss: (loss, {}), "returned a tuple of 2"),
        (lambda loss: (loss, loss, None), "aux is a mapping"),
    ],
)
def test_a_reply_without_a_carry_is_refused(reply, message):
    step = fl.pipeline(fl.tbptt(2))(lambda model, batch, carry: reply(model.w * batch.sum()))
    with pytest.raises(TypeError, match=message):
        step(toy(), ones(2))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.ones(2, 3), torch.ones(2, 4)), r"lengths \[3, 4\].*x\.unbind\(1\)"),
        (torch.ones(2), "has no tensor with that dimension"),
        (torch.ones(2, 0), "is empty"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        fl.pipeline(fl.tbptt(2))(running_sum)(toy(), batch)


def test_a_failure_between_two_windows_leaves_no_state_to_continue_from():
    def fails(model, batch, carry):
        if carry is not None:
            raise RuntimeError("no")
        return running_sum(model, batch, carry)

    step, state = fl.pipeline(fl.tbptt(2))(fails), toy()
    with pytest.raises(RuntimeError, match="no"):
        step(state, ones(4))
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        step(state, ones(4))
    state = toy()
    with pytest.raises(RuntimeError) as caught:
        fl.fit(step, state, [ones(2), ones(2)], hooks=())  # one window each: nothing is lost
    assert (caught.value.state.step, caught.value.state.batch) == (1, 1)


def test_several_processes_are_refused():
    state = toy()
    several = attrs.evolve(state, backend=attrs.evolve(state.backend, world_size=2))
    with pytest.raises(NotImplementedError, match="one process only"):
        fl.pipeline(fl.tbptt(2))(running_sum).init_slots(several)


# --- the laws


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(4, 1)

    def forward(self, x, carry):
        h, carry = self.lstm(x, carry)
        return self.out(self.drop(h)), carry


def lstm_loss(model, batch, carry=None):
    x, y = batch
    output, carry = model(x, carry)
    return functional.mse_loss(output, y), {"output": output}, carry


def sequences(lengths):
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(2, n, 3, generator=generator, dtype=torch.float64) for n in lengths]
    return [(part, part.sum(2, keepdim=True).sin()) for part in x]


@pytest.mark.parametrize(
    "members",
    [
        (fl.tbptt(2),),
        (fl.tbptt(3), fl.clip(0.05), fl.metric(mean=lambda aux, batch: aux["output"].mean())),
        (fl.tbptt(2), fl.amp("bf16"), fl.schedule(lambda i, total: 1 / (1 + i))),
        (fl.torch_scheduler(lambda o, run: torch.optim.lr_scheduler.StepLR(o, 3)), fl.tbptt(2)),
    ],
    ids=repr,
)
def test_it_keeps_the_laws(members):
    problem = Problem(lambda: Recurrent().double(), lstm_loss, sequences([5, 2, 7, 1]))
    check_laws(fl.pipeline(*members), problem)


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_it_can_be_compiled(first):
    members = (fl.tbptt(2), fl.compiled(backend="eager"))
    step = fl.pipeline(*(members if first else members[::-1]))(running_sum)
    state, _ = step(toy(), ones(5))
    assert state.model.w.item() == -11.0


def test_windows_as_long_as_the_batch_equal_whole_batches():
    """The law of neutrality: one window per batch, and no carry, changes nothing."""

    def plain(model, batch):
        return lstm_loss(model, batch)[:2]

    def without_carry(model, batch, carry):
        return *lstm_loss(model, batch)[:2], None

    problem = Problem(lambda: Recurrent().double(), lstm_loss, sequences([4, 4, 4]))
    one = fl.fit(fl.pipeline()(plain), problem.state(), problem.batches, hooks=())
    step = fl.pipeline(fl.tbptt(9))(without_carry)
    two = fl.fit(step, problem.state(), problem.batches, hooks=())
    assert_same(attrs.evolve(two, slots={}), one)


# --- PyTorch's examples/word_language_model, by hand


class WordModel(nn.Module):
    """The RNNModel of the example."""

    def __init__(self, words=20, ninp=6, nhid=6, nlayers=2, dropout=0.2):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, words)
        self.words, self.nhid, self.nlayers = words, nhid, nlayers
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.words)
        return functional.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        zeros = weight.new_zeros(self.nlayers, bsz, self.nhid)
        return zeros, zeros.clone()


BPTT, LR, CLIP = 35, 20.0, 0.25


def corpus(tokens, columns):
    data = torch.randint(20, (tokens,), generator=torch.Generator().manual_seed(3))
    return data[: tokens // columns * columns].view(columns, -1).t().contiguous()


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(BPTT, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def train_by_hand(model, data, seed_batch, per_batch, epoch):
    """One epoch of the example. It seeds where fnloop does: at the start of each of its batches."""
    model.train()
    hidden, losses = model.init_hidden(data.size(1)), []
    for n, i in enumerate(range(0, data.size(0) - 1, BPTT)):
        if n % per_batch == 0:
            torch.manual_seed(seed_batch(epoch, n // per_batch))
        inputs, targets = get_batch(data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(inputs, hidden)
        loss = functional.nll_loss(output, targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-LR)
        losses.append(loss.item())
    return losses


def evaluate_by_hand(model, data):
    model.eval()
    total, hidden = 0.0, model.init_hidden(data.size(1))
    with torch.no_grad():
        for i in range(0, data.size(0) - 1, BPTT):
            inputs, targets = get_batch(data, i)
            output, hidden = model(inputs, hidden)
            total += len(inputs) * functional.nll_loss(output, targets).item()
    return total / (len(data) - 1)


def word_loss(seen):
    def loss_fn(model, batch, carry):
        inputs, targets = batch
        carry = model.init_hidden(inputs.size(1)) if carry is None else carry
        output, carry = model(inputs, carry)
        loss = functional.nll_loss(output, targets.reshape(-1))
        if model.training:
            seen.append(loss.item())
        return loss, {}, carry

    return loss_fn


@pytest.mark.parametrize("per_batch", [2, 100])
@pytest.mark.parametrize("stopped_after", [None, 1, 2, 4])
def test_the_word_language_model_of_pytorch_bit_for_bit(per_batch, stopped_after, tmp_path):
    from fnloop._core.rng import COMPUTE, fold_in

    train, valid = corpus(1600, 5), corpus(500, 5)  # 10 windows of 35, the last one shorter
    chunk = per_batch * BPTT
    ends = range(0, len(train) - 1, chunk)
    batches = [
        (train[i : i + chunk][: len(train) - 1 - i], train[i + 1 : i + chunk + 1]) for i in ends
    ]

    def new_state():
        torch.manual_seed(0)
        model = WordModel()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=LR), seed=7)

    seen = []
    step = fl.pipeline(fl.tbptt(BPTT, dim=0), fl.clip(CLIP))(word_loss(seen))
    loaders = {"train": batches, "valid": [(valid[:-1], valid[1:])]}
    state, calls = new_state(), []

    def pause(state):
        calls.append(state.step)
        return attrs.evolve(state, stop="paused") if len(calls) == stopped_after else state

    state = fl.fit(step, state, loaders, epochs=2, hooks=(pause,))
    if stopped_after is not None and state.stop:
        fl.save(state, tmp_path / "paused")
        state = attrs.evolve(fl.restore(tmp_path / "paused", new_state()), stop=None)
        state = fl.fit(step, state, loaders, epochs=2, hooks=())

    model, losses, means, evaluated = new_state().model, [], [], []
    for epoch in range(2):
        own = train_by_hand(model, train, lambda e, b: fold_in(7, COMPUTE, e, b), per_batch, epoch)
        losses += own
        sizes = [min(BPTT, len(train) - 1 - i) for i in range(0, len(train) - 1, BPTT)]
        means.append(math.fsum(a * b for a, b in zip(own, sizes, strict=True)) / sum(sizes))
        evaluated.append(evaluate_by_hand(model, valid))
    assert seen == losses
    assert state.step == len(losses) == 20
    for mine, theirs in zip(state.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    whole = [record for record in state.history if not record.closing]
    assert [r.metrics["train/loss"] for r in whole] == pytest.approx(means, rel=1e-12)
    assert [r.metrics["valid/loss"] for r in whole] == pytest.approx(evaluated, rel=1e-12)


# --- PyTorch's examples/time_sequence_prediction: LBFGS in float64, with fnloop as it is


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, 5), nn.LSTMCell(5, 5)
        self.linear = nn.Linear(5, 1)

    def forward(self, input):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (torch.zeros(len(input), 5, dtype=torch.double) for _ in range(4))
        for part in input.split(1, dim=1):
            h_t, c_t = self.lstm1(part, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("stopped_after", [None, 1, 2])
def test_the_time_sequence_prediction_of_pytorch_bit_for_bit(stopped_after, tmp_path):
    shift = torch.arange(4, dtype=torch.double)[:, None]
    data = torch.sin((torch.arange(12, dtype=torch.double)[None] + 7 * shift) / 3)
    inputs, target = data[1:, :-1], data[1:, 1:]

    def new_state():
        torch.manual_seed(0)
        model = Sequence().double()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=5)
        return fl.TrainState.create(model, optimizer, seed=0)

    by_hand, all_losses, seen = new_state(), [], []
    seq, optimizer = by_hand.model, by_hand.optimizer
    for _ in range(3):
        found = []

        def closure(found=found):
            optimizer.zero_grad()
            loss = nn.MSELoss()(seq(inputs), target)
            found.append(loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        all_losses += found

    def loss_fn(model, batch):
        loss = nn.MSELoss()(model(batch[0]), batch[1])
        seen.append(loss.item())
        return loss

    step = fl.pipeline()(loss_fn)
    state, loaders = new_state(), [(inputs, target)]
    if stopped_after is not None:
        state = fl.fit(step, state, loaders, epochs=stopped_after, hooks=())
        fl.save(state, tmp_path / "paused")
        state = fl.restore(tmp_path / "paused", new_state())
    state = fl.fit(step, state, loaders, epochs=3, hooks=())
    assert seen == all_losses
    for mine, theirs in zip(state.model.parameters(), seq.parameters(), strict=True):
        assert torch.equal(mine, theirs)
