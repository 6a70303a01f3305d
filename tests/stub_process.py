"""Findings of a script in a process of its own: imported here, FLA would deceive every later test."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def findings_of(script: str, empty: Path) -> dict[str, Any]:
    """The JSON object that a script beside this file prints last; `empty` is Triton's cache folder."""
    here = Path(__file__).parent
    paths = [os.environ.get("PYTHONPATH"), str(here.parent), str(here)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_CACHE_DIR": str(empty),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", here / script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
