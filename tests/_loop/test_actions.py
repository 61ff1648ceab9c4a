"""What a run does next: each action, and runs that are cut between any two of them."""

import itertools

import attrs
import pytest
import torch
from cut_actions import Paused, check_parts, pausing, run_in_parts, try_programs
from loop_cases import ONE
from random_programs import Program, quiet, whole_run

import fnloop as fl
from fnloop._core.runs import Boundary, Call, End, Flush, Meet, Stop, Update
from fnloop._loop.boundary import resumed
from fnloop.testing import toy, toy_loss


def interrupt(state):
    return attrs.evolve(state, stop=Stop("job", "job"))


def seen(name, calls):
    def see(state):
        calls.append((name, state.step, state.todo))
        return state

    return see


def test_a_hook_sees_what_comes_after_it():
    calls = []
    hooks = (seen("a", calls), fl.at_end()(seen("b", calls)))
    state = fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 2, hooks=hooks)
    assert calls == [
        ("a", 1, (Call("boundary", 1), Update())),
        ("a", 2, (Call("boundary", 1), Meet(ended=True), Flush())),
        ("b", 2, (Meet(ended=True), Flush())),
    ]
    assert state.todo == ()


def test_a_snapshot_of_a_hook_has_the_hooks_after_it_still_to_call():
    kept, calls = [], []
    keep = fl.every(steps=2)(lambda state: kept.append(fl.snapshot(state)) or state)
    hooks = (keep, seen("after", calls))
    step = fl.pipeline()(toy_loss)
    fl.fit(step, toy(), [ONE] * 3, hooks=hooks)
    assert [at for _, at, _ in calls] == [1, 2, 3]
    fl.fit(step, kept[0], [ONE] * 3, hooks=hooks)
    assert [at for _, at, _ in calls] == [1, 2, 3, 2, 3]


def test_a_hook_that_stops_puts_the_end_on_the_list():
    calls = []
    halt = lambda state: attrs.evolve(state, stop="enough") if state.step == 1 else state
    hooks = (halt, seen("a", calls), fl.at_end()(seen("b", calls)))
    state = fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 3, hooks=hooks)
    tail = (Meet(ended=False), End(), Flush("enough"))
    assert calls[0] == ("a", 1, (Call("boundary", 2), *tail))
    assert calls[-1] == ("b", 1, (Flush("enough"),)) and state.todo == ()


@pytest.mark.parametrize(("todo", "reached", "first"), [
    ((), False, (Update(),)), ((), True, ()), ((Update(),), True, ()),
    ((Call("boundary", 1), Update()), False, (Call("boundary", 1), Update())),
    # The target was raised: what is left of the boundary is done, and not the end.
    ((Call("boundary", 1), Meet(True), Flush()), False, (Call("boundary", 1), Update())),
    ((Meet(True), End(), Flush()), False, (Update(),)),
    # It was lowered to here.
    ((Boundary(), Update()), True, (Boundary(), Meet(False), End(), Flush())),
])  # fmt: skip
def test_what_was_left_is_done_first(todo, reached, first):
    state = attrs.evolve(toy(), todo=todo)
    assert resumed(state, reached, starts=False).todo == first


@pytest.mark.parametrize("order", ["checkpoint last", "checkpoint first"])
def test_a_script_that_has_ended_has_nothing_to_do(order, tmp_path, caplog):
    def script():
        rows = fl.to_jsonl(tmp_path / "rows.jsonl", events=True)
        hooks = (rows, fl.every(epochs=1)(fl.checkpoint(tmp_path / "run")))
        hooks = hooks if order == "checkpoint last" else hooks[::-1]
        state = fl.resume(tmp_path / "run", toy())
        state = fl.fit(fl.pipeline()(toy_loss), state, [ONE] * 3, epochs=2, hooks=hooks)
        return state.step, state.todo, (tmp_path / "rows.jsonl").read_text()

    first = script()
    assert first[:2] == (6, ()) and not caplog.messages
    assert script() == script() == first
    assert len(caplog.messages) == 2 and "nothing to do" in caplog.text


def test_a_clock_counts_on_where_a_run_was_left(clock, tmp_path):
    """An update takes a second. The hook is due every 5 seconds from the first boundary on."""
    seen = []

    def loss_fn(model, batch):
        clock.now += 1.0
        return toy_loss(model, batch)

    state = toy()
    for at in (4, 9, 0):
        hook = fl.every(seconds=5)(lambda state: seen.append(state.step) or state)
        halt = fl.when(lambda state, at=at: state.step == at)(interrupt)
        state = fl.fit(fl.pipeline()(loss_fn), state, [ONE] * 17, steps=17, hooks=(hook, halt))
        state = fl.restore(fl.save(state, tmp_path / "saved"), toy())
        clock.now += 1000.0  # between two runs
    assert seen == [6, 11, 16]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_random_programs_may_be_cut_after_every_action(seed):
    found, counts = try_programs(seed, range(30))
    assert not found, "\n\n".join(found)
    assert counts["programs"] > 20


