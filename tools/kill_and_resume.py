"""Run a schedule, kill it on the way, resume it, and see it end: what a rented machine does, on purpose.

    python -m tools.kill_and_resume schedules/colocated.toml runs/again --kills 2 -- --steps 500

Each kill is a SIGKILL a few steps after a checkpoint, drawn from `--seed`. Compare the result with an
unbroken run by `tools.compare_losses`. What stands behind `--` goes to `run` as it is. Exit code: that of
the last run; 7 where a run ended before it could be killed.
"""

import argparse
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson

POLL_S = 0.05


def step_of(output: Path) -> int:
    """Steps that the run has told of; 0 where it has written no status."""
    try:
        return int(orjson.loads((output / "status.json").read_bytes())["step"] or 0)
    except (OSError, orjson.JSONDecodeError, KeyError):
        return 0


def has_checkpoint(output: Path) -> bool:
    return (output / "checkpoints" / "latest").exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("schedule")
    parser.add_argument("output", type=Path)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    command = [sys.executable, "-m", "engine", "run", options.schedule, "--output", str(options.output)]
    for change in options.changes:
        command += ["--set", change]
    command += sys.argv[split + 1 :]
    draw = random.Random(options.seed)
    for kill in range(options.kills):
        before = step_of(options.output)
        begun = subprocess.Popen([*command, *(["--resume"] if kill else [])])
        more = draw.randint(2, 6)
        while begun.poll() is None and not (
            has_checkpoint(options.output) and step_of(options.output) >= before + more
        ):
            time.sleep(POLL_S)
        if begun.poll() is not None:
            sys.stderr.write(f"the run ended with {begun.returncode} before kill {kill + 1}\n")
            sys.exit(7)
        begun.send_signal(signal.SIGKILL)
        begun.wait()
        print(f"killed at step {step_of(options.output)}", flush=True)
    sys.exit(subprocess.run([*command, "--resume"], check=False).returncode)


if __name__ == "__main__":
    main()
