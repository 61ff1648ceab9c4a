"""The version of fnloop, in one place, for packaging, ``fnloop.__version__`` and checkpoints."""

__version__ = "0.1.0"
