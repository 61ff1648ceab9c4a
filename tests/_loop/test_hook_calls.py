"""When hooks are called, and what they may return."""

import attrs
import pytest
import torch
from loop_cases import ONE, fit

import fnloop as fl
from fnloop._hooks.hook import Hook
from fnloop.testing import assert_same, toy, toy_loss


def test_hooks_run_in_the_listed_order_after_update_and_evaluation():
    seen = []

    def note(name):
        return lambda state: (seen.append((name, state.step, len(state.history))), state)[1]

    fit(loaders=([ONE] * 2, [ONE]), hooks=(note("a"), note("b")))
    assert seen == [("a", 1, 0), ("b", 1, 0), ("a", 2, 1), ("b", 2, 1)]


def test_a_stopped_run_stays_stopped_until_told_to_continue(caplog):
    seen, stop = [], lambda state: attrs.evolve(state, stop="enough")
    state = fit(hooks=(stop, lambda state: seen.append(state.stop) or state), epochs=9)
    assert (state.step, state.stop, seen) == (1, "enough", ["enough"])  # the others finish
    assert fit(state) is state
    told = "the run was stopped (enough). To continue anyway, pass attrs.evolve(state, stop=None)"
    assert f"nothing to do: {told}" in caplog.text
    assert fit(attrs.evolve(state, stop=None)).epoch == 1


@pytest.mark.parametrize(("added_at", "bias"), [(2, -1.0), (0, -3.0), (None, 0.0)])
def test_parameters_that_a_hook_adds_are_trained_from_then_on(added_at, bias):
    """One that no optimizer has keeps no gradient."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.bias)
    state = fl.TrainState.create(model, torch.optim.SGD([model.weight], lr=1.0))

    class Adds(Hook):
        def begin(self, state):
            return self(state)

        def __call__(self, state):
            if state.step == added_at:
                state.optimizer.add_param_group({"params": [model.bias]})
            return state

    loss_fn = lambda m, b: m(b).mean()
    fl.fit(fl.pipeline()(loss_fn), state, [torch.ones(1, 1)] * 3, hooks=(Adds(),))
    assert (model.bias.item(), model.bias.grad) == (bias, None)


def test_a_hook_that_returns_a_stale_state_is_named():
    kept = []

    def old(state):
        kept.append(state)
        return kept[0]

    with pytest.raises(fl.StaleStateError) as error:
        fit(hooks=(old,))
    assert "old, train" in error.value.__notes__[0]
    assert error.value.state.step == 2
    assert fit(error.value.state).model.w.item() == -3.0


def test_two_checkpoint_hooks_on_one_folder_are_refused(tmp_path):
    saves = (fl.checkpoint(tmp_path / "a"), fl.every(steps=1)(fl.checkpoint(tmp_path / "a")))
    with pytest.raises(ValueError, match=r"two checkpoint hooks share .*give each its own folder"):
        fit(hooks=saves)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_hook_that_rolls_back_rolls_back_the_data_too(at):
    """It returns once to the state after update 1: the run equals one that continues from there."""
    kept, loaders = [], [torch.tensor([x]) for x in (1.0, 2.0, 4.0)]
    halving = fl.pipeline(fl.schedule(lambda i, total: 1 - i / total))(toy_loss)
    keep = lambda state: kept.append(fl.snapshot(state)) or state
    hooks = (
        fl.once(fl.when(lambda state: state.step == 1)(keep).hook),
        fl.when(lambda state: state.step == at)(fl.once(lambda state: kept[0], name="back")),
    )
    state = fl.fit(halving, toy(), loaders, epochs=2, hooks=hooks)
    slots = {name: value for name, value in state.slots.items() if not name.startswith("once:")}
    whole = fl.fit(halving, toy(), loaders, epochs=2, hooks=())
    assert_same(attrs.evolve(state, slots=slots), whole)


@pytest.mark.parametrize("into", ["a copy", "another", "itself"])
@pytest.mark.parametrize("at", [2, 3, 4, 5])
def test_a_hook_may_go_back_to_a_checkpoint_of_its_run(into, at, tmp_path):
    """The state after update 1 is restored once: the run equals one that continues from there."""
    loaders, states = [torch.tensor([x]) for x in (1.0, 2.0, 4.0)], {"another": lambda state: toy()}
    states |= {"itself": lambda state: state, "a copy": fl.snapshot}
    seen = []

    def back(state):
        seen.append(state.step)
        if seen == [1]:
            fl.save(state, tmp_path / "a")
        if seen == [*range(1, at + 1)]:
            return fl.restore(tmp_path / "a", states[into](state))
        return state

    halving = fl.pipeline(fl.schedule(lambda i, total: 1 - i / total))(toy_loss)
    state = fl.fit(halving, toy(), loaders, epochs=2, hooks=(back,))
    assert seen == [*range(1, at + 1), *range(2, 7)]
    assert_same(state, fl.fit(halving, toy(), loaders, epochs=2, hooks=()))


OTHERS = {
    "created": lambda state: toy(),
    "created of the model": lambda state: fl.TrainState.create(state.model, state.optimizer),
    "a fork": lambda state: fl.fork(state, {"lr": [1.0]})["lr=1"],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("method", ["__call__", "flush"])
@pytest.mark.parametrize("around", [lambda hook: hook, fl.every(steps=2)], ids=["alone", "every"])
def test_a_state_of_another_run_is_refused_and_nothing_is_lost(method, other, around):
    class Mistaken(Hook):
        def __call__(self, state):
            return state

    setattr(Mistaken, method, lambda self, state: other(state))
    name = "" if method == "__call__" else f"the method {method} of "
    message = rf"^{name}.*Mistaken.* returned a state of another run"
    with pytest.raises(ValueError, match=message) as e:
        fit(hooks=(around(Mistaken()),))
    assert fit(e.value.state, epochs=1).model.w.item() == -3.0


def test_a_hook_that_returns_an_average_is_named():
    step = fl.pipeline(fl.ema(0.5))(toy_loss)
    with pytest.raises(ValueError, match=r"average: this state is averaged\(state, \"ema\"\)"):
        fl.fit(step, toy(), [ONE] * 2, hooks=(average,))


def average(state):
    return fl.averaged(state)


def test_a_hook_that_makes_an_update_by_itself_is_refused():
    step = fl.pipeline()(toy_loss)
    with pytest.raises(ValueError, match=r"changed state\.step from 1 to 2, but a run counts"):
        fit(hooks=(lambda state: step(state, ONE)[0],))


@pytest.mark.parametrize(("hooks", "message"), [
    (fl.progress(), "hooks as a tuple"), ((fl.progress,), r"Call it: progress\(...\)"),
    ((lambda state, out: state,), "takes the state and nothing else, but <lambda> takes"),
    ((fl.plateau("valid/loss"),), r"is middleware: write pipeline\(plateau\("),
    ((lambda state: None,), "returned None. Did you forget 'return state'"),
])  # fmt: skip
def test_bad_hooks_are_refused_by_name(hooks, message):
    with pytest.raises(TypeError, match=message):
        fit(hooks=hooks)
