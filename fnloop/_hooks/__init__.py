"""One file for each idea; the public names are in ``fnloop``."""