AT_END, WITHIN = "fl.inspect(see('see'), every=fl.at_end())", "fl.inspect(see('see'))"


@pytest.mark.parametrize(("hook", "steps"), [
    (AT_END, [4]), (f"fl.on_main({AT_END})", [4]), (f"fl.at_end()({WITHIN})", [4]),
    (f"fl.every(epochs=1)({WITHIN})", [2, 4]),
    (f"fl.when_improved('train/loss')({WITHIN})", [2, 4]),
    (f"fl.every(epochs=1)(fl.once({WITHIN}, name='once'))", [2]),
    # It waits from the third update on, and is called once.
    ("fl.inspect(see('see'), every=fl.every(steps=3) | fl.at_end())", [4]),
    ("fl.inspect(see('see'), every=fl.every(epochs=1) | fl.at_end())", [2, 4]),
    ("fl.on_main(fl.inspect(see('see'), every=fl.every(steps=3) | fl.at_end()))", [4]),
])  # fmt: skip
@pytest.mark.parametrize("evaluate_every", ["fl.every(epochs=1)", "fl.every(steps=2)"])
def test_outputs_that_a_cut_run_has_lost_are_made_again(hook, steps, evaluate_every):
    """Two epochs of two updates. A hook holds outputs until it is called, or until the end."""
    program = Program(train="batches(2)", hooks=(hook,), evaluate_every=evaluate_every)
    check_parts(program, itertools.repeat(1))
    with quiet():
        _, world = whole_run(program)
    assert [call[1] for call in world.calls] == steps


@pytest.mark.parametrize("every", ["fl.at_end()", "fl.every(epochs=2) | fl.at_end()"])
@pytest.mark.parametrize(("test", "metrics"), [
    ("fl.at_end()", ["ap", "loss"]), ("None", ["ap"]),
])  # fmt: skip
def test_numbers_of_outputs_that_a_cut_run_has_lost_are_in_the_same_record(every, test, metrics):
    """Three epochs of two updates. The closing record has "valid/ap", and "test/loss" if asked."""
    valid = {"valid": "batches(2, first=50)", "test": "batches(1, first=70)"}
    program = Program(
        train="batches(2)", valid=valid, fits=({"epochs": 3},),
        hooks=(f"fl.inspect(numbers('ap'), every={every})",),
        evaluate_every=f"{{'valid': fl.every(epochs=1), 'test': {test}}}",
    )  # fmt: skip
    check_parts(program, itertools.repeat(1))
    with quiet():
        state, _ = whole_run(program)
    *_, last = state.history
    assert last.closing and last.metrics["valid/ap"] == 3.0
    assert [name for name in ("test/loss", "valid/loss") if name in last.metrics] == [
        f"test/{name}" for name in metrics if name == "loss"
    ]


@pytest.mark.parametrize("halt", ["", "fl.when(lambda s: s.step == 4)(stop('enough'))"])
def test_a_function_that_adds_no_numbers_is_called_once_at_a_cut_end(halt):
    valid = {"valid": "batches(2, first=50)", "test": "batches(1, first=70)"}
    program = Program(
        train="batches(2)", valid=valid, hooks=(AT_END, halt) if halt else (AT_END,),
        evaluate_every="{'valid': fl.every(epochs=1), 'test': fl.at_end()}",
    )  # fmt: skip
    check_parts(program, itertools.repeat(1))
    with quiet():
        state, world = whole_run(program)
    assert [call[1] for call in world.calls] == [4]
    assert [record.closing for record in state.history] == [False, False, True]


@pytest.mark.parametrize("wrap", [fl.every(epochs=1), fl.on_main, lambda hook: hook])
def test_outputs_that_are_made_again_are_the_same_bit_for_bit(wrap, tmp_path):
    def drawing(model, batch):
        loss, aux = toy_loss(model, batch)
        return loss, {**aux, "drawn": torch.rand(())}

    def run(size):
        seen, state, is_cut = [], toy(), True
        see = lambda state, outputs: seen.append([out.aux["drawn"].item() for out in outputs])
        while is_cut:
            hooks = (wrap(fl.inspect(see, every=fl.every(epochs=1) | fl.at_end())),)
            try:
                with pausing(size):
                    fl.fit(fl.pipeline()(drawing), state, ([ONE], [ONE] * 2), epochs=2, hooks=hooks)
                is_cut = False
            except Paused as pause:
                state = fl.restore(fl.save(pause.state, tmp_path / "cut"), toy())
        return seen

    whole = run(10**9)
    assert len(whole) == 2 and len({*whole[0]}) == 2
    assert run(1) == whole


def test_a_program_is_cut_after_each_of_its_actions(tmp_path):
    program = Program(hooks=("fl.every(steps=1)(note('note'))",))
    with quiet():
        _, calls = run_in_parts(program, iter([1] * 100), tmp_path)
    assert [call[1] for call in calls] == [*range(1, 9)]
