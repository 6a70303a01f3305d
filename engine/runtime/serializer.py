"""What must not run at once: stages that share a word, kernel launches, and compilation.

`exclusive` is a schedule's wish: stages with the same word never overlap, so a turn is given up only
when the lane's device work is over as well. The rest are needs.

Launches: an autotuned Triton kernel is one object in a process, and two launches of it can corrupt
each other. `autotuner` keeps them apart while a serializer is installed:

    tune     each thread has its own state; only a key that is not tuned yet makes others wait, those
             that have one too. Launches with known keys go on side by side
    launch   every launch waits for every other
    stage    `tune`, and a target forward launches all its kernels with no other lane's between
    none     nothing, for debugging

Compilation: one lane traces at a time, whatever the mode.

Whoever takes several of these takes them in this order, or two lanes could wait for each other:
an exclusive word, a stage's launches, compilation, tuning. Tuning waits for the device, so nothing
may be held then that the device's work waits for.
"""

import gc
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from engine.errors import EngineError, ScheduleError
from engine.runtime.autotuner import AutotunerPatch, installed_patch, unknown_layout
from engine.runtime.inbox import Stop
from engine.runtime.lane import Lane
from engine.runtime.launch_state import ColdKey, LaunchCounts, ThreadState, ThreadStates, total
from engine.runtime.race_probe import THREADS, probe
from engine.runtime.tensor_cache import TensorCachePatch
from engine.runtime.timing import Wait
from engine.runtime.turn import Turn

MODES = ("tune", "launch", "stage", "none")

SIDE_BY_SIDE_S = 5.0  # the probe's launch beside a tuning is not held up; only a busy machine is that slow
TAKING_TURNS_S = 0.1  # here it is, for all of this time


