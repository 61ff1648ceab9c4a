"""The version of fnloop, in one place: packaging, ``fnloop.__version__`` and checkpoints read it here."""

__version__ = "0.1.0"
