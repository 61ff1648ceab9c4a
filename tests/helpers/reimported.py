"""A module as it is when it is imported again, such as without a name of torch."""

import importlib.util


def reimported(module):
    """Import the file of a module again, as another module, and return that."""
    spec = importlib.util.spec_from_file_location("imported_again", module.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again
