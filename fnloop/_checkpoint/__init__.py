"""A state on a disk, whole or not at all: its format, saving, restoring, what is kept."""
