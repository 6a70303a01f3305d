"""What an evaluation found: the figures, and how they are shown on a terminal, as JSON and as a chart.

Two measures of one thing stand side by side. Where walk and decoding part by more than a few hundredths,
either the held-out answers are not the target's own, which the agreement beside the walk tells, or
drafting while serving computes something else than training did.
"""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
from rich.console import Console
from rich.table import Table

from engine.errors import DiskError, InputError
from engine.rounding_null import ALWAYS, UNMEASURED, RoundingNull
from engine.served_pair import of_plain_models
from engine.whole_files import disk_errors, replace_file

DIFFERENCES_SHOWN = 10


@attrs.frozen(kw_only=True)
class Acceptance:
    """How many tokens verifications committed."""

    accepted_length: float
    """Mean tokens per verification, the target's own included; NaN without one."""
    verifications: int
    histogram: tuple[int, ...]
    """[B]: how many verifications committed 1 … B tokens."""
    accepted_by_slot: tuple[float, ...]
    """[B - 1]: share of the verifications that accepted slot k, for k = 1 … B - 1."""

    @classmethod
    def of(cls, committed: Sequence[int], drafted: Sequence[int], block_size: int) -> "Acceptance":
        """From the tokens that each verification committed, and how many of them were the drafter's."""
        count = len(committed)
        return cls(
            accepted_length=sum(committed) / count if count else float("nan"),
            verifications=count,
            histogram=tuple(committed.count(tokens) for tokens in range(1, block_size + 1)),
            accepted_by_slot=tuple(
                sum(tokens >= k for tokens in drafted) / count if count else float("nan")
                for k in range(1, block_size)
            ),
        )


@attrs.frozen(kw_only=True)
class WalkFigures:
    """Held-out answers scored at every position and walked."""

    acceptance: Acceptance
    documents: int
    loss: float
    """Σ w·CE / Σ w against the documents' own tokens, nats, as a run's `held_out_loss`."""
    accuracy_by_slot: tuple[float, ...]
    """[B - 1]: share of the target's own tokens over all anchors, right or wrong before them."""
    target_agreement: float
    """Share of the answers' tokens that are the target's most likely ones."""
    seconds: float


@attrs.frozen(kw_only=True)
class PromptDifference:
    """A prompt whose two greedy outputs are not the same."""

    prompt: int
    """Number of the prompt, counted from 0."""
    words: str
    near_tie: bool
    """Whether rounding explains it."""


@attrs.frozen(kw_only=True)
class DecodingFigures:
    """Prompts decoded with the drafter, and by the target alone."""

    acceptance: Acceptance
    prompts: int
    batch: int
    temperature: float
    tokens: int
    seconds: float
    alone_tokens: int
    alone_seconds: float
    ended: int
    """Answers that ended by themselves; the others reached the limit."""
    identical: int | None
    """Prompts whose output is the target's own, token for token; None when sampling."""
    differences: tuple[PromptDifference, ...] = ()
    rounding: RoundingNull | None = None
    """How often rounding alone parts texts; measured in a reduced precision, where there are differences."""
    rounding_unknown: bool = False
    """Memory ran out while that was measured, so that nothing tells rounding from a fault."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def alone_tokens_per_s(self) -> float:
        return self.alone_tokens / self.alone_seconds

    @property
    def near_ties_allowed(self) -> int:
        """How many prompts may differ by near ties."""
        if self.rounding_unknown:
            return 0
        if self.rounding is None:
            return max(ALWAYS, math.floor(UNMEASURED * self.prompts))
        return self.rounding.allowed

    @property
    def unexplained(self) -> list[PromptDifference]:
        """Differences that no near tie explains."""
        return [difference for difference in self.differences if not difference.near_tie]


@attrs.frozen(kw_only=True)
class EvaluationReport:
    """Everything that `evaluate` measures; a part that was left out is None."""

    checkpoint: Path
    target: Path
    device: str
    block_size: int
    walk: WalkFigures | None
    decoding: DecodingFigures | None
    numbers_changed_by: tuple[str, ...] = ()
    """The schedule's plugins that change the target's numbers in training; here it is the plain one."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; speeds are in it too."""
        values = attrs.asdict(self)
        if self.decoding:
            values["decoding"] |= {
                "tokens_per_s": self.decoding.tokens_per_s,
                "alone_tokens_per_s": self.decoding.alone_tokens_per_s,
                "near_ties_allowed": self.decoding.near_ties_allowed,
            }
        return values


