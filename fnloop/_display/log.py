"""The logger of the library: ``logging.getLogger("fnloop")``."""

from __future__ import annotations

import logging

__all__ = ["log"]

log = logging.getLogger("fnloop")
