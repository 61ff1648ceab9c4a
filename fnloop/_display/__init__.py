"""What people read: tables, figures, HTML, the terminal, and errors about arguments."""
