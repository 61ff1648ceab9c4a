"""The public modules and names, as the package lists them: tests find a new one by itself."""

import importlib
import inspect
import pkgutil

import fnloop

MODULES = (
    fnloop,
    *(
        importlib.import_module(f"fnloop.{found.name}")
        for found in pkgutil.iter_modules(fnloop.__path__)
        if not found.name.startswith("_")
    ),
)


def values(*modules):
    """Return the public names of modules, such as ``fnloop.clip``, to what they are."""
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules
        for name in module.__all__
        if not inspect.ismodule(getattr(module, name))
    }


def returning(kind, *modules):
    """Return the names of the public functions of modules whose annotation says what they make."""
    return {
        name.rpartition(".")[2]
        for name, value in values(*modules).items()
        if inspect.isfunction(value) and inspect.signature(value).return_annotation == kind
    }
