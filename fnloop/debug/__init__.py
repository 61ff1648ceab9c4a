"""Look into a run: repeat an update, compare two runs, and check updates while they run.

- `replay`: make an update of a run again, from its checkpoints, with all that it was made of.
- `diff`: the first difference between two states, checkpoints, histories or runs.
- `bisect`: the first update at which two runs diverge, and what differs in it first.
- `verify`: whether the checkpoints of a run are what its script makes of each other.
- `without`: what a batch of a run was worth, or a change of its script.
- `audit`, `AuditError`: make some updates twice, and compare the bits.
- `check_script`: whether a script keeps the laws: resumed, accumulated, evaluated in between.
- `watch`: activations, gradients and updates of each module, as metrics.
"""

from fnloop.debug._audit import AuditError, audit
from fnloop.debug._check_script import check_script
from fnloop.debug._diff import diff
from fnloop.debug._replay import bisect, replay
from fnloop.debug._verify import verify
from fnloop.debug._watch import watch
from fnloop.debug._without import without

__docformat__ = "google"

__all__ = [
    "AuditError",
    "audit",
    "bisect",
    "check_script",
    "diff",
    "replay",
    "verify",
    "watch",
    "without",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