class Serializer:
    """The one object of a run that keeps work apart."""

    def __init__(self, mode: str) -> None:
        """
        Args:
            mode: "tune", "launch", "stage" or "none".

        Raises:
            ScheduleError: another mode.
        """
        if mode not in MODES:
            raise ScheduleError(
                f"launch mode {mode!r} (serialize.launches): expected one of {', '.join(MODES)}"
            )
        self.mode = mode
        self.on_cold: Callable[[ColdKey], None] | None = None
        """Called in the launching thread after a key was tuned."""
        self.on_out_of_memory: Callable[[str], None] | None = None
        """Called with the message when tuning ran out of memory, in the launching thread: waits for copies
        and frees what can be freed. Torch's cached memory goes afterwards, and tuning is tried once more."""
        self.race_exists: bool | None = None
        """Whether this Triton's launches corrupt each other without a serializer; None before `install`."""
        self.fallback: str | None = None
        """Why launches take turns although the mode lets them run side by side, or FLA's memo is off."""
        self._lock = threading.Lock()
        self._words: dict[str, Turn] = {}
        self._launches = Turn()
        self._compiling = Turn(again=True)
        self._threads: list[ThreadState] = []
        self._states = ThreadStates(self._threads)
        self._autotuner: AutotunerPatch | None = None
        self._tensor_cache = TensorCachePatch()
        self._installed = False
        self._stop: Stop | None = None

    # Installation

    def install(self) -> None:
        """Keep launches apart in all of the process, from now on; call it in the main thread.

        Takes the place of another serializer. Installed already, it is checked as by `ensure`. Where
        nothing can launch, without Triton or without a GPU and with Triton not even imported, there is
        nothing to do until `ensure` finds that it has come.

        Raises:
            EngineError: launches would still corrupt each other; or somebody has overwritten the patch;
                or this is not the main thread.
        """
        if self.mode == "none":
            _displace()
            return
        self._installed = True
        if self._autotuner is not None and self._autotuner.active:
            self.ensure()
        elif _can_launch():
            self._patch()

    def uninstall(self) -> None:
        """Leave Triton and FLA as they were; counts stay."""
        self._installed = False
        self._take_off()

    def _take_off(self) -> None:
        if self._autotuner is not None and self._autotuner.active:
            self._tensor_cache.remove()
            self._autotuner.remove()

    def effective(self) -> bool:
        """Whether launches are kept apart as the mode says: installed, and not overwritten since.

        False in mode "none", and where there is no Triton to install anything on.
        """
        return self._autotuner is not None and self._autotuner.active and not self._overwritten()

    def ensure(self) -> None:
        """Check an installation and cover what was imported since; does nothing without one.

        Raises:
            EngineError: somebody has overwritten the patch; names who.
        """
        if not self._installed:
            return
        if self._autotuner is None:
            if _can_launch():
                self._patch()
            return
        overwritten = self._overwritten()
        if not self._autotuner.active:
            overwritten = ["another serializer was installed in this process"]
        if overwritten:
            raise EngineError(
                f'serialize.launches = "{self.mode}" is no longer in force, and launches may corrupt each '
                f"other: {'; '.join(overwritten)}. Import that module before the run's lanes are opened, "
                "a plugin's imports are, or leave it out"
            )
        self._autotuner.cover_subclasses()

    @contextmanager
    def running(self, stop: Stop) -> Iterator[None]:
        """Lanes work inside the block. Checks the installation, and renews it if another took its place.

        Args:
            stop: ends the waits of launches, whichever threads they are in.
        """
        if self._installed:
            self.install()
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    def _patch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise EngineError(
                f"a serializer is installed in thread {threading.current_thread().name}; install it in the "
                "main thread, before lanes work"
            )
        _displace()
        self.race_exists = probe(SIDE_BY_SIDE_S) is not None
        found = unknown_layout()
        triton = f"Triton {sys.modules['triton'].__version__}"
        patch = self._autotuner_patch(whole_launches=self.mode == "launch", layout_known=True)
        if found is None:
            error = _proof(patch)
            if error is not None:
                found = f"with state per thread, two launches still fail: {type(error).__name__}: {error}"
        if found is not None:
            patch = self._autotuner_patch(whole_launches=True, layout_known=False)
            error = _proof(patch)
            if error is not None:
                raise EngineError(
                    f"{triton}: launches corrupt each other even one at a time "
                    f"({type(error).__name__}: {error}; {found}). Install a Triton of 3.6 to 3.9, or train "
                    "with one lane on one device"
                ) from error
            self.fallback = f"launches take turns: {triton} is built otherwise: {found}"
        self._autotuner = patch
        try:
            self._tensor_cache.install()
        except BaseException:
            self._take_off()
            raise
        self.fallback = self.fallback or self._tensor_cache.note

    def _autotuner_patch(self, *, whole_launches: bool, layout_known: bool) -> AutotunerPatch:
        return AutotunerPatch(
            states=self._states,
            whole_launches=whole_launches,
            layout_known=layout_known,
            on_cold=self._tuned,
            free_memory=self._free_memory,
            check_stop=self._check_stop,
            owner=self,
        )

    def _overwritten(self) -> list[str]:
        found = self._autotuner.overwritten() if self._autotuner is not None else []
        return found + self._tensor_cache.overwritten()

    # What the launches of threads call

    def _tuned(self, cold: ColdKey) -> None:
        if self.on_cold is not None and not cold.thread.startswith(THREADS):
            self.on_cold(cold)

    def _free_memory(self, message: str) -> None:
        if self.on_out_of_memory is not None:
            self.on_out_of_memory(message)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _check_stop(self) -> None:
        stop = self._stop
        if stop is not None:
            stop.check()

    def counts(self, thread: str | None = None) -> LaunchCounts:
        """What launches came to so far.

        Args:
            thread: of threads with this name only, such as a lane's; all threads otherwise.
        """
        states = [state for state in list(self._threads) if not state.thread.startswith(THREADS)]
        return total([state for state in states if thread in (None, state.thread)])

    def holds_others_up(self) -> bool:
        """Whether a lane compiles or tunes now: that takes minutes, and others may wait for it."""
        return self._compiling._holder is not None or any(state.tunings for state in list(self._threads))

    def own_counts(self) -> LaunchCounts:
        """The same for the calling thread alone; as quick however many threads there have been."""
        return total([self._states.mine])

    # What lanes take turns at

    @contextmanager
    def exclusive(self, word: str, lane: Lane) -> Iterator[Wait]:
        """Run alone among all lanes that use `word`; yields the wait for it.

        Raises:
            Stopped: the run was over before the turn came.
            EngineError: the lane runs alone under this word already.
        """
        with self._lock:
            turn = self._words.setdefault(word, Turn())
        wait = turn.take(lane)
        try:
            yield wait
            lane.synchronize()
        except BaseException:
            # Its kernels may still run: whoever is next must find the run stopped, not the turn free.
            lane.stop.set()
            raise
        finally:
            turn.give_up()

    @contextmanager
    def launching(self, lane: Lane) -> Iterator[None]:
        """Launch a whole forward, in mode "stage" with no other lane launching one.

        Leave it before anything is synchronised: whoever waits for the device in here makes all
        lanes wait. Waiting for it is counted to the lane's open spans.

        Raises:
            Stopped: the run was over before the turn came.
        """
        if self.mode != "stage":
            yield
            return
        self._states.mine.stage_waited_s += self._launches.take(lane).seconds
        try:
            yield
        finally:
            self._launches.give_up()

    @contextmanager
    def compiling(self, lane: Lane) -> Iterator[Wait]:
        """Trace and compile with no other lane doing so; yields the wait for it.

        Compilers are not made for two threads. A lane that compiles may take it again within, from
        autograd's thread as well; so put a backward inside that compiles when it is first needed.

        Raises:
            Stopped: the run was over before the turn came.
        """
        wait = self._compiling.take(lane)
        self._states.mine.compile_waited_s += wait.seconds
        try:
            yield wait
        finally:
            self._compiling.give_up()

    @contextmanager
    def capturing(self, lane: Lane) -> Iterator[None]:
        """Record a CUDA graph with no other lane compiling, tuning or recording.

        All of these wait for a whole device at some point, which nobody may while one of its streams is
        being recorded.

        Raises:
            Stopped: the run was over before the turn came.
        """
        tuning = self._autotuner.held() if self.effective() and self._autotuner else nullcontext()
        with self.compiling(lane), tuning:
            yield


def _proof(patch: AutotunerPatch) -> BaseException | None:
    """Install a patch and let two threads race under it; it is off again where one of them dies."""
    patch.install()
    try:
        error = probe(TAKING_TURNS_S if patch.whole_launches else SIDE_BY_SIDE_S)
    except BaseException:
        patch.remove()
        raise
    if error is not None:
        patch.remove()
    return error


def _displace() -> None:
    """Take whichever serializer is installed off; it notices, and its next run puts it on again."""
    patch = installed_patch()
    if patch is not None:
        patch.owner._take_off()


def _can_launch() -> bool:
    if "triton.runtime.autotuner" in sys.modules:
        return True
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
