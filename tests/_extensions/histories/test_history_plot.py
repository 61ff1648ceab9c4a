"""Figures of histories: ``History.plot`` and ``compare``."""

import io
import itertools
import math
import pickle
import sys

import pytest

from fnloop import History, Record, compare
from fnloop._extensions.histories.figures import thin_out
from fnloop.testing import toy

matplotlib = pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow  # a figure takes a tenth of a second, and does not depend on torch
NAN, INF = math.nan, math.inf


def history(*values, key="valid/loss"):
    """Return a history with one record per value, at steps 10, 20, ..."""
    return History(Record(i, 10 * i, {key: value}) for i, value in enumerate(values, 1))


def two():
    first = [Record(i, 10 * i, {"valid/loss": v, "train/loss": 3.0}) for i, v in ((1, 2), (2, 1))]
    second = [Record(i, 9 * i, {"train/loss": 4.0, "valid/loss": v}) for i, v in ((1, 3), (2, 4))]
    return {"a": History(first), "b": History(second)}


def plot(*records, **settings):
    return History(records).plot(**settings)


def titles(figure):
    return [axis.get_title(loc="left") for axis in figure.axes]


def drawn(axis, label):
    """Return the line of a curve."""
    (line,) = (line for line in axis.lines if line.get_label() == label)
    return line


def legend(shown):
    """Return the labels in the legend of an axis, or in a legend."""
    box = shown.get_legend() if hasattr(shown, "get_legend") else shown
    return [text.get_text() for text in box.get_texts()] if box else []


def lines(axis):
    """Return the drawn curves: label to points."""
    return {
        line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axis.lines
    }


def test_a_plot_has_a_line_per_loader_and_marks_the_best_evaluation():
    values = [(3, 2), (2, 1), (0.5, 4)]
    (axis,) = plot(
        *(
            Record(i, 10 * i, {"train/loss": t, "valid/loss": v})
            for i, (t, v) in enumerate(values, 1)
        )
    ).axes
    assert lines(axis) == {
        "train": [(10, 3.0), (20, 2.0), (30, 0.5)],
        "valid": [(10, 2.0), (20, 1.0), (30, 4.0)],
        "valid best 1 (epoch 2)": [(20, 1.0)],
    }


LOWEST, HIGHEST = ["valid best 1 (epoch 1)"], ["valid best 2 (epoch 2)"]


@pytest.mark.parametrize(("metric", "mode", "best"), [
    ("loss", None, LOWEST), ("accuracy", None, HIGHEST), ("F1_macro", None, HIGHEST),
    ("error", None, LOWEST), ("loss", "max", HIGHEST),
    ("bleu", None, []), ("loss_of_accuracy", None, []),  # the name suggests nothing, or both
    ("accuracy", {"accuracy": "min"}, LOWEST), ("score", {"score": "max"}, HIGHEST),
    ("score", {"valid/score": "max"}, HIGHEST), ("accuracy", {"valid/accuracy": "min"}, LOWEST),
    ("accuracy", {"loss": "min"}, HIGHEST),  # not in the mapping: by its name
])  # fmt: skip
def test_a_plot_marks_the_lowest_or_the_highest_value_by_mode_or_name(metric, mode, best):
    (axis,) = history(1, 2, key=f"valid/{metric}").plot(mode=mode).axes
    assert [label for label in lines(axis) if "best" in label] == best


@pytest.mark.parametrize(("made", "settings", "message"), [
    (history(1), {"mode": {"valid/loss": "low"}}, "plot expects mode as one of \"min\".*got 'low'"),
    (History(), {}, "nothing to plot: the history is empty"),
    (History([Record(1, 10, {})]), {}, "nothing to plot: the history has no metric"),
])  # fmt: skip
def test_what_cannot_be_plotted_is_an_error(made, settings, message):
    with pytest.raises(ValueError, match=message):
        made.plot(**settings)


WITHIN = [(0, 5), (1, 10), (1, 12), (2, 20), (2, 25)]  # epochs completed, steps: an epoch has ten


@pytest.mark.parametrize(("x", "seen", "label", "at"), [
    ("step", [(1, 10), (2, 20)], "step", [10, 20]),
    ("epoch", [(1, 10), (2, 20)], "epoch", [1.0, 2.0]),
    ("epoch", WITHIN, "epoch", [0.5, 1.0, 1.2, 2.0, 2.5]),
    ("epoch", [(0, 5), (0, 7)], "step", [5, 7]),  # the length of an epoch is unknown
])  # fmt: skip
def test_a_plot_has_steps_or_epochs_on_its_x_axis(x, seen, label, at):
    (axis,) = plot(*(Record(*moment, {"valid/loss": moment[1]}) for moment in seen), x=x).axes
    assert axis.get_xlabel() == label
    assert lines(axis)["valid"] == [(x, step) for x, (_, step) in zip(at, seen, strict=True)]


