"""A state on a disk or at an address, whole or not at all: format, saving, restoring, retention."""
