"""Records as a table: columns, their order and formats, marks, and what is left out."""

import contextlib
import io
import math
import re
import shutil
from os import terminal_size

import pytest
from pages import NASTY, check_html
from tqdm.utils import disp_len

from fnloop import History, Record
from fnloop._display.reprs import format_metric
from fnloop._extensions.histories.table import Row, is_evaluated, is_row, table

NAN, INF = math.nan, math.inf
METRICS = {
    "train/loss": 2.0, "train/accuracy": 0.5, "train/grad_norm": 1.25, "train/lr": 3e-4,
    "valid/loss": 3.0, "valid/accuracy": 0.25,
}  # fmt: skip

LOSSES = ["train/loss", "valid/loss"]


def lines(*records, width=80, **settings):
    return table(records, width=width, **settings).text(width).splitlines()


def lay_out(records, **settings):
    return Row.lay_out([Row(record) for record in records], **settings)


def column(name, *values):
    """Return the cells of a metric in a table of records with these values, without spaces."""
    records = [Record(i, i, {name: value}) for i, value in enumerate(values, 1)]
    (found,) = (each for each in lay_out(records).columns if each.name == name)
    return [found.text(Row(record)) for record in records]


# --- columns


def test_closing_records_are_rows_too():
    closing = Record(0, 5, {"valid/loss": 2}, closing=True)
    made = History([closing, Record(1, 10, {"valid/loss": 1})])
    assert [row.split()[1] for row in repr(made).splitlines()[2:]] == ["5", "10"]


def test_items_are_a_column():
    made = History([Record(1, 1, {"train/loss": 1.0}, items=2)])
    assert "epoch  step  items" in str(made) and "items" in made._repr_html_()
    assert "items" not in str(History([Record(1, 1, {"train/loss": 1.0})]))


def test_evaluated_loaders_come_first_then_train_then_recent_and_each_column_has_one_format():
    first = {"recent/loss": 1.5, **METRICS, "train/updates": 40}
    second = {**first, "train/loss": 10.5, "valid/loss": 1.0, "valid/accuracy": 0.125}
    records = Record(1, 938, first, 12.5), Record(2, 1876, second, 27.75)
    assert lines(*records, width=110) == [
        "            │ valid              │ train                                         "
        " │ recent",
        "epoch  step │   loss   accuracy  │    loss  accuracy  grad_norm       lr  updates "
        "│   loss │  time",
        "    1   938 │ 3.0000*    0.2500* │  2.0000    0.5000     1.2500  3.0e-04       40 "
        "│ 1.5000 │ 12.5s",
        "    2  1876 │ 1.0000*    0.1250  │ 10.5000    0.5000     1.2500  3.0e-04       40 "
        "│ 1.5000 │ 15.2s",
    ]


def names_of(layout):
    return [field.name for field in layout.columns if field.name]


def test_loaders_stand_in_the_order_in_which_they_appear_and_names_without_one_at_the_left():
    names = ["test/loss", "score", "train/loss", "valid/loss", "time/step", "recent/loss"]
    layout = lay_out([Record(1, 10, dict.fromkeys(names, 1.0))])
    assert names_of(layout) == [names[i] for i in (1, 0, 3, 2, 4, 5)]
    later = Record(1, 10, {"train/loss": 1.0, "test/loss": 1.0, "valid/f1": 0.5})
    found = lines(Record(0, 0, {"valid/loss": 1.0}), later)
    assert found[0] == "            │ valid            │ test    │ train"


def test_a_column_is_as_wide_as_the_name_of_its_group_and_without_groups_the_head_has_one_line():
    assert lines(Record(1, 10, {"validation/f1": 0.5})) == [
        "            │ validation",
        "epoch  step │        f1  │ time",
        "    1    10 │    0.5000* │ 0.0s",
    ]
    assert lines(Record(1, 10, {"loss": 0.5})) == [
        "epoch  step    loss  time",
        "    1    10  0.5000  0.0s",
    ]


# --- formats


