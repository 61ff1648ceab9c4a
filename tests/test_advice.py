"""A message that shows code is followed: its code is pasted into the program that caused it.

The program runs then. Each message of the sources that shows code is followed, or is in a list with
the reason why it is not.
"""

import re

import pytest
from advice import FOLLOWED, NOT_FOLLOWED
from programs import run
from shown_code import HOLE, fragments, messages_with_code

MESSAGES = messages_with_code()


def templates_with(words):
    """Return the templates of messages in which some words are."""
    every = {text for texts in MESSAGES.values() for text in texts if words in text}
    return {words} if words in every else every


def pattern(template):
    """Return what matches the messages of a template."""
    return re.compile(".*?".join(map(re.escape, template.split(HOLE))), re.DOTALL)


def shown(row, said):
    """Return the code that the message of a row shows, as a user would write it."""
    (template,) = templates_with(row.message)
    found = [text for text in said if pattern(template).search(text)]
    assert found, said
    place = pattern(template).search(found[0]).start()
    begin = max(place - 1, 0)  # what a whole message begins with is its subject
    codes = [code for start, code in fragments(found[0]) if start > begin or place]
    codes = [code for code in codes if code.startswith(row.code)]
    assert codes, found
    code = codes[0] if row.code else codes[-1]
    for given, written in row.fill.items():
        assert given in code, code
        code = code.replace(given, written)
    return template, code


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", FOLLOWED, ids=lambda row: row.message)
def test_the_code_of_a_message_mends_the_program(row, tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, rest = row.program.split("«")
    mistake, after = rest.split("»")
    said, _ = run(before + mistake + after, tmp_path, caplog)
    template, code = shown(row, said)
    said, error = run(before + code + after, tmp_path, caplog)
    assert not any(pattern(template).search(text) for text in said)
    if row.then is None:
        assert error is None, (code, error)
    else:
        assert error is not None and row.then in said[-1] + said[0]


def listed(template):
    """Return whether a message is in the list of those that are not followed."""
    begins = template.replace(HOLE, "{}").startswith
    return any(begins(one) for words in NOT_FOLLOWED.values() for one in words)


def test_every_message_that_shows_code_is_followed_or_has_a_reason():
    followed = set().union(*(templates_with(row.message) for row in FOLLOWED))
    left = {
        f"{file}: {text}".replace(HOLE, "{}")
        for file, texts in MESSAGES.items()
        for text in texts
        if text not in followed and not listed(text)
    }
    assert not left, "\n".join(sorted(left))


def test_every_row_is_of_one_message():
    assert [row.message for row in FOLLOWED if len(templates_with(row.message)) != 1] == []
    texts = {text.replace(HOLE, "{}") for texts in MESSAGES.values() for text in texts}
    words = [one for words in NOT_FOLLOWED.values() for one in words]
    assert [one for one in words if not any(text.startswith(one) for text in texts)] == []


SHOWN = {
    "Write clip(1.0)": ["clip(1.0)"],
    'give it a name, name="a b", or every(epochs=1)': ['name="a b"', "every(epochs=1)"],
    "write return loss, {}": [],
    "(state = fit(step, state, ...)), or x = f(a[0])(b).": [
        "state = fit(step, state, ...)",
        "x = f(a[0])(b)",
    ],
    "def f(a): return g(a(b), 1), and more": ["def f(a): return g(a(b), 1)"],
    'only=("model", ...) and epochs=... or epochs=, and 2 == 2': [
        'only=("model", ...)',
        "epochs=...",
    ],
    "Use clip or ema. It has (3, 2) float32": [],
}


@pytest.mark.parametrize(("text", "codes"), SHOWN.items())
def test_the_code_in_a_text_is_found(text, codes):
    assert [code for _, code in fragments(text)] == codes
