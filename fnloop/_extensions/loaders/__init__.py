"""Loaders that fnloop knows: DataLoaders read by index, loaders made of loaders, and collation."""
