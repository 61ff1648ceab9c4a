"""A table: columns that make texts of rows, written as text, as HTML, and line by line."""

import contextlib
import io

import pytest
from pages import Page
from toy_runs import ONE, fit

import fnloop as fl
from fnloop._extensions.tables import Column, Shown, Table, bar
from fnloop.testing import toy_loss

WORDS = Column("word", lambda row: row[0], left=True)
SIZE = Column("size", lambda row: str(row[1]), "of it", rank=(1, 2))
LARGEST = Column("square", lambda row: str(row[1] ** 2), "of it", best=lambda row: row[1] == 9)
ROWS = [("a", 9), ("bcd", 10)]


def test_words_begin_at_the_left_numbers_end_at_the_right_and_the_best_has_a_star():
    assert Table([WORDS, SIZE, LARGEST], [*ROWS, None]).text(80).splitlines() == [
        "     │ of it", "word │ size  square", "a    │    9      81*", "bcd  │   10     100",
        "…    │    …       …",
    ]  # fmt: skip


def test_the_columns_of_the_greatest_rank_are_left_out_first_and_are_named_in_order():
    wide = [WORDS, *(Column(name, str, rank=(4 - i, i)) for i, name in enumerate("xyz"))]
    made = Table(wide, [("a", 9)]).fit(25)
    assert made.left_out == ("x",)
    again = made.fit(1)  # two columns stay, and those of rank 0
    assert (again.left_out, again.note) == (("x", "y"), "left out: x, y")
    assert Table([WORDS, WORDS, WORDS], [("a", 9)]).fit(1).left_out == ()
    assert Table([WORDS, WORDS, SIZE]).fit(1).left_out == ("size (of it)",)


def test_later_rows_have_lines_as_wide_as_those_of_the_first():
    made = Table([WORDS, SIZE, LARGEST], ROWS).fit()
    assert [made.line(row) for row in ROWS] == made.text(80).splitlines()[2:]
    assert made.line(("e", 3)) == "e    │    3       9"
    assert made.width == len("word │ size  square*")


def test_the_words_of_the_last_column_and_the_note_are_wrapped():
    made = Table([WORDS, Column("more", lambda row: "one two three", left=True)], ROWS, "four five")
    rows = ["a     one two", "      three", "bcd   one two", "      three"]
    assert made.text(14).splitlines() == ["word  more", *rows, "four five"]
    assert made.text(8).splitlines()[1] == "a     one two three"  # there is no room beside it


def test_html_has_all_columns_and_no_stars():
    html = Table([WORDS, SIZE, LARGEST], [("<a>", 9)], "a & b").html()
    assert html.count("<td") == 3 and "<b>81</b>" in html and "*" not in html
    assert "&lt;a&gt;" in html and "<small>a &amp; b</small>" in html


def test_a_value_shows_its_lines_and_tables():
    class Pair(Shown):
        def _parts(self):
            return ["a <title>", Table([WORDS], ROWS)]

    assert repr(Pair()).splitlines() == ["a <title>", "word", "a", "bcd"]
    assert Pair()._repr_html_().startswith("<div><div>a &lt;title&gt;</div><div ")


def test_a_bar_shows_the_completed_part():
    assert "width:25%" in bar(1, 4, "x")
    assert "width:100%" in bar(5, 4, "x")  # an epoch longer than the length of its loader
    unknown = Page(bar(3, None, "3 steps"))
    assert (unknown.texts, len(unknown.tags)) == (["3 steps"], 1)


# --- where stdout lacks a sign


def printed(encoding, make):
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with contextlib.redirect_stdout(console):
        print(make())
    console.flush()
    return console.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_lines_and_arrows_are_drawn_in_ascii(encoding):
    size_of = fl.metric(größe=lambda aux, batch: 1.0)
    step = fl.pipeline(fl.clip(1.0), fl.accumulate(2), size_of)(toy_loss)
    state = fit(step=step, valid=1)
    assert "| parameters " in printed(encoding, lambda: fl.summary(state, ONE))
    assert "backward > clip(1.0)" in printed(encoding, lambda: step)
