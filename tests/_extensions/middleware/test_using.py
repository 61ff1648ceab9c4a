"""A step that updates with some of the optimizers of a state."""

import re

import attrs
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam

import fnloop as fl
from fnloop.testing import Toy, assert_same, toy_loss

ONE = torch.ones(1)
decay = fl.schedule(lambda i, total: (i + 1) / total)


def on_one_weight(**optimizers):
    """A state with several optimizers of one weight, by name and rate."""
    model = Toy()
    made = {name: SGD(model.parameters(), lr=lr) for name, lr in optimizers.items()}
    return fl.TrainState.create(model, made, seed=0)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))


def head_and_body(lr=1.0):
    model = Parts()
    optimizers = {"head": SGD([model.head], lr=lr), "body": SGD([model.body], lr=lr)}
    return fl.TrainState.create(model, optimizers, seed=0)


def three_and_four(model, batch):
    """Its gradient is 3 for the head and 4 for the body, with the norm 5."""
    return ((3 * model.head + 4 * model.body) * batch).mean()


def weights(state):
    return state.model.head.item(), state.model.body.item()


def using(*names, loss_fn=toy_loss, members=()):
    return fl.pipeline(fl.using(*names), *members)(loss_fn)


# --- what is used and what rests


def test_only_the_named_optimizer_updates_and_counts():
    state = on_one_weight(large=1.0, small=0.5)
    seen = []
    for name in ("large", "small", "small"):
        state, _ = using(name)(state, 4 * ONE)
        seen.append((state.model.w.item(), dict(state.updates)))
    assert seen == [
        (-4.0, {"large": 1, "small": 0}), (-6.0, {"large": 1, "small": 1}),
        (-8.0, {"large": 1, "small": 2}),
    ]  # fmt: skip
    assert state.step == 3 and list(state.optimizer) == ["large", "small"]


@pytest.mark.parametrize("names", [("head", "body"), ("body", "head"), ()])
def test_all_names_are_the_same_as_no_using(names):
    listed = (fl.using(*names),) if names else ()
    state, _ = fl.pipeline(*listed)(three_and_four)(head_and_body(), ONE)
    assert weights(state) == (-3.0, -4.0) and state.updates == {"head": 1, "body": 1}


@pytest.mark.parametrize("first", [True, False])
def test_clip_sees_only_what_is_used_in_either_order(first):
    members = (fl.using("head"), fl.clip(1.5)) if first else (fl.clip(1.5), fl.using("head"))
    state, out = fl.pipeline(*members)(three_and_four)(head_and_body(), ONE)
    assert out.metrics["grad_norm"].compute() == 3.0
    assert weights(state) == (pytest.approx(-1.5), 0.0)


@pytest.mark.parametrize("members", [
    (fl.clip(1.5),), (fl.microbatch(1), fl.clip(1.5)), (fl.retry_on_oom(), fl.clip(1.5)),
    (fl.clip_value(1.5),), (fl.sam(0.1), fl.clip(1.5)),
    (fl.clip(1.5, only="head"),), (fl.skip_nonfinite(), fl.clip(1.5)),
    (fl.closure(), fl.clip(1.5)),
], ids=str)  # fmt: skip
def test_what_rests_has_no_gradient_for_any_middleware(members):
    seen = []

    @fl.middleware("gradient")
    def look():
        def wrap(step):
            def looking(state, batch):
                state, out = step(state, batch)
                seen.append((state.model.body.grad, [*state.optimizer], dict(state.updates)))
                return state, out

            return looking

        return wrap

    state = head_and_body()
    for listed in ((*members, fl.using("head")), (fl.using("head"), *members)):
        step = fl.pipeline(*listed, look())(three_and_four)
        state, _ = step(state, torch.ones(2))
        assert state.model.body.grad is None
    assert seen == [(None, ["head"], {"head": 0}), (None, ["head"], {"head": 1})]
    assert weights(state) == (pytest.approx(-3.0), 0.0) and state.updates == {"head": 2, "body": 0}


