"""Rows of timings.jsonl as columns: a million spans in 80 MB, checked as they come.

A long run writes millions of rows, which as dictionaries would take gigabytes and minutes. So rows
are taken in by the batch, each column is checked as a whole, and only where a check fails are rows
looked at one by one, to say which of them is wrong and how. What kernel launches came to stands in
few rows or none, so such a column is kept only from the first row on that has it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError

NAMES = ("stage", "lane")
REQUIRED = ("start", "host_ms")
OPTIONAL = ("step", "micro_batch", "waited_ms", "device_ms", "tokens", "bytes")
LAUNCHES = (
    "launches",
    "cold_keys",
    "tuning_ms",
    "tuning_waited_ms",
    "launch_waited_ms",
    "stage_waited_ms",
    "compile_waited_ms",
    "out_of_memory_retries",
)
"""Optional too; a row leaves out what is zero."""
WHOLE = ("step", "micro_batch", "tokens", "bytes", "launches", "cold_keys", "out_of_memory_retries")

Array = NDArray[np.float64]


class BadRow(InputError):
    """A row that cannot be a span; `index` counts from 0 within the rows that were given."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"row {index}: {reason}")
        self.index = index
        self.reason = reason


@attrs.frozen(kw_only=True, eq=False)
class Spans:
    """Spans as columns of one length; NaN where a row does not say."""

    stages: tuple[str, ...]
    lanes: tuple[str, ...]
    stage: NDArray[np.int64]
    """[n]: index into `stages`."""
    lane: NDArray[np.int64]
    """[n]: index into `lanes`."""
    step: Array
    micro_batch: Array
    start: Array
    """[n]: unix seconds, the launch on the host."""
    waited: Array
    """[n]: seconds before `start`; 0 where a row does not say."""
    host: Array
    """[n]: seconds."""
    device: Array
    """[n]: seconds."""
    tokens: Array
    bytes: Array
    launches: dict[str, Array]
    """[n] for each of `LAUNCHES` that any row has, as in the file; 0 where a row does not say."""

    def __len__(self) -> int:
        return self.start.size

    @property
    def duration(self) -> Array:
        """[n]: seconds until host and device are both done."""
        return np.fmax(self.host, self.device)

    @property
    def end(self) -> Array:
        """[n]: unix seconds."""
        return self.start + self.duration

    def where(self, chosen: NDArray[Any]) -> "Spans":
        """The spans that a mask or indices choose."""
        others = attrs.filters.exclude("stages", "lanes", "launches")
        columns: dict[str, Any] = attrs.asdict(self, filter=others)
        launches = {name: column[chosen] for name, column in self.launches.items()}
        columns = {name: column[chosen] for name, column in columns.items()}
        return attrs.evolve(self, **columns, launches=launches)

    def groups(self) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """Indices of the spans of each stage on each lane, with the indices of both names."""
        key = self.stage * max(len(self.lanes), 1) + self.lane
        order = np.argsort(key, kind="stable")
        borders = np.flatnonzero(np.diff(key[order])) + 1
        for members in np.split(order, borders) if len(self) else ():
            yield int(self.stage[members[0]]), int(self.lane[members[0]]), members

    def is_part(self) -> NDArray[np.bool_]:
        """[n]: whether a span lies inside a stage: `stage.part`, where its lane runs `stage` too.

        A dot alone makes no part: a plugin may name its stage with one.
        """
        present = {(self.stages[stage], lane): (stage, lane) for stage, lane, _ in self.groups()}
        parts = np.zeros((len(self.stages), len(self.lanes)), dtype=bool)
        for (name, lane), place in present.items():
            stage, dot, _ = name.partition(".")
            parts[place] = bool(dot) and (stage, lane) in present
        return parts[self.stage, self.lane]


