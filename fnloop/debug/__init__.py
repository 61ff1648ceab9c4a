"""Look into a run: make an update again, compare two runs, and check updates while they run.

- `replay`: make an update of a run again, from its checkpoints, with all that it was made of.
- `diff`: the first difference between two states, checkpoints, histories or runs.
- `bisect`: the first update at which two runs diverge, and what differs in it first.
"""

from fnloop.debug._bisect import bisect
from fnloop.debug._diff import diff
from fnloop.debug._replay import replay

__docformat__ = "google"

__all__ = ["bisect", "diff", "replay"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