def test_windows_drop_what_rests_before_and_after_accumulate():
    for members in ((fl.accumulate(2), fl.clip(1.5)), (fl.clip(1.5), fl.accumulate(2))):
        step = fl.pipeline(*members, fl.using("head"))(three_and_four)
        state, _ = step(head_and_body(), [ONE, ONE])
        assert weights(state) == (pytest.approx(-1.5), 0.0)


def test_an_update_that_is_left_out_counts_for_none():
    step = using("head", loss_fn=three_and_four, members=(fl.skip_nonfinite(),))
    state, _ = step(head_and_body(), ONE)
    state, out = step(state, ONE * float("nan"))
    assert out.skip and (state.step, state.skipped) == (1, 1)
    assert state.updates == {"head": 1, "body": 0} and state.slots["rests"] == {"body": 1}


def test_an_average_is_of_the_whole_model():
    """The body rests at 0; the head is -3, then -6, and its average -1.5, then -3.75."""
    step = using("head", loss_fn=three_and_four, members=(fl.ema(0.5),))
    state = fl.fit(step, head_and_body(), [ONE] * 2, hooks=())
    assert weights(fl.averaged(state)) == (-3.75, 0.0)


def test_lbfgs_is_one_of_several():
    model = Toy()
    optimizers = {"sgd": SGD(model.parameters(), lr=0.25), "lbfgs": LBFGS(model.parameters())}
    state = fl.TrainState.create(model, optimizers, seed=0)
    square = lambda model, batch: ((model.w - batch) ** 2).mean()
    state, _ = using("sgd", loss_fn=square)(state, 4 * ONE)
    assert state.model.w.item() == 2.0  # half the way
    state, _ = using("lbfgs", loss_fn=square)(state, 4 * ONE)
    assert state.model.w.item() == 4.0 and state.updates == {"sgd": 1, "lbfgs": 1}


def test_a_closure_is_for_the_one_that_is_used():
    class Twice(SGD):
        def step(self, closure=None):
            for _ in range(2):
                closure()
                super().step()

    model = Toy()
    optimizers = {"twice": Twice(model.parameters(), lr=1.0), "sgd": SGD(model.parameters())}
    state = fl.TrainState.create(model, optimizers, seed=0)
    step = using("twice", members=(fl.closure(),))
    state, _ = step(state, 3 * ONE)
    assert state.model.w.item() == -6.0 and state.updates == {"twice": 1, "sgd": 0}


# --- schedules


def test_a_schedule_counts_the_updates_of_its_own_optimizer():
    state, rates = on_one_weight(a=1.0, b=1.0), []

    def note(state):
        rates.append([state.optimizer[name].param_groups[0]["lr"] for name in ("a", "b")])
        return state

    data = [ONE] * 20
    state = fl.fit(using("a", members=(decay,)), state, data, steps=2, hooks=(note,))
    state = fl.fit(using("b", members=(decay,)), state, data, steps=6, hooks=(note,))
    state = fl.fit(using("a", members=(decay,)), state, data, steps=8, hooks=(note,))
    assert rates == [
        [0.5, 1.0], [1.0, 1.0],  # 1/2, 2/2
        [1.0, 0.25], [1.0, 0.5], [1.0, 0.75], [1.0, 1.0],  # 1/4, ...
        [0.75, 1.0], [1.0, 1.0],  # 3/4, 4/4
    ]  # fmt: skip


def test_after_a_head_alone_each_has_its_own_place_in_one_schedule():
    state, rates = head_and_body(), []

    def note(state):
        groups = [state.optimizer[name].param_groups[0] for name in ("head", "body")]
        rates.append([group["lr"] for group in groups])
        return state

    data = [ONE] * 20
    first, all_of_it = using("head", loss_fn=three_and_four), fl.pipeline(decay)(three_and_four)
    state = fl.fit(first, state, data, steps=2, hooks=(note,))
    fl.fit(all_of_it, state, data, steps=4, hooks=(note,))
    assert rates == [[1.0, 1.0], [1.0, 1.0], [0.75, 0.5], [1.0, 1.0]]  # 3/4 and 1/2, then both end