class SpanLog:
    """Takes rows in as a run makes them or a reader finds them."""

    def __init__(self) -> None:
        self._codes: dict[str, dict[str, int]] = {name: {} for name in NAMES}
        self._columns: dict[str, list[NDArray[Any]]] = {key: [] for key in (*NAMES, *REQUIRED, *OPTIONAL)}
        self._launches: dict[str, list[tuple[int, Array]]] = {}
        """By column: rows before a piece, and the piece; rows without a piece have none."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows with the keys of timings.jsonl; further keys are nobody's concern here.

        Raises:
            BadRow: the first row that cannot be a span; none of `rows` is taken in.
        """
        try:
            columns = {key: self._encode(key, [row[key] for row in rows]) for key in NAMES}
            columns |= {key: _numbers([row[key] for row in rows]) for key in REQUIRED}
            columns |= {key: _numbers([row.get(key) for row in rows]) for key in OPTIONAL}
            launches = {key: _numbers(values) for key, values in _given(rows)}
            fits = all(_fits(key, columns[key]) for key in (*REQUIRED, *OPTIONAL))
            fits = fits and all(_fits(key, column) for key, column in launches.items())
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            fits = False
        if not fits:
            # An odd type that is none the less a number, such as a numpy scalar, passes this.
            rows = [_checked(index, row) for index, row in enumerate(rows)]
            columns = {key: self._encode(key, [row[key] for row in rows]) for key in NAMES}
            columns |= {key: np.array([row[key] for row in rows], np.float64) for key in REQUIRED + OPTIONAL}
            launches = {key: np.array(values, np.float64) for key, values in _given(rows)}
        for key, column in columns.items():
            self._columns[key].append(column)
        for key, column in launches.items():
            self._launches.setdefault(key, []).append((self._count, np.nan_to_num(column)))
        self._count += len(rows)

    def spans(self) -> Spans:
        """All rows so far."""

        def joined(key: str, kind: type) -> NDArray[Any]:
            # The pieces are replaced by the whole, so that asking again costs nothing.
            self._columns[key] = [np.concatenate([np.empty(0, kind), *self._columns[key]])]
            return self._columns[key][0]

        def filled(pieces: list[tuple[int, Array]]) -> Array:
            column = np.zeros(self._count)
            for before, piece in pieces:
                column[before : before + piece.size] = piece
            pieces[:] = [(0, column)]
            return column

        return Spans(
            stages=tuple(self._codes["stage"]),
            lanes=tuple(self._codes["lane"]),
            stage=joined("stage", np.int64),
            lane=joined("lane", np.int64),
            step=joined("step", np.float64),
            micro_batch=joined("micro_batch", np.float64),
            start=joined("start", np.float64),
            waited=np.nan_to_num(joined("waited_ms", np.float64)) / 1e3,
            host=joined("host_ms", np.float64) / 1e3,
            device=joined("device_ms", np.float64) / 1e3,
            tokens=joined("tokens", np.float64),
            bytes=joined("bytes", np.float64),
            launches={key: filled(self._launches[key]) for key in LAUNCHES if key in self._launches},
        )

    def keep(self, chosen: NDArray[np.bool_]) -> None:
        """Forget the rows that a mask over all of `spans()` leaves out; numbers of names stay theirs."""
        self.spans()  # which leaves one piece of each column
        for key, pieces in self._columns.items():
            self._columns[key] = [pieces[0][chosen]]
        for pieces_of in self._launches.values():
            pieces_of[:] = [(0, pieces_of[0][1][chosen])]
        self._count = int(chosen.sum())

    def _encode(self, key: str, names: Sequence[str]) -> NDArray[Any]:
        codes = self._codes[key]
        if set(map(type, names)) - {str}:
            raise TypeError(f"{key} holds more than text")
        return np.array([codes.setdefault(name, len(codes)) for name in names], dtype=np.int64)


def _given(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """The columns of `LAUNCHES` that some row has."""
    for key in LAUNCHES:
        values = [row.get(key) for row in rows]
        if values.count(None) < len(values):
            yield key, values


def _numbers(values: Sequence[Any]) -> Array:
    """As float64, which holds whole numbers up to 2^53; NaN for None."""
    if set(map(type, values)) - {int, float, type(None)}:
        raise TypeError("more than numbers")
    return np.array(values, dtype=np.float64)


def _fits(key: str, column: Array) -> bool:
    # None passes here where it may stand, and NaN with it, which JSON cannot say.
    given = column if key in REQUIRED else column[~np.isnan(column)]
    right = bool(np.isfinite(given).all() and (given >= 0).all())
    return right and (key not in WHOLE or bool((given == np.floor(given)).all()))


def _checked(index: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise BadRow(index, f"expected an object with stage, lane and start, found {_shown(row)}")
    for key in (*NAMES, *REQUIRED):
        if key not in row:
            raise BadRow(index, f"{key} is missing; a span names {', '.join((*NAMES, *REQUIRED))}")
    for key in NAMES:
        if not isinstance(row[key], str):
            raise BadRow(index, f"{key} = {_shown(row[key])}: expected a name")
    for key in (*REQUIRED, *OPTIONAL, *LAUNCHES):
        value: Any = row.get(key)
        if value is None and key not in REQUIRED:
            continue
        is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise BadRow(index, f"{key} = {_shown(value)}: expected a number that is 0 or more")
        if key in WHOLE and value != math.floor(value):
            raise BadRow(index, f"{key} = {_shown(value)}: expected a whole number")
    values = {key: row.get(key) for key in REQUIRED + OPTIONAL + LAUNCHES}
    return {key: str(row[key]) for key in NAMES} | values


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
