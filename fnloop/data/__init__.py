"""Data: what a loader could do faster.

>>> import fnloop as fl
>>> fl.data.tune.__name__
'tune'
"""

from fnloop._loop.tune import tune

__docformat__ = "google"

__all__ = [
    "tune",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