def test_long_steps_are_written_in_few_characters_and_one_step_as_a_whole_number():
    figure = plot(*(Record(i, 100_000 * i, {"valid/loss": 1.0 / i}) for i in range(1, 8)))
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert "100k" in labels and "700k" in labels
    assert plot(*history(1)).axes[0].get_xlim() == (9, 11)


def test_a_metric_without_a_finite_value_says_so():
    figure = plot(Record(1, 1, {"valid/loss": 1.0, "valid/odd": math.nan}))
    assert [[text.get_text() for text in axis.texts] for axis in figure.axes] == [
        [], ["no finite value"],
    ]  # fmt: skip


def test_a_loader_has_one_colour_in_all_axes_whatever_comes_first():
    loss, accuracy = plot(
        Record(0, 0, {"valid/loss": 3}), Record(1, 10, {"train/loss": 3, "valid/accuracy": 0.5})
    ).axes
    assert [drawn(loss, "train").get_color(), drawn(loss, "valid").get_color()] == ["C0", "C1"]
    assert [line.get_color() for line in accuracy.lines] == ["C1", "C1"]


def test_a_plot_marks_the_points_of_short_curves_only():
    for n, shown in ((40, True), (41, False)):
        (axis,) = plot(*history(*range(n))).axes
        assert (axis.lines[0].get_marker() == ".") is shown


def test_a_notebook_shows_a_plot_in_its_own_size():
    figure = plot(*history(1, 2))
    data, size = figure._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert size == {"width": 600, "height": 340}
    assert int.from_bytes(data[16:20]) == 2 * 600  # its pixels: twice as many
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()  # none is left open
    assert pickle.loads(pickle.dumps(figure))._repr_png_()[1] == size


@pytest.mark.parametrize(("values", "best"), [
    ((NAN, NAN), []), ((INF, NAN), []), ((NAN, 1.0), ["valid best 1 (epoch 2)"]),
    ((2.0, -INF, 0.5), ["valid best 0.5 (epoch 3)"]), ((NAN, INF, 1.0), ["valid best 1 (epoch 3)"]),
])  # fmt: skip
def test_nan_and_infinity_are_never_marked_as_best(values, best):
    figure, file = plot(*history(*values)), io.BytesIO()
    assert [label for label in lines(figure.axes[0]) if "best" in label] == best
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")
    (axis,) = compare({"bad": history(NAN, INF), "other": history(*values)}).axes
    assert legend(axis) == ["bad", "other" + "".join(best).replace("valid", ":")]


@pytest.mark.parametrize("values", [(1e308,), (-1e308, 1e308), (1.0, 1e10, 1e307, INF)])
def test_a_run_that_diverges_to_the_largest_number_is_drawn(values):
    plot(*history(*values)).savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize(("losses", "name", "scale"), [
    ((1e6, 10.0, 0.01), "loss", "log"), ((1000.0, 1.0), "loss", "log"),
    ((999.0, 1.0), "loss", "linear"), ((1e6, 0.0), "loss", "linear"),
    ((1e6, -1.0), "loss", "linear"), ((1e6, 1.0), "accuracy", "linear"),
    ((1e6, 1.0), "energy", "linear"), ((INF, 1.0, 0.5), "loss", "linear"),
    ((NAN,), "loss", "linear"), ((1.0, 1e290), "loss", "linear"),  # matplotlib cannot draw it
])  # fmt: skip
def test_a_loss_that_falls_by_decades_has_a_logarithmic_axis(losses, name, scale):
    assert plot(*history(*losses, key=f"valid/{name}")).axes[0].get_yscale() == scale


def test_a_long_title_fits_its_axis():
    figure = plot(Record(1, 1, dict.fromkeys(("valid/loss", f"valid/{'m' * 40}{'n' * 40}"), 0.5)))
    assert titles(figure)[-1] == "m" * 13 + "…" + "n" * 13


def test_the_intervals_are_a_thin_line_below_the_points_of_training():
    records = [Record(0, step, {"recent/loss": 1 / step}) for step in (1, 2, 3)]
    end = Record(1, 4, {"recent/loss": 0.25, "train/loss": 0.5, "valid/loss": 0.75})
    (axis,) = plot(*records, end).axes
    recent, train = drawn(axis, "recent"), drawn(axis, "train")
    assert lines(axis)["recent"] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert recent.get_color() == train.get_color() == "C0"
    assert recent.get_linewidth() < train.get_linewidth()
    assert recent.get_zorder() < train.get_zorder()
    assert (recent.get_marker(), train.get_marker()) == ("None", ".")
    assert legend(axis) == ["train", "recent", "valid", "valid best 0.75 (epoch 1)"]


