"""Tracebacks without the frames that lie between a call of fnloop and the code of its caller."""

from __future__ import annotations

import dis
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from fnloop._display.checks import arguments

P = ParamSpec("P")
T = TypeVar("T")
_ROOT = str(Path(__file__).parents[1]) + os.sep
# What stands between two frames of ours: decorators, context managers, wrapped modules.
_BETWEEN = {"accelerate", "attr", "concurrent", "contextlib", "functools", "threading", "torch"}
_RAISE = dis.opmap["RAISE_VARARGS"]


def short_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Return a public function that shows no other frame of fnloop where an exception leaves it.

    The traceback has the caller's frames and this function, and the frames of the code that it
    calls for its caller, such as a loss function. Use it as a decorator.

    Args:
        function: the function. Arguments that it does not take are named, with what to write.

    Returns:
        The same function, with short tracebacks.

    Example:
        >>> import traceback
        >>> @short_traceback
        ... def apply(fn):
        ...     return fn()
        >>> try:
        ...     apply(lambda: 1 / 0)
        ... except ZeroDivisionError as error:
        ...     [frame.name for frame in traceback.extract_tb(error.__traceback__)][1:]
        ['called', 'apply', '<lambda>']
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:  # a traceback shows the next line in the place of all frames of fnloop
            arguments(function.__name__, function, args, kwargs)
            return function(*args, **kwargs)  # all frames: FNLOOP_TRACEBACK=full
        except BaseException as error:
            leave_out_frames(error)
            raise

    return called


def leave_out_frames(error: BaseException) -> None:
    """Take the frames of fnloop out of the traceback of an exception, where it leaves a call.

    Call it in the frame that the user has called. That frame stays, and so do all frames of other
    code, with what a debugger shows of them. An error that fnloop raises also keeps the frame that
    raised it. One that happens in fnloop itself keeps all frames, and so does every error if the
    environment has FNLOOP_TRACEBACK=full. What an exception was raised from is shortened too.

    Args:
        error: the exception, which is being handled. Raise it again with a bare ``raise``.
    """
    if os.environ.get("FNLOOP_TRACEBACK") == "full":
        return
    if (entry := error.__traceback__) is not None:
        entry.tb_next = _shortened(entry.tb_next)
    seen, linked = {id(error)}, [error.__cause__, error.__context__]
    while linked:
        if (one := linked.pop()) is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _shortened(one.__traceback__)
            linked += one.__cause__, one.__context__


def _shortened(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of ours, and those in between."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    if not entries:
        return None
    kept = None
    if _is_ours(last := entries[-1]):
        if last.tb_frame.f_code.co_code[last.tb_lasti] != _RAISE:
            return entries[0]
        kept, entries = last, entries[:-1]
    within = kept is not None  # whether the frame below is ours
    for entry in reversed(entries):
        within = _is_ours(entry) or (within and _module_of(entry) in _BETWEEN)
        if not within:
            entry.tb_next, kept = kept, entry
    return kept


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_ROOT)


def _module_of(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0]
