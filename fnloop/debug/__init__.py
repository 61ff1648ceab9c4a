"""Look into a run: make an update again, compare two runs, and check updates while they run."""

from fnloop.debug._audit import audit
from fnloop.debug._audit_error import AuditError
from fnloop.debug._check_script import check_script
from fnloop.debug._watch import watch

__docformat__ = "google"

__all__ = ["AuditError", "audit", "check_script", "watch"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