def test_in_a_phase_a_schedule_counts_from_its_beginning():
    state, rates = on_one_weight(a=1.0, b=1.0), []

    def note(state):
        rates.append(state.optimizer["b"].param_groups[0]["lr"])
        return state

    both = (decay, fl.using("a")), (decay, fl.using("b"))
    first, second = (fl.pipeline(*members)(toy_loss) for members in both)
    state = fl.fit(first, state, [ONE] * 3, epochs=1, phase="one", hooks=())
    state = fl.fit(second, state, [ONE] * 2, epochs=1, phase="two", hooks=(note,))
    fl.fit(second, state, [ONE] * 4, epochs=1, phase="three", hooks=(note,))
    assert rates == [0.5, 1.0, 0.25, 0.5, 0.75, 1.0]


def test_a_scheduler_of_torch_steps_with_its_own_optimizer():
    halve = lambda optimizer, run: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    members = (fl.torch_scheduler(halve, "a"), fl.torch_scheduler(halve, "b"))
    state = on_one_weight(a=1.0, b=16.0)
    data = [ONE] * 9
    state = fl.fit(using("a", members=members), state, data, steps=2, hooks=())
    assert state.model.w.item() == -1.5  # 1 + 1/2
    state = fl.fit(using("b", members=members), state, data, steps=4, hooks=())
    assert state.model.w.item() == -25.5  # 16 + 8
    assert [state.optimizer[name].param_groups[0]["lr"] for name in ("a", "b")] == [0.25, 4.0]


def test_a_scheduler_of_torch_is_made_for_the_updates_of_its_own_optimizer():
    lengths = []

    def linear(optimizer, run):
        lengths.append(run.total_steps)
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=run.total_steps)

    state, data = on_one_weight(a=1.0, b=1.0), [ONE] * 9
    state = fl.fit(using("a"), state, data, steps=2, hooks=())
    step = using("b", members=(fl.torch_scheduler(linear, "b"),))
    state = fl.fit(step, state, data, steps=4, hooks=())
    assert lengths == [2] and state.model.w.item() == -3.75  # 2, then 1 + 3/4


def test_plateau_lowers_what_is_used():
    member = fl.plateau("train/loss", patience=1, mode="max")  # the loss falls
    state = on_one_weight(a=1.0, b=1.0)
    state = fl.fit(using("a", members=(member,)), state, [ONE], epochs=3, hooks=())
    rates = [state.optimizer[name].param_groups[0]["lr"] for name in ("a", "b")]
    assert rates == [pytest.approx(0.1), 1.0]


# --- what is refused


@pytest.mark.parametrize(("make", "said"), [
    (lambda: fl.using(), "TypeError: using expects names of optimizers, .*; got none: .* leave"),
    (lambda: fl.using(1), r"TypeError: using expects names of optimizers: write using\(.*; got 1"),
    (lambda: fl.using(["a", "b"]), r"TypeError: using expects names .*; got \['a', 'b'\]"),
    (lambda: fl.using("a", ""), "TypeError: using expects names of optimizers: .*; got 'a', ''"),
    (lambda: fl.using("a", "a"), "ValueError: using expects each name once; got \\('a', 'a'\\)"),
    (lambda: fl.pipeline(fl.using("a"), fl.using("b")), "ValueError: using.* have one name"),
    (lambda: fl.pipeline(fl.using("a"), fl.cuda_graph()),
     "ValueError: cuda_graph.* counts an update for every optimizer"),
    (lambda: fl.pipeline(fl.using("a"), fl.spike_guard(then="back")),
     'ValueError: spike_guard.* goes back with every optimizer: write then="skip"'),
    (lambda: fl.pipeline(fl.using("a"))(fl.raw(lambda state, batch: None)),
     "ValueError: using.* says which optimizers update, but .* ignore it"),
    (lambda: fl.pipeline(fl.using("a"))(fl.alternate({"a": using_none(), "b": using_none()})),
     "ValueError: using.* says which optimizers update, but each of the steps a, b"),
    (lambda: fl.alternate({"a": using("a"), "b": using_none()}),
     "ValueError: alternate: using.* names optimizers, and a turn has only its own"),
])  # fmt: skip
def test_what_cannot_be_composed_is_refused(make, said):
    with pytest.raises((TypeError, ValueError)) as raised:
        make()
    assert re.search(said, found := f"{raised.type.__name__}: {raised.value}", re.DOTALL), found