def test_the_best_within_an_epoch_is_named_by_its_step():
    (axis,) = plot(Record(0, 5, {"valid/loss": 1}), Record(1, 10, {"valid/loss": 2})).axes
    assert legend(axis) == ["valid", "valid best 1 (step 5)"]


def test_the_loss_comes_first_and_rates_are_last():
    names = ["train/lr", "train/grad_norm", "train/accuracy", "train/loss", "valid/f1"]
    figure = plot(Record(1, 10, dict.fromkeys(names, 0.5)))
    assert titles(figure) == ["loss", "f1", "accuracy", "lr", "grad_norm"]


def test_the_rates_of_all_groups_are_in_one_axis():
    (axis,) = plot(Record(1, 10, {"train/lr": 0.5, "train/lr/1": 0.25})).axes
    assert axis.get_title(loc="left") == "lr"
    assert lines(axis) == {"train": [(10, 0.5)], "train 1": [(10, 0.25)]}


def test_an_average_of_the_weights_is_a_line_in_the_axis_of_the_metric():
    train, test = {"train/loss": 4.0}, {"test/accuracy": 0.5}
    valid = [dict.fromkeys(["valid/loss", "valid/ema/loss", "valid/swa/loss"], x) for x in (2, 1)]
    records = (Record(i, 10 * i, train | each | test) for i, each in enumerate(valid, 1))
    loss, accuracy = plot(*records).axes
    points, best = [(10, 2.0), (20, 1.0)], [(20, 1.0)]
    assert loss.get_title(loc="left") == "loss"
    assert lines(loss) == {
        "train": [(10, 4.0), (20, 4.0)], "valid": points, "valid best 1 (epoch 2)": best,
        "valid ema": points, "valid ema best 1 (epoch 2)": best, "valid swa": points,
        "valid swa best 1 (epoch 2)": best,
    }  # fmt: skip
    # The loaders first, so that a run with averages has the colours of a run without.
    owners = [drawn(loss, "valid"), drawn(accuracy, "test"), drawn(loss, "valid ema")]
    assert [line.get_color() for line in owners] == ["C1", "C2", "C3"]


@pytest.mark.parametrize(("metrics", "expected"), [
    (["valid/box/loss", "train/box/loss", "valid/loss"], ["loss", "box/loss"]),  # a part of it
    (["valid/g/loss", "valid/d/loss"], ["g/loss", "d/loss"]),  # no model beside it
    (["valid/ema/loss", "test/loss"], ["loss", "ema/loss"]),  # of another loader
    (["train/box/loss", "train/loss"], ["loss", "box/loss"]),
])  # fmt: skip
def test_other_names_with_a_slash_have_an_axis_of_their_own(metrics, expected):
    assert titles(plot(Record(1, 10, dict.fromkeys(metrics, 0.5)))) == expected


def test_the_mode_of_a_metric_is_that_of_its_average():
    metrics = {"valid/score": 0.5, "valid/ema/score": 0.25}
    later = Record(2, 20, dict.fromkeys(metrics, 0.0))
    (axis,) = plot(Record(1, 10, metrics), later, mode={"score": "max"}).axes
    assert {"valid best 0.5 (epoch 1)", "valid ema best 0.25 (epoch 1)"} < lines(axis).keys()


def contrast(one, other):
    """Return the contrast of two colours, as WCAG 2 defines it."""

    def luminance(color):
        linear = lambda x: x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
        red, green, blue = map(linear, matplotlib.colors.to_rgb(color))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one) + 0.05, luminance(other) + 0.05))
    return high / low


def test_text_can_be_read_on_white_and_on_black_pages():
    figure = plot(Record(1, 10, {"valid/loss": 1.0, "valid/accuracy": 0.5}))
    shown = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
    assert {"loss", "step", "valid best 1 (epoch 1)"} <= {text.get_text() for text in shown}
    pairs = itertools.product(shown, ("white", "#111111"))
    assert all(contrast(text.get_color(), page) > 4 for text, page in pairs)
    data, _ = figure._repr_png_()
    image = matplotlib.image.imread(io.BytesIO(data))
    assert image[0, 0, 3] == 0  # transparent
    assert (image[:, :, 3] == 0).mean() > 0.8


def test_a_long_curve_is_thinned_out_and_keeps_its_peaks():
    values = [float(step % 7) for step in range(10_000)]
    values[5_432], values[6_543] = 100.0, -100.0
    (axis,) = plot(*(Record(0, step, {"recent/loss": v}) for step, v in enumerate(values))).axes
    points = lines(axis)["recent"]
    assert len(points) <= 2000
    assert {(5_432, 100.0), (6_543, -100.0)} < {*points}
    assert points[0][0] < 10 and points[-1][0] > 9_990
    assert points == sorted(points)


