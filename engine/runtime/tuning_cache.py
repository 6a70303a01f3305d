"""Tuning results that outlive the process: what one start benchmarked, the next one looks up.

Triton's autotuner keeps the winner of each key in a dictionary per kernel, `Autotuner.cache`, and asks
it twice in a launch: is the key there, then which configuration. That dictionary is all this module
touches. A descriptor on the class hands it out as one of a kind that asks the file of earlier results
when a key is missing, and notes what is put in. Descriptors win over an instance's attributes, so
kernels that exist already are covered; launching and the keys stay Triton's own. To whoever patches
`run` or `prune_configs`, a reused key is a warm one.

Results are filed by what decides them: a file per kind of GPU and versions; in it the kernel, with a
hash of its source, its configurations and the variables that change what Triton compiles; then the
key. A configuration in a file is never run as it stands there. It points at an equal one of the
kernel's own, and where there is none it is dropped with a line, as is whatever cannot be read: a bad
file can make a start slow, not wrong.

Two more caches hold the same. Triton's (`cache_results`, which FLA sets unless FLA_CACHE_RESULTS=0)
lies among compiled kernels, takes GPUs of one architecture for the same and goes when that folder is
cleared. It is asked where this one has nothing, and its answers are kept here too. FLA_CACHE_MODE lets
FLA choose configurations from files of its own; whoever sets it means those, so kernels of FLA's class
are left alone then. Kernels that torch.compile makes have another class and a cache of their own.
"""

import hashlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from engine.errors import DiskError, EngineError
from engine.runtime.tuning_file import (
    Configuration,
    Results,
    cache_folder,
    fingerprint,
    merged,
    read_results,
    rewrite_results,
    tuning_file,
)

__all__ = ["TuningCache", "cache_folder", "fingerprint"]

_KEY_VALUES = (bool, int, float, str, type(None))


class TuningCache:
    """The results for this machine's kind, in memory and in a file."""

    def __init__(self, fingerprint: str, folder: Path, say: Callable[[str], None]) -> None:
        """
        Args:
            fingerprint: what the results hold for; see `fingerprint()`.
            folder: the cache folder; the file stands in its `tuning/`.
            say: gets a line for whatever was dropped or is not kept, once each, from any thread.
        """
        self.fingerprint = fingerprint
        self.path = tuning_file(fingerprint, folder)
        self.reused = 0
        """Keys answered from earlier results instead of being tuned."""
        self.added = 0
        """Keys tuned by this process, or found by Triton's own cache, that the file did not have."""
        self._say = say
        self._said: set[str] = set()
        self._known: Results = {}
        self._unsaved: Results = {}
        self._dropped: Results = {}
        self._class: Any = None
        self._wrapped: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._saving = threading.Lock()

    @property
    def installed(self) -> bool:
        """Whether Triton's look-ups are answered."""
        return self._class is not None

    def install(self) -> None:
        """Read the file and answer Triton's look-ups, of kernels there are and kernels to come.

        Without Triton there is nothing to do. A second call changes nothing.

        Raises:
            EngineError: another TuningCache is installed.
        """
        if self.installed or importlib.util.find_spec("triton") is None:
            return
        from triton.runtime.autotuner import Autotuner

        present = vars(Autotuner).get("cache")
        if isinstance(present, _CacheAttribute):
            raise EngineError(f"tuning results of {present.kept.path} are in use; uninstall that cache first")
        if present is not None:
            self._tell("this Triton keeps tuning results in a way unknown here, so every start tunes anew")
            return
        self._load()
        self._class = Autotuner
        Autotuner.cache = _CacheAttribute(self)

    def uninstall(self) -> None:
        """Give every kernel a plain dictionary again, with all entries; no thread may launch meanwhile."""
        if not self.installed:
            return
        del self._class.cache
        self._class = None
        for tuner in list(self._wrapped.values()):
            entries = vars(tuner).get("cache")
            if type(entries) is _Entries:
                vars(tuner)["cache"] = dict(entries)
        self._wrapped.clear()

    def save(self) -> None:
        """Write what is new, merged with what other processes wrote meanwhile.

        Where that fails, results stay unsaved for the next call, with a line. Not for the launch
        path: it waits for the disk.
        """
        with self._saving:
            with self._lock:
                unsaved, dropped = self._unsaved, self._dropped
                self._unsaved, self._dropped = {}, {}
            if not unsaved and not dropped:
                return
            try:
                lines = rewrite_results(self.path, self.fingerprint, unsaved, dropped)
            except (DiskError, OSError) as error:
                with self._lock:
                    self._unsaved = merged(unsaved, self._unsaved)
                    self._dropped = merged(dropped, self._dropped)
                lines = [f"tuning results are not kept for the next start: {error}"]
        self._tell(*lines)

    def _load(self) -> None:
        try:
            results, lines = read_results(self.path, self.fingerprint)
        except (DiskError, OSError) as error:
            results, lines = {}, [f"earlier tuning results are not used: {error}"]
        self._known = merged(results, self._unsaved)
        self._tell(*lines)

    def _tell(self, *lines: str) -> None:
        for line in lines:
            with self._lock:
                new = line not in self._said
                self._said.add(line)
            if new:
                self._say(line)

    def _wrap(self, tuner: Any) -> "_Entries":
        """A tuner's dictionary, exchanged for one that asks and notes."""
        with self._lock:
            entries = vars(tuner)["cache"]
            if type(entries) is _Entries and entries.kept is self:
                return entries
            wrapped = vars(tuner)["cache"] = _Entries(entries, tuner, self)
            self._wrapped[id(tuner)] = tuner
        for key, config in entries.items():
            self._note(tuner, key, config)
        return wrapped

    def _find(self, entries: "_Entries", key: Any) -> bool:
        """Whether an earlier result answers the key; it is an entry then."""
        tuner = entries.tuner
        if not self.installed or _chosen_by_fla(tuner):
            return False
        kernel, name = _kernel(tuner), _name(key)
        if kernel is None or name is None:
            return False
        with self._lock:
            values = self._known.get(kernel, {}).get(name)
        if values is None:
            return False
        config = _own(tuner, values)
        with self._lock:
            if config is not None:
                self.reused += not dict.__contains__(entries, key)
                dict.__setitem__(entries, key, config)
                return True
            if self._known[kernel].pop(name, None) is not None:
                self._dropped.setdefault(kernel, {})[name] = values
        self._tell(f"{self.path}: {kernel} has no configuration {values} (for key {name}); dropped")
        return False

    def _note(self, tuner: Any, key: Any, config: Any) -> None:
        """A key was tuned."""
        if not self.installed or _chosen_by_fla(tuner):
            return
        kernel, name, values = _kernel(tuner), _name(key), _configuration(config)
        if kernel is None:
            return
        if name is None or values is None or _own(tuner, values) is None:
            what = "keys" if name is None else "configurations"
            self._tell(f"{kernel}: its {what} cannot be told apart in a file, so every start tunes it anew")
            return
        with self._lock:
            known = self._known.setdefault(kernel, {})
            if known.get(name) != values:
                known[name] = self._unsaved.setdefault(kernel, {})[name] = values
                self.added += 1


