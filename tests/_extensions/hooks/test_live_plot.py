"""live_plot: one figure of the history, redrawn as it grows."""

import contextlib
import sys

import attrs
import pytest
from sample_hooks import raise_at, stop_at
from toy_runs import fit

import fnloop as fl
from fnloop import History, live_plot
from fnloop._backend.processes import Backend
from fnloop._extensions.hooks import look
from fnloop.testing import no_host_reads

pytest.importorskip("matplotlib")


@pytest.fixture
def clock(clock, monkeypatch):
    monkeypatch.setattr(look, "time", clock)
    return clock


@pytest.fixture
def drawn(monkeypatch):
    drawn, plot = [], History.plot

    def noting(self, **settings):
        drawn.append((len(self), settings, plot(self, **settings)))
        return drawn[-1][2]

    monkeypatch.setattr(History, "plot", noting)
    return drawn


def run(*hooks, **settings):
    return fit(*hooks, **{"train": 2, "epochs": 5, **settings})


def test_a_file_has_the_figure_of_the_whole_run(tmp_path, drawn):
    run(live_plot(tmp_path / "runs" / "a.png", mode="max", x="epoch"), epochs=1)
    (path,) = (tmp_path / "runs").iterdir()  # no temporary file is left
    assert path.name == "a.png" and path.read_bytes().startswith(b"\x89PNG")
    assert [parts[:2] for parts in drawn] == [(1, {"mode": "max", "x": "epoch"})]


REFRESHED = {"refresh": 0}


@pytest.mark.slow  # draws
@pytest.mark.parametrize(("settings", "wrap", "others", "records"), [
    (REFRESHED, lambda hook: hook, (), [1, 2, 3, 4, 5]),
    ({}, lambda hook: hook, (), [1, 5]),  # the clock stands still: at the end
    (REFRESHED, fl.every(steps=3), (), [1, 3, 4, 5]),  # all so far; the last one is always drawn
    (REFRESHED, lambda hook: hook, (stop_at(3),), [1, 2]),  # the closing record of a stopped run
    ({}, lambda hook: hook, (raise_at(7),), [1, 3]),
])  # fmt: skip
def test_how_often_it_draws(tmp_path, drawn, clock, settings, wrap, others, records):
    hook = wrap(live_plot(tmp_path / "run.svg", **settings))
    with contextlib.suppress(KeyError):
        run(hook, *others)
    assert [count for count, *_ in drawn] == records


@pytest.mark.slow  # draws
def test_it_draws_each_history_once_and_a_tenth_of_the_time_at_most(tmp_path, monkeypatch, clock):
    began, plot = [], History.plot

    def slow(self, **settings):
        began.append(clock.now - 1000)
        clock.now += 2.0
        return plot(self, **settings)

    monkeypatch.setattr(History, "plot", slow)
    run(live_plot(tmp_path / "run.svg"), clock.takes(1.0), train=1, epochs=25)
    assert began == [0, 20, 29]  # and at the end


def test_without_a_metric_it_draws_nothing_and_without_a_folder_it_fails(tmp_path):
    step = fl.pipeline()(lambda model, batch: fl.skip("for a test"))
    state = run(live_plot(tmp_path / "run.svg"), step=step, epochs=1)
    assert [record.metrics for record in state.history] == [{}]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        run(live_plot(tmp_path / "file" / "run.svg"))


def test_it_reads_nothing_from_the_device_and_only_the_main_process_draws(tmp_path):
    state, hook = run(), live_plot(tmp_path / "run.svg", refresh=0)
    other = attrs.evolve(state, backend=Backend("cpu", 1, 2))
    hook.flush(hook(other))
    hook.close()
    assert list(tmp_path.iterdir()) == []
    with no_host_reads():
        assert hook(state) is state
    hook.close()
    assert (tmp_path / "run.svg").exists()


@pytest.mark.parametrize(("args", "message"), [
    *(((name,), rf"a file whose suffix is one of .*png.* such as 'run.png'; got '.*{name}'")
        for name in ("run", "run.foo")),
    ((), r"this is not one\. To draw into a file, write live_plot\('run.png'\)"),
])  # fmt: skip
def test_a_wrong_file_is_an_error_when_composing(args, message):
    with pytest.raises((TypeError, ValueError), match=message):
        live_plot(*args)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"live_plot needs matplotlib: pip install 'fnloop\[plot"):
        live_plot("run.png")
