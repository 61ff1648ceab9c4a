"""The middleware, one file for each subject."""
