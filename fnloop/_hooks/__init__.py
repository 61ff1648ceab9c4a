"""What a hook is, and the moments at which one is called."""
