"""States of models of one architecture, stacked into one state, and taken apart again."""
