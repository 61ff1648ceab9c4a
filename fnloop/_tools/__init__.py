"""What tries a run rather than runs it. Nothing below knows of these."""