def test_a_gap_in_a_long_curve_stays_a_gap():
    points = [(i, NAN if 400 <= i < 500 else INF if i == 7 else float(i)) for i in range(1000)]
    kept = thin_out(points, most=100)
    assert [x for x, y in kept if math.isnan(y)] == [400, 420, 440, 460, 480]
    assert kept[:3] == [(0, 0.0), (19, 19.0), (20, 20.0)]
    assert thin_out(points[:100], most=100) == points[:100]


# --- several histories


def test_compare_has_an_axis_for_each_metric_and_a_colour_for_each_run():
    figure = compare(two())
    assert titles(figure) == ["valid/loss", "train/loss"]
    valid, train = figure.axes
    assert lines(valid) == {
        "a: best 1 (epoch 2)": [(10, 2.0), (20, 1.0)],
        "b: best 3 (epoch 1)": [(9, 3.0), (18, 4.0)],
        "_": [(9, 3.0)],  # the last mark
    }
    assert [line.get_color() for line in valid.lines] == ["C0", "C0", "C1", "C1"]
    assert lines(train) == {"a": [(10, 3.0), (20, 3.0)], "b": [(9, 4.0), (18, 4.0)]}
    assert [line.get_color() for line in train.lines] == ["C0", "C1"]
    assert (legend(valid), legend(train)) == (["a: best 1 (epoch 2)", "b: best 3 (epoch 1)"], [])
    assert {axis.get_xlabel() for axis in figure.axes} == {"step"}


def test_compare_draws_what_all_histories_have_the_losses_first():
    names = ["train/lr", "train/loss", "valid/f1", "valid/loss", "test/loss", "recent/loss"]
    full, less = (History([Record(1, 10, dict.fromkeys(names[:n], 0.5))]) for n in (6, 5))
    assert titles(compare({"a": full, "b": less})) == [names[i] for i in (3, 4, 2, 1, 0)]


def test_compare_draws_the_keys_that_are_asked_for_in_their_order():
    made = {**two(), "c": History([Record(1, 10, {"test/f1": 0.5})])}
    figure = compare(made, keys=("train/loss", "test/f1"))
    assert titles(figure) == ["train/loss", "test/f1"]
    train, f1 = figure.axes
    assert legend(train) == ["a", "b"]
    assert legend(f1) == ["c: best 0.5 (epoch 1)"]  # which the first axis does not name
    assert f1.lines[0].get_color() == "C2"


def test_compare_names_many_runs_below_the_figure_and_gives_each_its_own_colour():
    metrics = {"valid/loss": 1.0, "valid/f1": 0.5}
    for n in (7, 15, 30):
        made = {f"run {i}": History([Record(1, 10, metrics)]) for i in range(n)}
        figure = compare(made)
        loss, f1 = figure.axes
        assert len({line.get_color() for line in loss.lines}) == n
        assert not legend(loss)
        (below,) = figure.legends
        assert legend(below) == [f"run {i}: best 1 (epoch 1)" for i in range(n)]
        assert legend(f1) == ["run 0: best 0.5 (epoch 1)"]  # the best of all


@pytest.mark.parametrize(("arguments", "error", "says"), [
    (([history(1)],), TypeError, r'histories as a mapping, such as \{"a": history_a, "b": hi'),
    (({"a": toy()},), TypeError, "a History for 'a', such as state.history; got"),
    (({"a": history(1), "b": History()},), ValueError, "to draw for 'b': its history is empty"),
    (({"a": History([Record(1, 10, {})])},), ValueError, "for 'a': its history has no metric"),
    (({"a": history(1), "b": history(1, key="val/loss")},), ValueError,
     "no metric that all histories have; there are: a: valid/loss; b: val/loss"),
    ((two(), ["valid/los"]), KeyError,
     "no metric 'valid/los' in these histories; there are: valid/loss, train/loss"),
    ((two(), "valid/loss"), TypeError, r'a list of metrics, such as \["valid'),
])  # fmt: skip
def test_wrong_arguments_of_compare_are_errors_that_say_what_there_is(arguments, error, says):
    with pytest.raises(error, match=says):
        compare(*arguments)


def names_of_runs(names):
    """Return the figure that compares runs of these names, and its legend."""
    history = History([Record(1, 10, {"valid/loss": 0.5, "valid/accuracy": 0.75})])
    figure = compare(dict.fromkeys(names, history))
    figure.canvas.draw()
    return figure, [*figure.legends, figure.axes[0].get_legend()][0]


def test_long_names_of_runs_are_shortened_if_they_stay_different():
    shown = lambda names: [text.partition(":")[0] for text in legend(names_of_runs(names)[1])]
    assert shown([f"{'a' * 60}{i}" for i in range(2)]) == [
        f"{'a' * 23}…{'a' * 22}{i}" for i in range(2)
    ]
    middles = [f"{'a' * 30}{i}{'a' * 30}" for i in range(2)]
    assert shown(middles) == middles
