"""What users read: reprs as text and HTML, figures, the log, and the messages of argument checks."""