@pytest.mark.parametrize(("name", "values", "shown"), [
    ("valid/loss", (2.0, 0.03125), "2.0000 0.0312"), ("valid/loss", (150.0, 0.5), "150.00 0.5000"),
    ("valid/loss", (15_000.0, 12_000.4), "15,000 12,000"),
    ("valid/loss", (2.0, 3.0e-5), "2.0000 3.00e-05"),  # 0.0000 would say nothing
    ("valid/loss", (0.0, 0.5, -0.0), "0.0000 0.5000 0.0000"),
    ("valid/loss", (NAN, INF, -INF, 1.0), "nan inf -inf 1.0000"),
    ("valid/loss", (0.31, 0.00947, 0.000861), "0.3100 0.00947 8.61e-04"),
    ("valid/loss", (1e6, 1e9, 1e-9), "1,000,000 1.00e+09 1.00e-09"),
    ("valid/loss", (5e-324, 1e300), "4.94e-324 1.00e+300"),
    ("valid/accuracy", (1.0, 0.0, 1e-5), "1.0000 0.0000 1.00e-05"),
    ("train/lr", (1e-3, 7.5536e-4, 0.0), "1.0e-03 7.6e-04 0.0e+00"),
    ("train/lr/1", (0.5,), "5.0e-01"), ("train/updates", (0.0, 3.0, 1234.0), "0 3 1,234"),
    ("train/temperature", (1.0, 0.9, 40.5), "1 0.9000 40.5000"),
    ("train/energy", (2e9, 1e12), "2.00e+09 1.00e+12"),
])  # fmt: skip
def test_a_number_does_not_depend_on_the_others_of_its_column(name, values, shown):
    assert column(name, *values) == shown.split()
    assert [format_metric(name, value) for value in values] == shown.split()


def test_the_time_is_that_of_each_row_and_not_the_sum():
    records = [Record(i, i, {"a": 1.0}, 30.0 * i) for i in (1, 2)]
    assert [line.split()[-1] for line in lines(*records)] == ["time", "30.0s", "30.0s"]
    assert lines(records[1])[1].split() == ["2", "2", "1"]  # unknown without the record before
    lines_of = lines(records[1], Record(3, 3, {"a": 1.0}, 60.25), Record(4, 4, {"a": 1.0}, 60.0))
    assert [line.split()[-1] for line in lines_of[2:]] == ["0.2s", "0.0s"]
    records.append(Record(3, 3, {"a": 1.0}, 60.0 + 3723.0))
    assert [line.split()[-1] for line in lines(*records)] == ["time", "0:30", "0:30", "1:02:03"]


# --- marks


def test_a_star_marks_an_evaluated_value_that_is_better_than_all_above_it():
    rows = [
        {"valid/loss": NAN, "valid/acc": 0.5, "valid/bleu": 1.5, "train/loss": 9.0},
        {"valid/loss": 2.0, "valid/acc": 0.75, "valid/bleu": 2.5, "train/loss": 1.0},
        {"valid/loss": 2.0, "valid/acc": 0.25, "valid/bleu": 3.5, "train/loss": 5.0},
    ]
    made = table([Record(i, i, {**row, "valid/error": NAN}) for i, row in enumerate(rows, 1)])
    best = [(c.name, row.record.step) for row in made.rows for c in made.columns if c.is_best(row)]
    # of equal values, the oldest
    assert best == [("valid/acc", 1), ("valid/loss", 2), ("valid/acc", 2)]
    assert made.html().count("<b>") == 3 and "<b>2.0000</b>" in made.html()
    infinite = [Record(i, i, {"valid/loss": value}) for i, value in enumerate((INF, -INF, 2.0), 1)]
    assert [line.split()[-3] for line in lines(*infinite)[2:]] == ["inf", "-inf", "2.0000*"]
    assert "*" not in "".join(lines(*infinite[:2]))


def test_the_mean_of_the_losses_of_turns_has_no_star():
    """They may oppose each other. An average of the weights has stars."""
    names = [
        "train/d/loss",
        "train/lr/d",
        *(f"valid/{n}loss" for n in ("", "d/", "ema/", "ema/d/")),
    ]
    made = table([Record(1, 1, dict.fromkeys(names, 1.0))])
    starred = {column.name for column in made.columns if column.is_best(made.rows[0])}
    assert starred == {"valid/d/loss", "valid/ema/d/loss"}
    made = table([Record(1, 1, dict.fromkeys(names[1:], 1.0))])  # several optimizers, no turns
    starred = {column.name for column in made.columns if column.is_best(made.rows[0])}
    assert starred == {*names[2:]}


def test_which_names_are_evaluated():
    names = ["valid/loss", "val/ema/loss", "train/loss", "recent/lr", "loss", "time/data"]
    assert [is_evaluated(name) for name in names] == [True, True, False, False, False, False]


# --- rows


def interval(step, **more):
    return Record(0, step, {"recent/loss": 1 / step, "recent/lr": 0.5, **more}, float(step))


