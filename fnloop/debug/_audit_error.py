"""What an audit raises."""

from __future__ import annotations

__all__ = ["AuditError"]


class AuditError(RuntimeError):
    """An update that was made twice has other bits the second time. ``state`` is that before it.

    Args:
        message: what differs, and what may be the cause.
        parameter: the name of the first parameter that differs, or None.
    """

    __module__ = "fnloop.debug"  # the name by which a traceback shows it

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __reduce__(self) -> tuple[type[AuditError], tuple[str, str | None]]:
        return AuditError, (str(self), self.parameter)
