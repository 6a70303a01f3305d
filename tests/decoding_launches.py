"""What `test_decoding_kernels.py` runs in a process of its own: decoding through FLA, over the stub driver.

The model file is bound to FLA as on a GPU, and nothing else may run in such a process. Kernels compute
nothing, so what is accepted and where answers end is drawn here. Prints one JSON object.
"""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from decoding_targets import EOS, builtin_drafter, builtin_target
from torch import Tensor

from engine.dflash import speculation
from engine.runtime.serializer import Serializer
from engine.runtime.stub_driver import Launch, stub_driver
from engine.target import cached_forward, decoding_kernels, generation, kernels, loading
from engine.target.own_tokens import own_tokens_and_taps

ROWS, TOKENS = 12, 16


def draw_ends(seed: int) -> None:
    """Let verifications accept any number of drafts, and answers end anywhere."""
    drawn = random.Random(seed)

    def accept(
        batch: Any, drafts: Tensor, proposal: Any, logits: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, slots = drafts.shape
        leading = torch.tensor([drawn.randrange(slots + 1) for _ in range(rows)])
        return leading, torch.full_like(leading, 7)

    def choose(logits: Tensor, *rest: Any) -> Tensor:
        return torch.tensor([EOS if drawn.random() < 0.05 else 7 for _ in range(len(logits))])

    def draft(logits: Tensor, *rest: Any) -> Tensor:
        return torch.full(logits.shape[:-1], 7)

    speculation._accept, generation.choose, speculation.choose = accept, choose, choose  # type: ignore[assignment]
    speculation.most_likely = draft  # type: ignore[assignment]


@contextmanager
def on_a_gpu(shapes_cost: bool) -> Iterator[None]:
    """Take the CPU for a device on which shapes cost something, or not."""
    for module in (decoding_kernels, cached_forward):
        module.shapes_cost = lambda device: shapes_cost  # type: ignore[assignment]
    yield


def evaluation(seed: int) -> None:
    """What `evaluate` runs: a walk's forwards of any shapes, then decoding with the drafter and without."""
    draw_ends(seed)
    drawn = random.Random(seed)
    target, drafter = builtin_target(), builtin_drafter()
    for _ in range(3):
        ids = torch.full((drawn.randint(1, 9), 16 * drawn.randint(1, 8)), 7)
        with decoding_kernels.any_shape(target.model, target.device):
            own_tokens_and_taps(target, ids, torch.zeros_like(ids, dtype=torch.bool))  # no kernel has run
    prompts = [[7] * drawn.randint(3, 20) for _ in range(ROWS)]
    for decode in (
        lambda: speculation.speculate(target, drafter, prompts, max_new_tokens=TOKENS, stop=[EOS]),
        lambda: generation.decode_alone(target, prompts, max_new_tokens=TOKENS, stop=[EOS]),
    ):
        decode()


def main() -> None:
    launched: set[tuple[str, Any]] = set()

    def note(launch: Launch) -> None:
        # What is compiled apart: constants, and which tensors there are at all.
        present = tuple((name, value is None) for name, value in launch.arguments)
        launched.add((launch.kernel, present))

    findings: dict[str, Any] = {}
    with stub_driver(bench_s=0, load_s=0, on_launch=note):
        loading.gpu_packages_hidden = nullcontext  # type: ignore[assignment]
        loading.route_cpu_calls_to_torch = lambda model: None  # type: ignore[assignment]
        kernels.Binding.on_kernel = lambda self, device: self.chosen is not self.plain  # type: ignore[method-assign]
        findings["bound"] = loading.bound_kernels(builtin_target().model)["chunk_gated_delta_rule"]
        for name, shapes_cost in (("any shape", True), ("as they come", False)):
            cold: list[tuple[str, str]] = []
            serializer = Serializer("tune")
            serializer.on_cold = lambda key, cold=cold: cold.append((key.kernel, str(key.key)))  # type: ignore[misc]
            serializer.install()
            launched.clear()
            with on_a_gpu(shapes_cost):
                evaluation(seed=1)
            findings[name] = {
                "cold": sorted(set(cold)),
                "kernels": sorted({kernel for kernel, _ in launched}),
                "variants": len(launched),
            }
            serializer.uninstall()
    print(json.dumps(findings))


if __name__ == "__main__":
    os.environ["FLA_CACHE_RESULTS"] = "0"
    torch.set_num_threads(1)
    main()