def test_records_of_intervals_are_rows_only_if_there_are_no_others():
    epoch = Record(1, 4, {"train/loss": 0.5, "recent/loss": 0.25, "recent/lr": 0.5}, 4.0)
    found = [is_row(record) for record in (interval(1), epoch, Record(0, 1, {}))]
    assert found == [False, True, True]
    assert lines(interval(1), interval(2), epoch) == [
        "            │ train",
        "epoch  step │   loss │ time",
        "    1     4 │ 0.5000 │ 4.0s",
        "not shown: 2 records with recent/... only",
    ]
    assert lines(interval(1), interval(2)) == [
        "            │ recent",
        "epoch  step │   loss       lr │ time",
        "    0     1 │ 1.0000  5.0e-01 │ 1.0s",
        "    0     2 │ 0.5000  5.0e-01 │ 1.0s",
    ]


def test_records_of_intervals_are_rows_beside_a_closing_one_alone():
    """So a stream that has ended, or an epoch that was stopped, still has its curve."""
    closing = Record(0, 3, {"train/loss": 0.5, "recent/loss": 0.25, "recent/lr": 0.5}, 3.0, True)
    made = lines(interval(1), interval(2), closing)
    assert [row.split()[1] for row in made[2:]] == ["1", "2", "3"]
    assert made[0].split() == ["│", "train", "│", "recent"]


def firsts(rows):
    """Return the first cell of each row below the head."""
    return [row.split()[0] for row in rows[2:]]


def test_the_middle_of_a_long_table_is_cut_but_for_its_best_row():
    """Of eleven rows and ten places, the one that would be cut takes no more space than a sign."""
    records = [Record(i, i, {"train/loss": 1.0}) for i in range(1, 13)]
    assert firsts(lines(*records[:11], most=10)) == [*map(str, range(1, 12))]
    assert firsts(lines(*records, most=10))[4:8] == ["5", "…", "8", "9"]
    rise = [Record(i, i, {"valid/loss": 10.0 + abs(i - 25)}) for i in range(1, 51)]
    made = lines(*rise, most=4)
    assert firsts(made) == ["1", "2", "…", "25", "…", "49", "50"]
    assert [row.split()[0] for row in made if "*" in row] == ["1", "2", "25"]
    marks = [Row(record, best={"valid/loss"} if record is rise[0] else ()) for record in rise]
    marked = Row.table(marks, ["valid/loss"], most=4).text(80).splitlines()
    assert firsts(marked) == ["1", "2", "…", "49", "50"]
    assert [row.split()[0] for row in marked if "*" in row] == ["1"]


# --- width


@pytest.mark.parametrize(("width", "kept"), [
    (78, ["step", *METRICS, "time"]),
    (77, ["step", *(name for name in METRICS if name != "train/grad_norm"), "time"]),
    (66, ["step", *LOSSES, "train/accuracy", "valid/accuracy", "time"]),
    (57, [*LOSSES, "train/accuracy", "valid/accuracy", "time"]),
    (51, [*LOSSES, "valid/accuracy", "time"]), (41, [*LOSSES, "valid/accuracy"]), (34, LOSSES),
    (23, ["valid/loss"]),
    (1, ["valid/loss"]),  # something is shown anyway
])  # fmt: skip
def test_the_least_important_columns_are_left_out_first(width, kept):
    made = table([Record(1, 10, METRICS)], width=width)
    names = [field.name or field.title for field in made.columns]
    assert set(names) == {"epoch", *kept}
    left_out = [name for name in ("step", "time", *METRICS) if name not in kept]
    assert set(made.left_out) == set(left_out)
    assert (f"left out: {', '.join(made.left_out)}" if left_out else "") == made.note


@pytest.mark.parametrize(("names", "width", "left_out"), [
    ("train/time/data train/throughput/samples train/size train/lr valid/f1", 36,
     "step train/time/data train/throughput/samples train/lr"),  # what a run costs
    ("train/d/loss train/g/loss valid/loss valid/real train/loss", 44, "step time valid/real"),
])  # fmt: skip
def test_what_a_run_costs_goes_before_other_metrics_and_those_before_losses(names, width, left_out):
    made = lay_out([Record(1, 10, dict.fromkeys(names.split(), 2.0))], width=width)
    assert made.left_out == tuple(left_out.split())
    assert {*names_of(made)} == {*names.split()} - {*made.left_out}


