"""The list of banned phrases finds what it should, and the project is written without them."""

import pytest
from english import SCOPE, checked, contractions, faults, report


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("It is called behind every update.", "behind"),
        ("def test_a_run_goes_on():", "goes on"),
        ("# the run goes\n    # on at the next batch", "goes on"),
        ("Whoever calls it", "Whoever"),
        ("it is no checkpoint", "is no"),
        ('"""Say whether it is due."""', "Say whether"),
        ("the same to the bit", "to the bit"),
        ("an argument is not what it should be", "not what it should be"),
        ("a name for this stretch of the run", "stretch of the run"),
        ("It is saved now and then.", "now and then"),
    ],
)
def test_a_banned_phrase_is_found(text, phrase):
    assert [found for _, found, _ in faults(text)] == [phrase]


@pytest.mark.parametrize("text", [
    "There is no such folder. It is no longer there, and leaves nothing behind.",
    "to the bitter end; the category goes once",
    "Return whether it is not a checkpoint",
])  # fmt: skip
def test_good_english_is_left_alone(text):
    assert list(faults(text)) == []


def test_a_fault_is_reported_with_its_line():
    assert [line for line, _, _ in faults("one\ntwo\nbehind it")] == [3]


def test_contractions_are_found_in_strings_only():
    source = "# it isn't read\nraise ValueError(f\"it isn't {1}\")\n"
    assert list(contractions(source)) == [(2, "isn't", "the whole words")]


def test_the_files_are_there():
    assert {path.suffix for path in checked(SCOPE)} == {".py", ".md", ".ipynb"}


@pytest.mark.slow  # reads each file; .ci/run and pre-commit do so too
@pytest.mark.parametrize("name", SCOPE)
def test_no_banned_phrase_is_left(name):
    assert report(checked((name,))) == []
