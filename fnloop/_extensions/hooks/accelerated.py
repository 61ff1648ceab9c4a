"""The trackers of accelerate, without its state of the whole process."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def trackers() -> Iterator[ModuleType]:
    """Provide accelerate's trackers without its process-wide state, which their logger requires."""
    with warnings.catch_warnings():
        # Of tqdm in a notebook, though no bar was requested.
        warnings.filterwarnings("ignore", "IProgress not found")
        from accelerate import PartialState, tracking
        from accelerate.logging import MultiProcessAdapter

    class Plain(MultiProcessAdapter):
        def log(self, level: int, msg: object, *args: object, **kwargs: object) -> None:
            del kwargs  # accelerate's options of where to log
            self.logger.log(level, msg, *args)

    usual = tracking.logger
    if not PartialState._shared_state:
        tracking.logger = Plain(logging.getLogger("accelerate.tracking"), {})
    try:
        yield tracking
    finally:
        tracking.logger = usual