@pytest.mark.parametrize("width", range(20, 130))
def test_no_line_is_longer_than_the_terminal(width):
    names = [f"{loader}/{name}" for loader in ("a", "bb", "train") for name in ("loss", "f1", "x")]
    records = [Record(i, i, dict.fromkeys((*names, "train/lr"), i / 3)) for i in (1, 2)]
    text = table(records, width=width).text(width)
    assert max(map(len, text.splitlines())) <= width


def test_within_an_epoch_the_step_is_more_important_than_losses_of_training():
    records = [Record(0, step, METRICS) for step in (5, 10)]
    assert [line.split()[1] for line in lines(*records, width=35)[1:3]] == ["step", "5"]
    assert "step" not in "".join(lines(Record(1, 10, METRICS), width=30)[:2])


def test_the_width_is_that_of_the_terminal_when_it_is_printed(monkeypatch):
    made = History([Record(1, 10, METRICS)])
    columns = 200
    monkeypatch.setattr(shutil, "get_terminal_size", lambda _: terminal_size((columns, 24)))
    assert "left out" not in repr(made)
    columns = 60
    assert repr(made).splitlines()[-1] == "left out: train/grad_norm, train/lr"
    assert max(map(len, repr(made).splitlines())) <= 60


def test_long_names_are_shortened_in_their_middle_and_wide_signs_have_two_columns():
    long, short = f"{'m' * 30}{'n' * 30}", f"{'m' * 15}…{'n' * 15}"
    assert lines(Record(1, 10, {f"valid/{long}": 1.0}), width=80)[1].split()[3] == short
    names = (f"{long}/loss", "验证/loss", "valid/验证")
    head, titles, row = lines(Record(1, 10, dict.fromkeys(names, 1.0)), width=100)
    assert head.split("│")[1].strip() == short
    assert len({*map(len, (titles, row))}) == 2  # 验证 is two signs, and four columns
    bars = [[disp_len(part) for part in line.split("│")][:-1] for line in (head, titles, row)]
    assert bars[0][:3] == bars[1][:3] == bars[2][:3] and bars[1] == bars[2]


# --- HTML


def test_html_has_a_head_of_groups_and_no_more_columns_than_fit():
    made = History([Record(1, 10, {"<b>&/loss": 0.5, "train/loss": 2.0}, 2.0)])
    cell, rule = "text-align:right;white-space:nowrap", ""
    rule = ";border-left:1px solid color-mix(in srgb, currentColor 30%, transparent)"
    left = "text-align:left;white-space:nowrap"
    assert made._repr_html_() == (
        '<div style="overflow-x:auto"><table style="font-variant-numeric:tabular-nums">'
        f'<tr><th colspan="2" style="{left}"></th>'
        f'<th colspan="1" style="{left}{rule}">&lt;b&gt;&amp;</th>'
        f'<th colspan="1" style="{left}{rule}">train</th>'
        f'<th colspan="1" style="{left}{rule}"></th></tr>'
        f'<tr><th style="{cell}">epoch</th><th style="{cell}">step</th>'
        f'<th style="{cell}{rule}">loss</th><th style="{cell}{rule}">loss</th>'
        f'<th style="{cell}{rule}">time</th></tr>'
        f'<tr><td style="{cell}">1</td><td style="{cell}">10</td>'
        f'<td style="{cell}{rule}"><b>0.5000</b></td><td style="{cell}{rule}">2.0000</td>'
        f'<td style="{cell}{rule}">2.0s</td></tr></table></div>'
    )
    wide = History([Record(1, 10, {f"valid/metric_{i:02}": 1.0 for i in range(30)})])
    assert wide._repr_html_().count("<td") < 12
    assert "<small>left out: step, time, valid/metric_0" in wide._repr_html_()


@pytest.mark.parametrize(("encoding", "size"), [("ascii", "gr??e"), ("cp1252", "größe")])
def test_lines_are_drawn_in_ascii_and_a_missing_letter_is_a_question_mark(encoding, size):
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with contextlib.redirect_stdout(console):
        print(History([Record(1, 10, {"valid/größe": 0.5})]))
    console.flush()
    shown = console.buffer.getvalue().decode(encoding)
    assert shown.split()[:2] == ["|", "valid"] and size in shown


def test_the_html_of_a_history_is_well_formed_and_escaped():
    check_html(History([Record(1, 10, {NASTY: 0.5})]))


def test_a_long_history_leaves_out_the_middle_in_html():
    made = History([Record(i, i, {"loss": i}) for i in range(1, 101)])
    epochs = re.findall(r"<tr><td[^>]*>(.*?)</td>", made._repr_html_())
    assert epochs == [*map(str, range(1, 21)), "…", *map(str, range(81, 101))]
