"""A storage at addresses such as ``faulty://run`` that fails, is cut, and lags, as a test asks."""

import contextlib

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Cut(BaseException):
    """The process was killed."""


class FaultyStorage(MemoryFileSystem):
    """Memory that calls ``before`` with each request, and lists what ``listed`` holds."""

    protocol = "faulty"
    store = {}
    pseudo_dirs = [""]
    before = staticmethod(lambda request, path: None)
    listed = None  # the store that lists show; None is the newest
    received = {}  # by path, how many bytes were downloaded

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("faulty://", "memory://"))

    def cat_file(self, path, **settings):
        self._ask("read", path)
        return super().cat_file(path, **settings)

    def pipe_file(self, path, value, **settings):
        self._ask("write", path)
        super().pipe_file(path, value, **settings)

    def put_file(self, lpath, rpath, **settings):
        self._ask("send", rpath)
        super().put_file(lpath, rpath, **settings)

    def get_file(self, rpath, lpath, **settings):
        self._ask("receive", rpath)
        super().get_file(rpath, lpath, **settings)
        path = self._strip_protocol(rpath)
        self.received[path] = self.received.get(path, 0) + self.store[path].size

    def rm_file(self, path):
        self._ask("remove", path)
        super().rm_file(path)

    def ls(self, path, detail=True, **settings):
        with self._lagging():
            return super().ls(path, detail=detail, **settings)

    def find(self, path, **settings):
        self._ask("list", path)
        with self._lagging():
            return super().find(path, **settings)

    def _ask(self, request, path):
        type(self).before(request, self._strip_protocol(path))

    @contextlib.contextmanager
    def _lagging(self):
        newest = type(self).store
        if self.listed is not None:
            type(self).store = self.listed
        try:
            yield
        finally:
            type(self).store = newest


fsspec.register_implementation("faulty", FaultyStorage, clobber=True)


class Storage:
    """What a test asks of the storage.

    Args:
        cache: the folder of local copies.
    """

    def __init__(self, cache):
        self.cache = cache
        self.requests = []
        FaultyStorage.store = {}
        FaultyStorage.listed = None
        FaultyStorage.received = {}
        self.works()

    def works(self):
        """Note each request, and let it pass."""
        FaultyStorage.before = staticmethod(lambda *request: self.requests.append(request))

    def before(self, do):
        """Call a function with each request and its path, and let it raise."""

        def note(*request):
            self.requests.append(request)
            do(*request)

        FaultyStorage.before = staticmethod(note)

    def cut_at(self, number):
        """Let requests pass, then none. Reading is not counted."""
        changes = iter(range(number))

        def cut(request, path):
            if request != "read" and next(changes, None) is None:
                raise Cut

        self.before(cut)

    def lag(self):
        """Let lists show what is there now, and nothing newer."""
        FaultyStorage.listed = dict(FaultyStorage.store)

    @property
    def received(self):
        return FaultyStorage.received

    @property
    def files(self):
        """By name, what is stored."""
        return {path: file.getvalue() for path, file in FaultyStorage.store.items()}

    def names(self, folder="run"):
        """Return the names of the checkpoints in a folder."""
        ends = [path.split("/") for path in FaultyStorage.store]
        return sorted(end[-2] for end in ends if end[1:-2] == [folder] and end[-1] == MANIFEST)

    def put(self, path, data):
        """Store something, as others do."""
        fsspec.filesystem("faulty").pipe_file(path, data)

    def drop(self, path):
        del FaultyStorage.store[path]


MANIFEST = "manifest.json"
