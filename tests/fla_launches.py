"""What `test_fla_launches.py` runs in a process of its own: FLA's kernels over the stub driver.

FLA stays imported, and learns of a GPU that is not there: nothing else may run in such a process.
Prints one JSON object: findings by the name of what was tried.
"""

import gc
import json
import os
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from tuned_kernels import switching_every, together

from engine.runtime.serializer import Serializer
from engine.runtime.stub_driver import kernels, stub_driver
from engine.runtime.tensor_cache import ThreadRing

SHAPES = [(1, 128, False), (2, 64, False), (1, 96, True)]  # rows, length, packed


def inputs(rows: int, length: int, packed: bool) -> dict[str, Any]:
    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(rows, length, *shape, dtype=dtype)

    boundaries = torch.tensor([0, length // 3, length], dtype=torch.int32) if packed else None
    return {
        "q": draw(2, 64),
        "k": draw(2, 64),
        "v": draw(4, 64),
        "g": draw(4, dtype=torch.float32),
        "beta": draw(4),
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": boundaries,
    }


def forwards(driver: Any, device: int) -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    driver.set_current_device(device)
    with torch.no_grad():
        for shape in SHAPES:
            chunk_gated_delta_rule(**inputs(*shape))


def hammer(
    driver: Any, tuners: list[Any], serializer: Serializer, threads: int, interval: float
) -> dict[str, Any]:
    """All threads meet the same unknown keys at once, and then the same ones again, known by now."""
    for tuner in tuners:
        tuner.cache.clear()
    cold: list[tuple[str, Any]] = []
    serializer.on_cold = lambda key: cold.append((key.kernel, key.key))
    works = [lambda device=device: forwards(driver, device) for device in range(threads)]
    start = serializer.counts()
    with switching_every(interval):
        raised = together(*works)
        first = serializer.counts() - start
        raised += together(*works) if not raised else []
    second = serializer.counts() - start - first
    return {
        "raised": [f"{type(error).__name__}: {error}" for error in raised],
        "cold_keys": len(cold),
        "tuned_twice": [key for key, count in Counter(cold).items() if count > 1],
        "launches": [first.launches, second.launches],
        "cold_later": second.cold_keys,
        "waited_later": second.tuning_waited_s + second.launch_waited_s + second.stage_waited_s,
    }


class Name(str):
    """A keyword that lets another thread in when FLA's memo compares it, in its generator expression."""

    pause: Any = None

    def __hash__(self) -> int:
        if self.pause is not None and sys._getframe(1).f_code.co_name == "<genexpr>":
            self.pause()
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def memo_race() -> str | None:
    """One thread looks through FLA's memo while another adds to it; returns what the first died of."""
    from fla.utils import tensor_cache

    @tensor_cache
    def indices(boundaries: torch.Tensor, *, size: int) -> torch.Tensor:
        return boundaries * size

    boundaries = torch.arange(3)
    looking, added = threading.Event(), threading.Event()

    def pause() -> None:
        looking.set()
        added.wait(10)

    def look() -> None:
        indices(boundaries, size=1)
        name = Name("size")
        name.pause = pause
        indices(boundaries, **{name: 2})

    def add() -> None:
        looking.wait(10)
        indices(torch.arange(4), size=1)
        added.set()

    raised = together(look, add)
    return f"{type(raised[0]).__name__}: {raised[0]}" if raised else None


def memo_of_changed_boundaries() -> list[int]:
    from fla.ops.utils.index import prepare_lens

    boundaries = torch.tensor([0, 10, 30])
    prepare_lens(boundaries)
    boundaries[1] = 20
    return prepare_lens(boundaries).tolist()


def memo_across_inference_mode() -> bool:
    """Whether what was made under inference mode is handed out behind it."""
    from fla.ops.utils.index import prepare_lens

    boundaries = torch.tensor([0, 10, 30])
    with torch.inference_mode():
        prepare_lens(boundaries)
    return prepare_lens(boundaries).is_inference()


def memo_hits() -> bool:
    """Whether a result is found again at all, in the same thread and not in another one."""
    from fla.ops.utils.index import prepare_lens

    boundaries, elsewhere = torch.tensor([0, 10, 30]), []
    first = prepare_lens(boundaries)
    together(lambda: elsewhere.append(prepare_lens(boundaries)))
    return prepare_lens(boundaries) is first and elsewhere[0] is not first


def memo_findings() -> dict[str, Any]:
    return {
        "race": memo_race(),
        "lengths of changed boundaries": memo_of_changed_boundaries(),
        "inference tensor behind inference mode": memo_across_inference_mode(),
    }


def rings() -> list[int]:
    """FLA's functions with a memo: how many of them keep it per thread, and how many do not."""
    decorated = [
        thing
        for thing in gc.get_objects()
        if type(thing).__name__ == "function"
        and thing.__code__.co_qualname == "tensor_cache.<locals>.wrapper"
    ]
    of_thread = sum(
        any(isinstance(cell.cell_contents, ThreadRing) for cell in function.__closure__)
        for function in decorated
    )
    return [of_thread, len(decorated) - of_thread]


def main() -> None:
    findings: dict[str, Any] = {}
    with ExitStack() as stack:
        driver = stack.enter_context(stub_driver(bench_s=0.0003, load_s=0))
        before = Serializer("tune")
        before.install()
        import fla.ops.gated_delta_rule
        import fla.utils

        findings["rings, installed before FLA"] = rings()
        before.ensure()
        findings["memo, before"] = memo_findings()
        findings["memo is found again"] = memo_hits()
        before.uninstall()
        findings["rings, removed"] = rings()
        findings["memo, none"] = memo_findings()
        findings["decorator, removed"] = fla.utils.tensor_cache.__module__
        findings["finders left"] = [
            type(one).__name__ for one in sys.meta_path if type(one).__module__.startswith("engine.")
        ]
        after = Serializer("tune")
        after.install()
        findings["rings, installed after FLA"] = rings()
        findings["memo, after"] = memo_findings()
        after.uninstall()
        tuners = kernels()[1]
        findings["none"] = hammer(driver, tuners, Serializer("none"), 4, 5e-3)
        for mode in ("tune", "launch", "stage"):
            serializer = Serializer(mode)
            serializer.install()
            for threads in (2, 4, 8):
                for interval in (5e-3, 1e-5):
                    name = f"{mode}, {threads} threads, {interval * 1e6:.0f} µs"
                    findings[name] = hammer(driver, tuners, serializer, threads, interval)
            serializer.uninstall()
    print(json.dumps(findings))


if __name__ == "__main__":
    os.environ["FLA_CACHE_RESULTS"] = "0"
    torch.set_num_threads(1)
    main()
