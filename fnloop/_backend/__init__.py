"""Where a run lives: devices, processes, collectives, and what torch does not document."""
