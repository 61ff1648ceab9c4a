"""live_plot: one figure of the history, redrawn as it grows."""

import sys
from types import SimpleNamespace

import attrs
import pytest
import torch

import fnloop as fl
from fnloop import History, Record, live_plot
from fnloop._backend.processes import Backend
from fnloop._hooks import look
from fnloop.testing import no_host_reads, toy, toy_loss

pytest.importorskip("matplotlib")

ONE = torch.tensor([1.0])
STEP = fl.pipeline()(toy_loss)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(look, "time", clock)
    return clock


@pytest.fixture
def drawn(monkeypatch):
    """Collect the number of records and the settings of each drawing."""
    drawn = []
    plot = History.plot
    monkeypatch.setattr(
        History,
        "plot",
        lambda self, **settings: drawn.append((len(self), settings)) or plot(self, **settings),
    )
    return drawn


def records(drawn):
    return [n for n, _ in drawn]


def skipped(state, out):
    return state, attrs.evolve(out, skip="for a test")


def run(hook, epochs=5, **settings):
    return fl.fit(STEP, toy(), [ONE] * 2, epochs=epochs, hooks=(hook,), **settings)


def test_a_file_has_the_figure_of_the_whole_run(tmp_path, drawn):
    run(live_plot(tmp_path / "run.png"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["run.png"]  # no temporary file is left
    assert records(drawn)[-1] == 5


@pytest.mark.slow  # draws
def test_it_draws_as_often_as_refresh_allows_and_at_the_end(tmp_path, drawn, clock):
    run(live_plot(tmp_path / "run.svg", refresh=0))
    assert records(drawn) == [1, 2, 3, 4, 5]
    drawn.clear()
    run(live_plot(tmp_path / "run.svg"))  # the clock stands still
    assert records(drawn) == [1, 5]


@pytest.mark.slow  # draws
def test_it_draws_a_tenth_of_the_time_at_most(tmp_path, monkeypatch, clock):
    began = []
    plot = History.plot

    def slow(self, **settings):
        began.append(clock.now)
        clock.now += 2.0
        return plot(self, **settings)

    def second(state):
        clock.now += 1.0
        return state

    monkeypatch.setattr(History, "plot", slow)
    hook = live_plot(tmp_path / "run.svg")
    fl.fit(STEP, toy(), [ONE], epochs=45, hooks=(hook, second))
    assert [at - 1000 for at in began] == [0, 20, 40, 51]  # and at the end


def test_it_draws_the_intervals_of_an_epoch(tmp_path, monkeypatch):
    figures = []
    plot = History.plot
    monkeypatch.setattr(
        History, "plot", lambda self, **kwargs: figures.append(plot(self, **kwargs)) or figures[-1]
    )
    hook, state = live_plot(tmp_path / "run.svg", refresh=0), toy()
    for step in (1, 2, 3):
        record = Record(0, step, {"recent/loss": 1.0 / step})
        state = hook(attrs.evolve(state, history=state.history.append(record)))
    assert [len(figure.axes[0].lines[0].get_xdata()) for figure in figures] == [1, 2, 3]
    assert figures[0].axes[0].lines[0].get_label() == "recent"


@pytest.mark.slow  # draws
def test_it_draws_each_history_once(tmp_path, drawn, clock):
    def second(state):
        clock.now += 1.0
        return state

    fl.fit(STEP, toy(), [ONE] * 4, epochs=2, hooks=(live_plot(tmp_path / "run.svg"), second))
    assert records(drawn) == [1, 2]


@pytest.mark.slow  # draws
def test_called_rarely_it_draws_all_records_so_far(tmp_path, drawn):
    run(fl.every(steps=3)(live_plot(tmp_path / "run.svg", refresh=0)))  # an epoch has two steps
    assert records(drawn) == [1, 3, 4, 5]  # the last record is always drawn


def test_the_last_record_is_drawn_after_an_exception(tmp_path, drawn, clock):
    def fail(state):
        return 1 / (7 - state.step) and state

    with pytest.raises(ZeroDivisionError):
        fl.fit(STEP, toy(), [ONE] * 2, epochs=5, hooks=(live_plot(tmp_path / "run.svg"), fail))
    assert records(drawn) == [1, 3]


def test_a_folder_that_cannot_be_created_is_an_error_in_the_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        run(live_plot(tmp_path / "file" / "run.svg"))


def test_a_missing_folder_is_created(tmp_path):
    run(live_plot(tmp_path / "runs" / "a" / "run.svg"))
    assert (tmp_path / "runs" / "a" / "run.svg").exists()


@pytest.mark.parametrize("name", ["run", "run.foo"])
def test_a_path_that_cannot_hold_a_figure_is_an_error_when_composing(name):
    with pytest.raises(
        ValueError,
        match=rf"a file whose suffix is one of .*png.* such as 'run.png'; got '.*{name}'",
    ):
        live_plot(name)
    with pytest.raises(
        TypeError, match=r'live_plot expects file as a path, such as "run.png"; got 3'
    ):
        live_plot(3)
    with pytest.raises(
        ValueError, match=r'live_plot expects file as a path, such as "run.png"; got an empty one'
    ):
        live_plot("")


def test_the_settings_are_passed_to_plot(tmp_path, drawn):
    run(live_plot(tmp_path / "run.svg", mode="max", x="epoch"), epochs=1)
    assert drawn == [(1, {"mode": "max", "x": "epoch"})]


def test_the_closing_record_of_a_stopped_run_is_drawn(tmp_path, drawn):
    stop = fl.when(lambda state: state.step == 3)(lambda state: attrs.evolve(state, stop="enough"))
    fl.fit(
        STEP, toy(), [ONE] * 2, epochs=5, hooks=(live_plot(tmp_path / "run.svg", refresh=0), stop)
    )
    assert records(drawn) == [1, 2]


def test_without_a_metric_it_draws_nothing(tmp_path):
    skips = fl.Middleware(
        "skips", forward=lambda step: lambda state, batch: skipped(*step(state, batch))
    )
    state = fl.fit(
        fl.pipeline(skips)(toy_loss), toy(), [ONE], hooks=(live_plot(tmp_path / "run.svg"),)
    )
    assert [record.metrics for record in state.history] == [{}]
    assert list(tmp_path.iterdir()) == []


def test_it_reads_nothing_from_the_device(tmp_path):
    state = run(lambda state: state)
    hook = live_plot(tmp_path / "run.svg", refresh=0)
    with no_host_reads():
        assert hook(state) is state
    hook.close()
    assert (tmp_path / "run.svg").exists()


def test_only_the_main_process_draws(tmp_path):
    state = attrs.evolve(run(lambda state: state), backend=Backend("cpu", 1, 2))
    hook = live_plot(tmp_path / "run.svg", refresh=0)
    hook.flush(hook(state))
    hook.close()
    assert list(tmp_path.iterdir()) == []


def test_outside_a_notebook_it_needs_a_file():
    with pytest.raises(
        ValueError, match=r"this is not one\. To draw into a file, write live_plot\('run.png'\)"
    ):
        live_plot()


@pytest.mark.parametrize("settings", [
    {"refresh": -1.0}, {"refresh": "1"}, {"x": "seconds"}, {"mode": "low"},
    {"mode": {"loss": "low"}},
])  # fmt: skip
def test_a_wrong_setting_is_an_error_when_composing(settings):
    with pytest.raises(ValueError, match="expects"):
        live_plot("run.png", **settings)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    with pytest.raises(
        ImportError, match=r"live_plot needs matplotlib: pip install 'fnloop\[plot\]'"
    ):
        live_plot("run.png")


def test_the_repr_is_the_call():
    assert repr(live_plot("run.png")) == "live_plot('run.png')"
    assert (
        repr(live_plot("run.png", x="epoch", refresh=5))
        == "live_plot('run.png', x='epoch', refresh=5)"
    )
