"""Freeze docstring-to-body pairs of Python's standard library into `engine/builtin/stdlib_pairs.jsonl`.

The built-in conversations ask for the body of a function given its name, arguments and docstring.
The sources are parsed, never imported, and the result is kept in the repository, so the generator
gives the same text whatever interpreter runs it later. Run it only to start a new generation of the
built-in target: every conversation and the lexicon follow from this file.

    python -m tools.write_stdlib_pairs
"""

import ast
import json
import platform
import sysconfig
from pathlib import Path

BUILTIN = Path(__file__).resolve().parents[1] / "engine" / "builtin"
SKIPPED = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__")
)
# In characters. They keep a body under about 120 tokens and a whole conversation under 320.
LONGEST_BODY = 200
LONGEST_DOCSTRING = 100
LONGEST_SIGNATURE = 50


def pair_of(function: ast.FunctionDef, module: str) -> dict[str, str] | None:
    """Name, signature, first paragraph of the docstring and body, or None where a part does not fit."""
    docstring = ast.get_docstring(function)
    if not docstring or len(function.body) < 2:
        return None
    summary = " ".join(docstring.split("\n\n")[0].split())
    signature = f"def {function.name}({ast.unparse(function.args)}):"
    body = "\n".join(ast.unparse(statement) for statement in function.body[1:])
    fits = (
        15 <= len(summary) <= LONGEST_DOCSTRING
        and 36 <= len(body) <= LONGEST_BODY
        and len(signature) <= LONGEST_SIGNATURE
        and (summary + body + signature).isascii()
        and body not in ("pass", "raise NotImplementedError")
    )
    if not fits:
        return None
    return {"module": module, "signature": signature, "docstring": summary, "body": body}


def pairs_of_library(library: Path) -> list[dict[str, str]]:
    """All fitting pairs in the order of their files; of equal bodies only the first is kept."""
    pairs: list[dict[str, str]] = []
    bodies: set[str] = set()
    for source in sorted(library.rglob("*.py")):
        relative = source.relative_to(library)
        if SKIPPED & set(relative.parts) or relative.parts[0].startswith("_"):
            continue
        try:
            tree = ast.parse(source.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            print(f"left out {relative}: {error}")
            continue
        module = ".".join(relative.with_suffix("").parts)
        for node in ast.walk(tree):
            pair = pair_of(node, module) if isinstance(node, ast.FunctionDef) else None
            if pair and pair["body"] not in bodies:
                bodies.add(pair["body"])
                pairs.append(pair)
    return pairs


def main() -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    pairs = pairs_of_library(library)
    with open(BUILTIN / "stdlib_pairs.jsonl", "w", encoding="utf-8", newline="\n") as out:
        for pair in pairs:
            out.write(json.dumps(pair) + "\n")
    print(f"{len(pairs)} pairs from Python {platform.python_version()}")


if __name__ == "__main__":
    main()
