"""Look into a run: make an update again, compare two runs, and check updates while they run."""

__docformat__ = "google"

__all__: list[str] = []


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
