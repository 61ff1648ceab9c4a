"""A history as people see it: a table of its records, and its curves in a figure."""