def check_places(json: Path | None, png: Path | None) -> None:
    """Refuse files that cannot be written, before minutes are spent on what belongs into them.

    Raises:
        InputError: a folder that is not there, a folder where the file should be, or no matplotlib.
    """
    for flag, path in (("--json", json), ("--png", png)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise InputError(f"{flag} {path}: there is no folder {path.parent}; make it first")
        if path.is_dir():
            raise InputError(f"{flag} {path}: is a folder; name a file in it")
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--png: charts need matplotlib; pip install 'dflash-engine[report]'")


def write_files(report: EvaluationReport, json: Path | None, png: Path | None) -> None:
    """Write the figures and the chart that were asked for; one that fails does not keep the other back.

    Raises:
        DiskError: one or both cannot be written.
    """
    failed: list[str] = []
    for write, path in ((write_json, json), (draw, png)):
        if path is not None:
            try:
                write(report, path)
            except DiskError as error:
                failed.append(str(error))
    if failed:
        raise DiskError("; ".join(failed))


def write_json(report: EvaluationReport, path: Path) -> None:
    """Write the figures to a file, whole or not at all."""
    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    replace_file(path, orjson.dumps(report.to_dict(), option=option, default=str))


def print_report(report: EvaluationReport, console: Console) -> None:
    """Tables and sentences for a person."""
    walk, decoding = report.walk, report.decoding
    measures = [("walk", walk and walk.acceptance), ("decoding", decoding and decoding.acceptance)]
    columns = [(name, found) for name, found in measures if found]
    table = Table(title=f"tokens per verification, of {report.block_size}")
    table.add_column("")
    for name, _ in columns:
        table.add_column(name, justify="right")
    table.add_row("accepted length", *(f"{found.accepted_length:.3f}" for _, found in columns), style="bold")
    table.add_row("verifications", *(f"{found.verifications:,}" for _, found in columns))
    table.add_section()
    for tokens in range(1, report.block_size + 1):
        shares = [found.histogram[tokens - 1] / max(found.verifications, 1) for _, found in columns]
        table.add_row(f"{tokens} committed", *(f"{share:.1%}" for share in shares))
    table.add_section()
    for k in range(1, report.block_size):
        table.add_row(f"slot {k} accepted", *(f"{found.accepted_by_slot[k - 1]:.1%}" for _, found in columns))
    console.print(table)
    changed = [of_plain_models(report.numbers_changed_by)] if report.numbers_changed_by else []
    for line in [*changed, *_walk_lines(walk), *_decoding_lines(decoding)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _walk_lines(walk: WalkFigures | None) -> list[str]:
    if walk is None:
        return []
    lines = [
        f"walk: {walk.documents} documents in {walk.seconds:.1f} s, loss {walk.loss:.4f}; "
        f"{walk.target_agreement:.1%} of the answers' tokens are the target's own"
    ]
    if walk.target_agreement < 0.9:
        lines.append(
            "the text is not the target's: the walk follows it all the same, where a server would leave it"
        )
    return lines


def _measured(decoding: DecodingFigures) -> str:
    if decoding.rounding_unknown:
        return "; memory ran out while the target decoded some again, so rounding was not measured"
    allowed = f"; up to {decoding.near_ties_allowed} are taken for rounding"
    if (null := decoding.rounding) is None:
        return allowed
    return (
        f"{allowed}: decoded by the target alone, {' or '.join(map(str, null.rows_together))} together, "
        f"{null.differing_moved} of {null.differing_again} of these and "
        f"{null.others_moved} of {null.others_again} others differ from what it said before"
    )


def _decoding_lines(decoding: DecodingFigures | None) -> list[str]:
    if decoding is None:
        return []
    how = "greedy" if decoding.temperature == 0 else f"at temperature {decoding.temperature:g}"
    ratio = decoding.tokens_per_s / decoding.alone_tokens_per_s
    lines = [
        f"decoding {how}, batches of {decoding.batch}: {decoding.tokens:,} tokens for {decoding.prompts} "
        f"prompts in {decoding.seconds:.1f} s, {decoding.tokens_per_s:,.0f} tokens/s; the target alone "
        f"{decoding.alone_tokens_per_s:,.0f} tokens/s; {ratio:.2f} times as fast",
        f"{decoding.ended} of {decoding.prompts} answers ended by themselves",
    ]
    if decoding.identical is not None:
        lines.append(
            f"{decoding.identical} of {decoding.prompts} outputs are the target's own, token for token"
        )
        if ties := len(decoding.differences) - len(decoding.unexplained):
            lines.append(
                f"{ties} of {decoding.prompts} outputs ({ties / decoding.prompts:.1%}) differ by near ties"
                f"{_measured(decoding)}"
            )
    else:
        lines.append("sampled outputs are not compared with the target's own: only greedy ones can be")
    shown = sorted(decoding.differences, key=lambda difference: difference.near_tie)[:DIFFERENCES_SHOWN]
    lines += [f"prompt {difference.prompt}: {difference.words}" for difference in shown]
    if left := len(decoding.differences) - len(shown):
        lines.append(f"and {left} more prompts that differ")
    return lines


def draw(report: EvaluationReport, path: Path) -> None:
    """Draw histogram and acceptance by slot to a PNG file.

    Raises:
        DiskError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    counts, slots = figure.subplots(1, 2)
    parts = {"walk": report.walk, "decoding": report.decoding}
    found = {name: part.acceptance for name, part in parts.items() if part}
    width = 0.8 / max(len(found), 1)
    for number, (name, acceptance) in enumerate(found.items()):
        shift = (number - (len(found) - 1) / 2) * width
        places = [tokens + shift for tokens in range(1, report.block_size + 1)]
        shares = [count / max(acceptance.verifications, 1) for count in acceptance.histogram]
        counts.bar(places, shares, width, label=f"{name}, mean {acceptance.accepted_length:.2f}")
        line = "o-" if not number else "x--"  # they ought to coincide
        slots.plot(range(1, report.block_size), acceptance.accepted_by_slot, line, label=name)
    counts.set(xlabel="tokens committed by a verification", ylabel="share of verifications")
    slots.set(xlabel="slot of the block", ylabel="share accepted", ylim=(0, 1))
    for axes in (counts, slots):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    with disk_errors(path):
        figure.savefig(path, dpi=110, format="png")