def using_none():
    return fl.pipeline()(toy_loss)


def with_lbfgs():
    model = Toy()
    made = {"adam": Adam(model.parameters()), "lbfgs": LBFGS(model.parameters())}
    return fl.TrainState.create(model, made, seed=0)


@pytest.mark.parametrize(("step", "make", "said"), [
    (using("c"), lambda: on_one_weight(a=1.0, b=1.0),
     "using names the optimizer 'c', but this state has a, b$"),
    (using("c"), lambda: fl.TrainState.create(m := Toy(), SGD(m.parameters())),
     "this state has one optimizer, without a name: leave using out, or .*create"),
    (using_none(), lambda: on_one_weight(a=1.0, b=1.0),
     r"the parameter w is in two optimizers, 'a' and 'b', .* change it twice: list using\(\"a\"\)"),
    (using("a", "b"), lambda: on_one_weight(a=1.0, b=1.0), "w is in two optimizers, 'a' and 'b'"),
    (using_none(), with_lbfgs, r"LBFGS \('lbfgs'\) evaluates .* list using\(\"lbfgs\"\)"),
    (using("adam", "lbfgs"), with_lbfgs, r"LBFGS \('lbfgs'\) evaluates .* adam, lbfgs"),
    (fl.alternate({"a": using_none(), "b": using_none()}), lambda: on_one_weight(a=1.0, b=1.0),
     "w is in two optimizers, 'a' and 'b', and a round of alternate would change it by both"),
    (using("body", loss_fn=three_and_four, members=(fl.clip(1.0, only="head"),)), head_and_body,
     "clip.* is for parameters that no optimizer of this step updates: head"),
])  # fmt: skip
def test_an_update_that_cannot_be_made_is_refused_when_a_run_starts(step, make, said):
    calls = []
    note = fl.at_start()(lambda state: calls.append(1))
    for begin in (
        lambda state: fl.fit(step, state, [ONE], hooks=(note,)),
        lambda state: step(state, ONE),
        lambda state: fl.dry_run(step, state, [ONE]),
    ):
        state = make()
        with pytest.raises(ValueError, match=re.compile(said, re.DOTALL)):
            begin(state)
        assert state.step == 0 and not calls and not any(p.any() for p in state.model.parameters())


def test_parameters_that_a_hook_lets_two_share_are_noticed():
    state = head_and_body()

    def share(state):
        state.optimizer["body"].add_param_group({"params": [state.model.head]})
        return state

    step = fl.pipeline()(three_and_four)
    with pytest.raises(ValueError, match="head is in two optimizers, 'head' and 'body'"):
        fl.fit(step, state, [ONE] * 3, hooks=(fl.every(steps=2)(share),))


def test_a_loss_without_what_is_used_says_so():
    loss_fn = lambda model, batch: (model.body * batch).mean()
    with pytest.raises(ValueError, match=r"name one of these in using\(...\): body"):
        using("head", loss_fn=loss_fn)(head_and_body(), ONE)


def test_one_with_modes_shares_no_parameter():
    class Modes(SGD):
        def train(self): ...
        def eval(self): ...

    model = Toy()
    with pytest.raises(ValueError, match="w is in two optimizers, 'b' and 'a', and an evaluation"):
        fl.TrainState.create(model, {"a": SGD(model.parameters()), "b": Modes(model.parameters())})


# --- copies and checkpoints


@pytest.mark.parametrize("through", ["snapshot", "a checkpoint"])
def test_shared_parameters_stay_shared_in_a_copy(through, tmp_path):
    state = with_lbfgs()
    square = lambda model, batch: ((model.w - batch) ** 2).mean()
    for name in ("adam", "lbfgs"):
        state, _ = using(name, loss_fn=square)(state, ONE)
    if through == "snapshot":
        copied = fl.snapshot(state)
    else:
        copied = fl.restore(fl.save(state, tmp_path / "saved"), with_lbfgs())
    for one in copied.optimizer.values():
        assert one.param_groups[0]["params"][0] is copied.model.w
    for name in ("lbfgs", "adam"):
        state, _ = using(name, loss_fn=square)(state, ONE)
        copied, _ = using(name, loss_fn=square)(copied, ONE)
    assert_same(state, copied)


