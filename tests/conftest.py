"""What every test shares: one thread, no network, and skipping what needs a GPU."""

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# The same examples on every machine: a red run must be repeatable by whoever reads it.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def no_serializer_stays() -> Iterator[None]:
    """A run leaves its serializer on Triton's classes for the next one; tests each begin with them bare."""
    yield
    serializer = sys.modules.get("engine.runtime.serializer")
    if serializer is not None:
        serializer.Serializer("none").install()
