"""What people read: numbers, text, HTML, and errors about arguments; and the log."""
