"""``exact=True`` in one process: the tree, its numbers, and what is refused."""

import attrs
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from after_steps import after
from torch import nn
from toy_runs import ONE, assert_same_weights, fitted, xs

import fnloop as fl
from fnloop._backend.processes import Backend
from fnloop._extensions.engines.exact import (
    TreeSum,
    classes_of,
    depth_first,
    join,
    layout_of,
    rows_of,
    sum_rows,
)
from fnloop.testing import no_host_reads, toy, toy_loss


def exact_toy(**settings):
    state = toy(**settings)
    return fl.TrainState.create(state.model, state.optimizer, seed=0, exact=True)


def created(model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fl.TrainState.create(model, optimizer, seed=0, exact=True, **settings)


# --- the tree


def spelled(even, odd):
    """Combine two names, so that the result shows the tree."""
    if even is None or odd is None:
        return even or odd
    return f"({even} {odd})"


def test_the_tree_combines_even_and_odd_positions():
    tree = TreeSum(spelled, 8)
    for position in range(8):
        tree.add(position, str(position))
    assert tree.parts == {range(8): "(((0 4) (2 6)) ((1 5) (3 7)))"}


def shared_out(names, processes):
    """Return the tree as processes make it that have one batch in turn, the last round padded."""
    rounds = -(-len(names) // processes)
    leaves, parts = rounds * processes, {}
    for rank in range(processes):
        tree = TreeSum(spelled, leaves, processes)
        for n in depth_first(rounds, rank, processes):
            position = n * processes + rank
            tree.add(position, names[position] if position < len(names) else None)
        assert {*tree.parts} == {*classes_of(rank, leaves, processes)}
        parts |= tree.parts
    return join(range(leaves), parts, spelled)


def test_the_tree_is_the_same_for_any_number_of_processes():
    for batches in range(1, 20):
        names = [f"{n}" for n in range(batches)]
        assert {shared_out(names, processes) for processes in range(1, 9)} == {shared_out(names, 1)}


def test_in_the_order_of_the_tree_few_parts_are_held():
    most = {}
    for order in (depth_first(16), range(16)):
        tree, held = TreeSum(spelled, 16), []
        for position in order:
            tree.add(position, "x")
            held.append(len(tree.parts))
        most[order] = max(held)
    assert [*most.values()] == [4, 8]


def test_the_sum_of_four_numbers_is_that_of_the_tree():
    """(1e8 - 1e8) and (1 + 1) are 0 and 2. In order, 1e8 + 1 is 1e8, and the last 1 is left."""
    seen, numbers = [], [1e8, 1.0, -1e8, 1.0]
    loss_fn = lambda model, batch: seen.append(batch.item()) or toy_loss(model, batch)
    step = fl.pipeline(fl.accumulate(4))(toy_loss)
    assert step(exact_toy(), xs(*numbers))[0].model.w.item() == -2 / 4
    assert step(toy(), xs(*numbers))[0].model.w.item() == -1 / 4
    state = fitted(numbers, fl.accumulate(4), loss_fn=loss_fn, state=exact_toy())
    assert seen == [1e8, -1e8, 1.0, 1.0]  # a run gives them in the order of the tree
    assert state.model.w.item() == -2 / 4


# --- the numbers of an update


def by_items(model, batch):
    loss, aux = toy_loss(model, batch[0])
    return loss, {**aux, "weight": batch[1]}


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_batches_count_by_their_items(kind):
    """(1·1 + 2·3 + 6·4) / 8 = 3.875; the window of fewer batches is (1·1 + 2·3) / 4."""
    window = [(torch.tensor([x]), kind(n)) for x, n in ((1.0, 1), (2.0, 3), (6.0, 4))]
    step = fl.pipeline(fl.accumulate(4))(by_items)
    state, out = step(exact_toy(), window)
    assert (state.model.w.item(), float(out.weight)) == (-3.875, 8)
    assert step(exact_toy(), window[:2])[0].model.w.item() == -1.75


def test_a_weight_that_is_not_a_number_of_items_is_seen_in_the_report():
    step = fl.pipeline(fl.accumulate(2))(by_items)
    window = [(ONE, torch.tensor(2.0)), (ONE * 5, torch.tensor(-1.0))]
    state, out = step(exact_toy(), window)
    assert state.model.w.item() == -1
    assert out.weight.isnan()


def test_one_batch_makes_the_update_of_a_run_without_exact():
    def run(exact):
        torch.manual_seed(0)
        data = [torch.randn(3, 4) for _ in range(5)]
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = fl.TrainState.create(model, optimizer, seed=0, exact=exact)
        loss_fn = lambda model, x: model(x).square().mean()
        return fitted(data, fl.clip(0.1), loss_fn=loss_fn, state=state, epochs=2)

    assert_same_weights(run(False), run(True))


def test_clipping_inside_a_window_is_of_each_batch():
    """Also if another window has failed."""
    state, members = exact_toy(), (fl.clip(1.0), fl.accumulate(2))
    with pytest.raises(ZeroDivisionError):
        fl.pipeline(*members)(lambda model, batch: 1 / 0)(state, xs(1.0, 2.0))
    state, _ = fl.pipeline()(toy_loss)(state, ONE * 3)
    assert state.model.w.item() == -3
    state, out = fl.pipeline(*members)(toy_loss)(state, xs(4.0, 0.5))
    assert state.model.w.item() == pytest.approx(-3.75)
    assert out.metrics["grad_norm"].compute() == 2.25


def test_batches_that_are_left_out_do_not_count():
    def positive(model, batch):
        return toy_loss(model, batch) if batch.item() > 0 else fl.skip("negative")

    step = fl.pipeline(fl.accumulate(3))(positive)
    state, _ = step(exact_toy(), xs(-5.0, 2.0, 4.0))
    assert state.model.w.item() == -3
    state, out = step(state, xs(-5.0, -6.0))
    assert (out.skip, state.step, state.skipped) == ("negative", 1, 1)


def test_metrics_of_all_kinds_are_summed_over_the_batches_that_are_there():
    kinds = {"mean": fl.Mean(6.0, 2), "sum": fl.Sum(3), "min": fl.Min(3), "max": fl.Max(-3)}
    one = fl.Output(torch.tensor(1.0), 1, {}, {**kinds, "last": fl.Last(7)})
    more = {"mean": fl.Mean(1.0, 5), "sum": fl.Sum(4), "min": fl.Min(1), "max": fl.Max(-1)}
    two = fl.Output(torch.tensor(4.0), 2, {}, {**more, "last": fl.Last(8)})
    layout = layout_of(one.metrics)
    rows = rows_of([None, one, None, two, None], layout, torch.device("cpu"))
    total, weight, reported, metrics = sum_rows(rows, layout)
    assert (total, weight, reported) == (9, 3, 3)
    assert {name: metric.compute() for name, metric in metrics.items()} == {
        "mean": 1.0, "sum": 7.0, "min": 1.0, "max": -1.0, "last": 8.0
    }  # fmt: skip


def test_draws_follow_the_batch_and_not_the_update():
    """Two epochs of four batches: windows of 1, 2 and 4 draw the same for each batch."""

    def drawn(window):
        seen = {}

        def loss_fn(model, batch):
            seen.setdefault(batch.item(), []).append(torch.rand(()).item())
            return toy_loss(model, batch)

        settings = {"loss_fn": loss_fn, "state": exact_toy(), "epochs": 2}
        fitted([1, 2, 3, 4], fl.accumulate(window), **settings)
        return seen

    once = drawn(1)
    assert once == drawn(2) == drawn(4)
    assert len({number for both in once.values() for number in both}) == 8


def test_an_update_reads_nothing_to_the_host():
    step = fl.pipeline(fl.accumulate(4), fl.clip(1.0), fl.metric(x=lambda aux, x: x.mean()))
    state = exact_toy()
    with no_host_reads():
        step(toy_loss)(state, xs(1.0, 2.0, 3.0))


# --- what is refused


def test_a_layer_with_running_statistics_is_refused_before_the_first_update():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    run = lambda state: fitted([torch.randn(4, 2)], loss_fn=squares, state=state)
    with pytest.raises(NotImplementedError, match=r'1 keeps running statistics.*freeze.state, "1"'):
        run(created(model))
    assert run(fl.freeze(created(model), "1", statistics="kept")).step == 1
    model[1] = nn.BatchNorm1d(2, track_running_stats=False)
    assert run(created(model)).step == 1


def squares(model, x):
    return model(x).square().mean()


class Counts(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


@pytest.mark.parametrize(("make", "batch", "said"), [
    (Counts, torch.ones(1, 2), "changes the buffer 'seen'"),
    (lambda: nn.Embedding(3, 2, sparse=True), torch.tensor([1]), "cannot sum sparse gradients"),
], ids=["buffer", "sparse"])  # fmt: skip
def test_what_cannot_be_summed_is_refused_before_the_weights_change(make, batch, said):
    state = created(make())
    before = state.model.weight.tolist()
    with pytest.raises(NotImplementedError, match=said):
        fl.pipeline()(squares)(state, batch)
    assert state.model.weight.tolist() == before


def test_batches_that_report_other_metrics_are_refused():
    large = lambda x: {"large": fl.Sum(1)} if x.item() > 2 else {}
    sometimes = after("forward", lambda _, x, out: attrs.evolve(out, metrics=large(x)))
    step = fl.pipeline(sometimes, fl.accumulate(2))(toy_loss)
    assert step(exact_toy(), xs(3.0, 4.0))[0].step == 1
    with pytest.raises(ValueError, match="every batch has to report the same metrics"):
        step(exact_toy(), xs(1.0, 4.0))


def in_windows(model, batch, carry):
    return toy_loss(model, batch)[0], {}, carry


@pytest.mark.parametrize(("step", "name"), [
    (fl.raw(lambda state, batch: fl.Output(ONE[0], 1)), "raw"),
    (fl.pipeline(fl.tbptt(2))(in_windows), "tbptt"),
    (fl.pipeline(fl.retry_on_oom())(toy_loss), "retry_on_oom"),
    (fl.pipeline(fl.closure(create_graph=True))(toy_loss), "closure"),
])  # fmt: skip
def test_steps_that_cannot_be_exact_say_so_before_the_first_update(step, name):
    state = exact_toy()
    with pytest.raises(NotImplementedError, match=f"{name}.* exact=True.*(Leave|List)"):
        step(state, ONE)
    assert state.step == 0


def test_turns_and_graphs_cannot_be_exact(recorders):
    model, one = nn.Linear(1, 1), fl.pipeline()(squares)
    named = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}
    state = fl.TrainState.create(model, named, exact=True)
    with pytest.raises(NotImplementedError, match=r"alternate does not work with.* exact=True"):
        fl.alternate({"weight": one, "bias": one})(state, torch.ones(1, 1))
    with pytest.raises(RuntimeError, match=r"cuda_graph cannot capture an update .*exact=True"):
        fitted([1] * 3, fl.cuda_graph(warmup=1), state=exact_toy())


@pytest.mark.usefixtures("no_state_of_accelerate_is_left")
def test_settings_that_an_exact_run_would_not_use_are_refused():
    model = nn.Linear(1, 1)
    handlers = [DistributedDataParallelKwargs(bucket_cap_mb=1)]
    with pytest.raises(ValueError, match="would do nothing: leave DistributedDataParallelKwargs"):
        created(model, backend=Accelerator(cpu=True, kwargs_handlers=handlers))
    assert created(model, backend=Backend("cpu")).backend.exact


# --- checkpoints


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_continues_with_another_setting_warns(tmp_path, caplog, first):
    new, other = (exact_toy, toy)[:: 1 if first else -1]
    path = fl.save(new(), tmp_path / "a")
    fl.restore(path, new())
    fl.restore(path, other(), only=("model",))
    assert not caplog.messages
    fl.restore(path, other())
    said = "continues without" if first else "had no exact=True until here"
    assert said in caplog.text


def test_a_batch_in_pieces_has_the_mean_gradient_of_its_samples():
    """1, 2 and 6, in pieces of 2 and 1: 3."""
    state = fitted([torch.tensor([1.0, 2.0, 6.0])], fl.microbatch(2), state=exact_toy())
    assert state.model.w.item() == -3.0
