"""The bottom line of a terminal, and what is printed above it."""

import contextlib
import io
import logging
import os
import sys
import threading

import pytest
from fake_terminal import Terminal
from tqdm import tqdm

from fnloop._display.screen import log
from fnloop._extensions.hooks.terminal import Screen, columns_of


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


@contextlib.contextmanager
def on(terminal):
    """A screen on a terminal that stdout and stderr write to."""
    screen = Screen(terminal)
    with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        try:
            yield screen
        finally:
            screen.close()
        assert sys.stdout is sys.stderr is terminal


def test_a_shorter_line_leaves_nothing_of_the_longer_one(terminal, monkeypatch):
    with on(terminal) as screen:
        screen.draw("x" * 50)
        screen.draw("short")
        assert terminal.lines() == ["short"]
        screen.draw("x" * 50)
        monkeypatch.setenv("COLUMNS", "20")  # it is on three rows now
        before = len(terminal.getvalue())
        screen.draw("short")
        assert terminal.getvalue()[before:].startswith("\x1b[2A\r\x1b[Jshort")
        screen.draw("shorter")
        assert terminal.getvalue().endswith("\rshorter\x1b[K")


def test_what_is_printed_appears_above(terminal):
    with on(terminal) as screen:
        before = {*threading.enumerate()}
        screen.draw("the bar")
        assert {*threading.enumerate()} == before  # no thread watches the bar
        print("first")
        print("second", file=sys.stderr)
        sys.stdout.writelines(["third\n", "fourth\n"])
        screen.print("a record")
        assert terminal.lines() == ["first", "second", "third", "fourth", "a record", "the bar"]


def test_a_part_of_a_line_is_not_torn(terminal):
    with on(terminal) as screen:
        screen.draw("the bar")
        print(1, 2, end="", flush=True)
        assert terminal.lines() == ["1 2"]
        print(" 3")
        assert terminal.lines() == ["1 2 3", "the bar"]
        print("50%", end="\r")
        print("99%", end="\r")
        assert terminal.lines() == ["1 2 3", "99%"]
        screen.draw("the next")
        assert terminal.lines() == ["1 2 3", "99%", "the next"]
        print("open", end="")
        screen.print("a record")
        assert terminal.lines() == ["1 2 3", "99%", "open", "a record", "the next"]
    assert terminal.lines() == ["1 2 3", "99%", "open", "a record", ""]


def test_log_messages_appear_above(terminal):
    with on(terminal) as screen:
        handler, logger = logging.StreamHandler(terminal), logging.getLogger("some.program")
        logger.addHandler(handler)
        try:
            screen.draw("the bar")
            logger.warning("a message")
            assert handler.stream is not terminal
            screen.close()
            assert handler.stream is terminal
        finally:
            logger.removeHandler(handler)
        assert terminal.lines()[0] == "a message"
        assert terminal.lines()[-1] == ""


def test_a_prompt_gets_an_empty_line(terminal, monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    with on(terminal) as screen:
        monkeypatch.setattr(terminal, "fileno", lambda: 7, raising=False)
        screen.draw("the bar")
        assert sys.stdout.fileno() == 7  # as input() and a debugger do before they write the prompt
        assert terminal.lines() == [""]
        screen.draw("the bar")
        with tqdm(bar_format="own", dynamic_ncols=True):  # asks for it, too
            assert terminal.lines() == ["own"]


def test_several_threads_may_print(terminal):
    with on(terminal) as screen:
        screen.draw("the bar")
        work = lambda name: [print(f"{name}{i}") for i in range(20)]
        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        *printed, bar = terminal.lines()
        assert bar == "the bar" and any(line.startswith(tuple("abcd")) for line in printed)
        assert sum(terminal.getvalue().count(f"{name}19") for name in "abcd") == 4


def test_a_file_and_a_stream_that_was_replaced_meanwhile_are_left_alone(terminal, monkeypatch):
    with on(terminal) as screen, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        file, theirs = sys.stdout, Terminal()
        screen.draw("the bar")
        assert sys.stdout is file and sys.stderr is not terminal
        sys.stderr = theirs
        screen.close()
        assert sys.stderr is theirs
        sys.stderr = terminal


def test_a_screen_in_a_screen(terminal):
    """A hook may call fit."""
    with on(terminal) as screen:
        screen.draw("the outer bar")
        inner = Screen(sys.stderr)
        inner.draw("the inner bar")
        assert columns_of(inner.file) == 80
        assert terminal.lines() == ["the inner bar"]
        print("a message")
        assert terminal.lines() == ["a message", "the inner bar"]
        inner.print("a record")
        inner.close()
        assert terminal.lines() == ["a message", "a record", "the outer bar"]
        screen.draw("the next bar")
        assert terminal.lines() == ["a message", "a record", "the next bar"]


@pytest.mark.parametrize("leave", [True, False])
def test_a_bar_of_tqdm_takes_the_place_of_the_bar(terminal, monkeypatch, leave):
    """A hook may show its own progress, where tqdm writes by default."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    with on(terminal) as screen:
        screen.draw("the bar")
        own = {"desc": "own", "leave": leave, "bar_format": "{desc} {n}/{total}"}
        for i in tqdm(range(2), mininterval=0, **own):
            tqdm.write(f"written {i}")
            assert terminal.lines() == [*(f"written {j}" for j in range(i + 1)), f"own {i}/2"]
        screen.draw("the bar")
        assert terminal.lines()[2:] == (["own 2/2", "the bar"] if leave else ["the bar"])
    assert not any("the bar" in line for line in terminal.lines())


def test_a_child_process_draws_nothing(terminal, monkeypatch):
    """A worker of a loader has a copy of the screen, whose line it removes."""
    with on(terminal) as screen:
        screen.draw("the bar")
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            print("a", 1)
        assert terminal.lines() == ["a 1", ""]
        screen.draw("the bar")
        assert terminal.lines() == ["a 1", "the bar"]


def test_a_terminal_that_is_gone_raises_nothing():
    class Gone(Terminal):
        def write(self, text):
            raise OSError(5, "Input/output error")

    screen = Screen(Gone())
    screen.draw("the bar")
    screen.print("a line")
    screen.close()


def test_the_width_of_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "33")
    assert columns_of(Terminal()) == 33
    primary, replica = os.openpty()
    with os.fdopen(primary), os.fdopen(replica, "w") as file:
        import fcntl
        import struct
        import termios

        for columns in (120, 40):
            fcntl.ioctl(replica, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
            assert columns_of(file) == columns


# --- messages


def test_a_message_is_wrapped_at_words_in_a_terminal_and_at_the_width_of_a_log(monkeypatch):
    """Python itself writes it: there is no handler."""
    monkeypatch.setattr("sys.stderr", shown := Terminal())
    monkeypatch.setattr("fnloop._display.screen.terminal_width", lambda: 40)
    monkeypatch.setattr(log, "propagate", False)  # pytest has handlers
    log.warning("fit: %s makes several passes over the parameters", "AdamW")
    assert shown.getvalue() == "fit: AdamW makes several passes over\nthe parameters\n"
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    path = "/".join(["folder"] * 30)  # which is not broken
    log.warning("fit: %s makes %s passes in %s", "AdamW", "several, " * 20 + "or more", path)
    first, second, last = file.getvalue().splitlines()
    assert max(len(first), len(second)) <= 120 < len(f"{first} several,") and last == path
    assert f"{first} {second}".endswith("several, or more passes in")
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(own := Terminal())])
    log.warning("fit: %s makes several passes over the parameters", "AdamW")
    assert own.getvalue() == "fit: AdamW makes several passes over the parameters\n"
