"""Where a run lives: its device, what processes ask each other, what torch does not document."""
