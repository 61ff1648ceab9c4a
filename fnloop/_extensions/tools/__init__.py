"""What tries a run: a dry run, searches for settings, a table of the model, and advice."""
