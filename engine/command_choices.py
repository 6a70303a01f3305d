"""Options of commands that take one of a few words.

typer checks such a word by itself, but what it says of a wrong one begins with a phrase from the library
that does the checking. Here the message is the command's own.
"""

from collections.abc import Callable
from typing import Any

import typer


def one_of(*words: str) -> dict[str, Any]:
    """Arguments of `typer.Option` for an option that takes one of these words and shows them in help."""

    def parse(given: str) -> str:
        if given not in words:
            raise typer.BadParameter(f"there is no {given!r}; there are {', '.join(words)}")
        return given

    parser: Callable[[str], str] = parse
    return {"parser": parser, "metavar": f"<{'|'.join(words)}>"}
