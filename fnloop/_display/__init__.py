"""What users read: reprs as text and HTML, figures, the log, and errors about arguments."""
