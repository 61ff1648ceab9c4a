"""What tries a run: ``dry_run``, ``summary``, ``find_lr``, ``find_batch_size``, ``tune``."""
