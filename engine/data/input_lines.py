"""Lines of people's JSONL files with where they stand, a chunk at a time: no file need fit into memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.errors import DataError

_BOM = b"\xef\xbb\xbf"


def list_inputs(inputs: Sequence[Path | str]) -> list[Path]:
    """The files that are named, or that lie in named folders.

    Raises:
        DataError: something is not there, or a file is empty.
    """
    files: list[Path] = []
    for given in map(Path, inputs):
        if given.is_dir():
            inside = sorted(given.glob("*.jsonl"))
            if not inside:
                raise DataError(f"{given}: holds no *.jsonl file")
            files.extend(inside)
        elif given.is_file():
            files.append(given)
        else:
            raise DataError(f"{given}: no such file or folder")
    if not files:
        raise DataError("prepare: no input file given")
    empty = [str(file) for file in files if file.stat().st_size == 0]
    if empty:
        raise DataError(f"{', '.join(empty)}: empty (0 bytes)")
    return files


def chunks(files: Sequence[Path], rows: int) -> Iterator[list[tuple[str, bytes]]]:
    """Lines with where they stand (`file:line`), so many at a time; blank lines are no rows."""
    chunk: list[tuple[str, bytes]] = []
    for path in files:
        try:
            # Bytes, split at \n alone: text mode would also split at separators inside strings.
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    line = (line.removeprefix(_BOM) if number == 1 else line).strip()
                    if line:
                        chunk.append((f"{path}:{number}", line))
                    if len(chunk) == rows:
                        yield chunk
                        chunk = []
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error})") from error
    if chunk:
        yield chunk