class _Entries(dict[Any, Any]):
    """One kernel's results. A key that is there costs a dictionary's look-up and a call."""

    __slots__ = ("kept", "tuner")

    def __init__(self, entries: dict[Any, Any], tuner: Any, kept: TuningCache) -> None:
        super().__init__(entries)
        self.tuner = tuner
        self.kept = kept

    def __contains__(self, key: Any, _there: Callable[..., bool] = dict.__contains__) -> bool:
        return _there(self, key) or self.kept._find(self, key)

    def __missing__(self, key: Any) -> Any:
        if self.kept._find(self, key):
            return dict.__getitem__(self, key)
        raise KeyError(key)

    def __setitem__(self, key: Any, config: Any) -> None:
        super().__setitem__(key, config)
        self.kept._note(self.tuner, key, config)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # copies of a kernel start with a plain one


class _CacheAttribute(property):
    """`Autotuner.cache`; the dictionary stays where Triton puts it, among the instance's attributes."""

    def __init__(self, kept: TuningCache) -> None:
        def entries_of(tuner: Any) -> _Entries:
            try:
                entries = tuner.__dict__["cache"]
            except KeyError:
                raise AttributeError(f"{type(tuner).__name__} has no attribute 'cache' yet") from None
            if type(entries) is _Entries and entries.kept is kept:
                return entries
            return kept._wrap(tuner)

        def replace(tuner: Any, entries: dict[Any, Any]) -> None:
            tuner.__dict__["cache"] = entries

        super().__init__(entries_of, replace)
        self.kept = kept


def _chosen_by_fla(tuner: Any) -> bool:
    mode = getattr(sys.modules.get(type(tuner).__module__), "FLA_CACHE_MODE", None)
    return mode is not None and getattr(mode, "value", mode) != "disabled"


def _kernel(tuner: Any) -> str | None:
    """A kernel by name, with the hash of what it is; None for one that Triton does not compile.

    Taken anew for each cold key, since sources and configurations can be exchanged while a process
    runs; an interpreted kernel, or a stand-in of a test, has no hash and nothing worth keeping.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars

    function = tuner.fn
    while not hasattr(type(function), "cache_key"):  # heuristics may stand between
        function = getattr(function, "fn", None)
        if function is None:
            return None
    parts = [function.cache_key, str(sorted(get_cache_invalidating_env_vars().items()))]
    parts += [str(sorted(config.all_kwargs().items())) for config in tuner.configs]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    return f"{function.__module__}.{function.__qualname__}@{digest}"


def _name(key: Any) -> str | None:
    """A key as text that is the same in every process; None where it holds objects without one."""

    def plain(value: Any) -> bool:
        return type(value) in _KEY_VALUES or (type(value) is tuple and all(map(plain, value)))

    return repr(key) if plain(key) else None


def _configuration(config: Any) -> Configuration | None:
    """What a file can say about a configuration; None where it would not give back the same."""
    values: Configuration = config.all_kwargs()
    try:
        same = orjson.loads(orjson.dumps(values)) == values
    except orjson.JSONEncodeError:
        return None
    return values if same else None


def _own(tuner: Any, values: Configuration) -> Any:
    """The kernel's own configuration with these values; None without one, or where only hooks differ."""
    equal = [config for config in tuner.configs if _configuration(config) == values]
    return equal[0] if equal and all(config == equal[0] for config in equal) else None