def test_pipelines_that_share_a_clip_choose_their_own():
    clip = fl.clip(1.5, only="*")
    state = head_and_body()
    for name in ("head", "body", "head"):
        state, _ = using(name, loss_fn=three_and_four, members=(clip,))(state, ONE)
    assert weights(state) == (pytest.approx(-3.0), pytest.approx(-1.5))


def test_a_middleware_may_replace_an_optimizer_meanwhile():
    @fl.middleware("gradient")
    def replaced():
        def wrap(step):
            def replacing(state, batch):
                state, out = step(state, batch)
                made = SGD(state.model.parameters(), lr=10.0)
                return attrs.evolve(state, optimizer={"a": made}), out

            return replacing

        return wrap

    state, _ = using("a", members=(replaced(),))(on_one_weight(a=1.0, b=1.0), ONE)
    assert state.model.w.item() == -10.0 and [*state.optimizer] == ["a", "b"]
    assert state.optimizer["a"].param_groups[0]["lr"] == 10.0


# --- beside other kinds of steps


def test_an_optimizer_that_was_replaced_between_updates_is_used():
    state = on_one_weight(a=1.0, b=1.0)
    state, _ = using("a")(state, ONE)
    made = {name: SGD(state.model.parameters(), lr=10.0) for name in state.optimizer}
    state, _ = using("a")(attrs.evolve(state, optimizer=made), ONE)
    assert state.model.w.item() == -11.0 and state.optimizer["a"] is made["a"]


def test_a_function_that_makes_gradients_leaves_those_that_are_used():
    def gradients(state, batch):
        state.model.head.grad, state.model.body.grad = torch.tensor(3.0), torch.tensor(4.0)
        return fl.Output(torch.tensor(0.0), weight=1)

    step = fl.pipeline(fl.using("body"), fl.clip(2.0))(fl.raw(gradients, updates=False))
    state, out = step(head_and_body(), ONE)
    assert weights(state) == (0.0, pytest.approx(-2.0)) and state.updates == {"head": 0, "body": 1}
    assert out.metrics["grad_norm"].compute() == 4.0


def test_a_function_that_updates_by_itself_may_call_any():
    def both(state, batch):
        for one in state.optimizer.values():
            state.model.w.grad = torch.ones(())
            one.step()
        return fl.Output(torch.tensor(0.0), weight=1)

    state = fl.fit(fl.raw(both), on_one_weight(a=1.0, b=2.0), [ONE], hooks=())
    assert state.model.w.item() == -3.0 and state.updates == {"a": 1, "b": 1}


def test_lbfgs_may_take_a_turn():
    model = Parts()
    optimizers = {"head": LBFGS([model.head]), "body": SGD([model.body], lr=0.5)}
    state = fl.TrainState.create(model, optimizers, seed=0)
    of_head = lambda model, batch: ((model.head - 2 * batch) ** 2).mean()
    of_body = lambda model, batch: ((model.body - model.head * batch) ** 2).mean()
    step = fl.alternate({"head": fl.pipeline()(of_head), "body": fl.pipeline()(of_body)})
    state = fl.fit(step, state, [ONE], hooks=())
    assert weights(state) == (2.0, 2.0) and state.updates == {"head": 1, "body": 1}


def test_each_phase_has_schedulers_of_its_own():
    halve = lambda optimizer, run: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    members = (fl.torch_scheduler(halve, "a"), fl.torch_scheduler(halve, "b"))
    state, reached = on_one_weight(a=1.0, b=16.0), []
    for phase, name in {"one": "a", "two": "b", "three": "a"}.items():
        step = using(name, members=members)
        state = fl.fit(step, state, [ONE] * 2, epochs=1, phase=phase, hooks=())
        reached.append(state.model.w.item())
    assert reached == [-1.5, -25.5, -27.0]  # 1 + 1/2, 16 + 8, 1 + 1/2
