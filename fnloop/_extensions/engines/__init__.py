"""Several processes: how they join, and what they exchange. Their engines, and the exact one."""
