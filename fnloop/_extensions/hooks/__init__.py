"""The hooks, one file for each subject."""
