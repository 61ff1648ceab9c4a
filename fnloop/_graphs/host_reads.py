"""Find where an update reads tensors to the host, which no graph can."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fnloop._backend import torch_compat

__all__ = ["HostReads"]

_PACKAGE = str(Path(__file__).parents[1])


class HostReads(torch_compat.DispatchMode):
    """Notes where code of the user reads a tensor to the host during an update."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(
        self,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert callable(func)
        if torch_compat.reads_to_host(func):
            place = _reader()
            if place is not None and place not in self.places:
                self.places.append(place)
        return func(*args, **(kwargs or {}))


def _reader() -> str | None:
    """Return the line of the user that reads to the host, unless it is a loader or a hook."""
    frame, place = sys._getframe(2), None
    while frame is not None:
        code = frame.f_code
        inside = code.co_filename.startswith(_PACKAGE)
        if inside and place is None:
            return None  # fnloop itself reads, where it may
        if inside:
            in_update = "_step" in code.co_filename or "_middleware" in code.co_filename
            return place if in_update else None
        if place is None and "/torch/" not in code.co_filename:
            where = f"{Path(code.co_filename).name}, line {frame.f_lineno}, in {code.co_name}"
            place = f"reads a tensor to the host ({where}): cuda_graph cannot capture that"
        frame = frame.f_back
    return None
