"""FLA's memo of chunk indices, kept per thread.

FLA's `tensor_cache` decorates what computes indices from the boundaries of packed sequences: the last
few results, found again by the identity of the arguments, in one deque for all threads. Depending on
the version, threads get each other's indices or an exception for changing the deque while another
looks through it. Two more flaws show in one thread: boundaries that were changed in place give the
old indices, and indices made under inference mode are handed to a forward that needs a backward.

So the deque is exchanged for one that each thread has for itself, kept apart by inference mode, and
that passes over entries whose arguments have changed since. The exchange is made inside the decorated
functions, wherever they have been imported to; FLA may come before or after. A memo of another build
is switched off by FLA's own switch instead.
"""

import gc
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CellType, FunctionType, ModuleType
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.errors import EngineError

DECORATOR_MODULES = ("fla.utils.decorators", "fla.utils._decorators", "fla.utils")
"""Where the decorator is defined, by release, and where FLA's other modules import it from."""

DECORATOR = "tensor_cache"
SWITCH = "FLA_DISABLE_TENSOR_CACHE"

Entry = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional arguments, named ones, and the result."""


class ThreadRing(threading.local):
    """What stands in for the deque: as much of it as FLA uses, with entries of one's own."""

    def __init__(self, length: int | None) -> None:
        self._entries: dict[bool, deque[tuple[tuple[int, ...], Entry]]] = {
            inference: deque(maxlen=length) for inference in (False, True)
        }

    def __iter__(self) -> Iterator[Entry]:
        for versions, entry in tuple(self._entries[torch.is_inference_mode_enabled()]):
            if versions == _versions(entry):
                yield entry

    def append(self, entry: Entry) -> None:
        self._entries[torch.is_inference_mode_enabled()].append((_versions(entry), entry))


def _versions(entry: Entry) -> tuple[int, ...]:
    """How often each tensor argument was changed in place; made under inference mode, it does not say."""
    args, kwargs, _ = entry
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return tuple(tensor._version for tensor in tensors if not tensor.is_inference())


@attrs.define(eq=False)
class TensorCachePatch:
    """The exchange, for FLA as it is imported now and for what is imported of it later."""

    note: str | None = attrs.field(default=None, init=False)
    """That the memo is off and why, where it could not be exchanged."""
    _decorators: list[tuple[ModuleType, Any, Any]] = attrs.field(factory=list, init=False)
    """(module, our decorator, FLA's)."""
    _cells: list[tuple[CellType, Any]] = attrs.field(factory=list, init=False)
    """Where decorated functions look for their deque, and the deque they had."""
    _switches: list[tuple[dict[str, Any], Any]] = attrs.field(factory=list, init=False)
    _finder: "_AfterImport | None" = attrs.field(default=None, init=False)

    def install(self) -> None:
        """Exchange what there is and watch for what comes; does not import FLA.

        Raises:
            EngineError: the memo can be neither exchanged nor switched off.
        """
        for function in _decorated_functions():
            self._exchange(function)
        for module in map(sys.modules.get, DECORATOR_MODULES):
            if module is not None:
                self._replace_decorator(module)
        self._finder = _AfterImport(self._replace_decorator)
        sys.meta_path.insert(0, self._finder)

    def remove(self) -> None:
        """Give every function its own deque back."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for module, ours, before in self._decorators:
            if vars(module).get(DECORATOR) is ours:
                setattr(module, DECORATOR, before)
        for cell, before in self._cells:
            cell.cell_contents = before
        for namespace, before in self._switches:
            namespace[SWITCH] = before
        for kept in (self._decorators, self._cells, self._switches):
            kept.clear()
        self.note = None

    def overwritten(self) -> list[str]:
        """What somebody else has put in place of the decorator."""
        found = []
        for module, ours, _ in self._decorators:
            value = vars(module).get(DECORATOR)
            if value is not ours and sys.modules.get(module.__name__) is module:
                origin = getattr(value, "__module__", None)
                found.append(f"{module.__name__}.{DECORATOR} is now one of {origin}")
        return found

    def _replace_decorator(self, module: ModuleType) -> None:
        found = vars(module).get(DECORATOR)
        if found is None or any(module is known for known, _, _ in self._decorators):
            return
        for _, ours, before in self._decorators:
            if found in (ours, before):  # imported from a module that was here before
                self._decorators.append((module, ours, before))
                setattr(module, DECORATOR, ours)
                return

        def tensor_cache(fn: Callable[..., Any]) -> Any:
            decorated = found(fn)
            self._exchange(decorated)
            return decorated

        self._decorators.append((module, tensor_cache, found))
        setattr(module, DECORATOR, tensor_cache)

    def _exchange(self, function: FunctionType) -> None:
        cell = _deque_cell(function)
        if cell is None:
            self._switch_off(function)
        elif not isinstance(cell.cell_contents, ThreadRing):
            self._cells.append((cell, cell.cell_contents))
            cell.cell_contents = ThreadRing(cell.cell_contents.maxlen)

    def _switch_off(self, function: FunctionType) -> None:
        utils = sys.modules.get("fla.utils")
        namespaces = [function.__globals__, *([vars(utils)] if utils else [])]
        found = [namespace for namespace in namespaces if SWITCH in namespace]
        if not found:
            raise EngineError(
                f"FLA's {DECORATOR} is built in a way that this engine does not know, and there is no "
                f"{SWITCH} to switch it off with, so threads would get each other's chunk indices; install "
                "flash-linear-attention 0.6"
            )
        for namespace in found:
            if not namespace[SWITCH]:
                self._switches.append((namespace, namespace[SWITCH]))
                namespace[SWITCH] = True
        self.note = (
            f"FLA's {DECORATOR} is built in an unknown way and is switched off: packed rows are slower"
        )


class _AfterImport(MetaPathFinder):
    """Calls back with a module that holds the decorator, once it is imported."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        self._imported = imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in DECORATOR_MODULES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_tell(module: ModuleType) -> None:
                execute(module)
                self._imported(module)

            spec.loader.exec_module = then_tell  # type: ignore[method-assign]
        return spec


def _deque_cell(function: FunctionType) -> CellType | None:
    """Where a decorated function looks for its deque, if that is all that it does with it."""
    used = {name for name in function.__code__.co_names if not name.startswith("_")} & set(dir(deque))
    if used != {"append"}:
        return None
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, deque | ThreadRing):
            return cell
    return None


def _decorated_functions() -> list[FunctionType]:
    """Every function under the decorator, whoever holds it. The decorator keeps no list."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("fla.") and module]
    if not modules:
        return []
    found: dict[int, FunctionType] = {}
    # What somebody has frozen is hidden from the collector's list: so FLA's own modules are asked too.
    for thing in itertools.chain(gc.get_objects(), *(list(vars(module).values()) for module in modules)):
        # Its exact type: asking further would wake lazy objects.
        if type(thing) is FunctionType and _is_decorated(thing):
            found[id(thing)] = thing
    return list(found.values())


def _is_decorated(function: FunctionType) -> bool:
    return (
        function.__code__.co_qualname == f"{DECORATOR}.<locals>.wrapper"
        and function.__globals__.get("__name__") in DECORATOR_MODULES
    )
