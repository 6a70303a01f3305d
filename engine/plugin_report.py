"""Who answers which hook: what `python -m engine plugins` prints.

Everything is read from the host that a run would use, so that what is shown is what would happen.
The text beside an option is the docstring under it in the plugin's own source.
"""

import ast
import inspect
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine import hookspecs
from engine.plugin_host import PluginHost, hook_names, kind_of

KINDS = {"choose": "first answer", "wrap": "each wraps", "watch": "all are told"}


def describe_plugins(host: PluginHost) -> dict[str, Any]:
    """Hooks with those who have them, in the order of asking, and plugins with their options; for JSON."""
    return {
        "hooks": [
            {
                "hook": hook,
                "about": first_line(getattr(hookspecs, hook).__doc__),
                "kind": kind_of(hook),
                "single_answer": kind_of(hook) == "choose",
                "plugins": [plugin.name for plugin in host.answering(hook)],
            }
            for hook in hook_names()
        ],
        "plugins": [
            {
                "plugin": plugin.name,
                "from": plugin.origin,
                "file": plugin.file,
                "about": first_line(plugin.module.__doc__),
                "hooks": host.hooks_of(plugin),
                "options": [
                    {
                        "option": field.name,
                        "value": getattr(plugin.options, field.name),
                        "about": field_docs(type(plugin.options)).get(field.name, ""),
                    }
                    for field in attrs.fields(type(plugin.options))
                ],
            }
            for plugin in host.plugins
        ],
    }


def print_plugins(host: PluginHost, console: Console) -> None:
    """The same for people: a table of hooks, then each plugin with its options."""
    described = describe_plugins(host)
    table = Table(title="who is asked or told, in which order", title_justify="left")
    for heading in ("hook", "kind", "plugins"):
        table.add_column(heading, overflow="fold")
    for hook in described["hooks"]:
        table.add_row(hook["hook"], KINDS[hook["kind"]], Text("\n".join(hook["plugins"]) or "–"))
    console.print(table)
    lines = []
    for plugin in described["plugins"]:
        lines += ["", f"{plugin['plugin']} ({plugin['from']}): {plugin['about']}"]
        lines.append(f"  {plugin['file']}")
        lines.append(f"  hooks: {', '.join(plugin['hooks']) or 'none'}")
        lines += [
            f"  {option['option']} = {option['value']!r}: {option['about']}" for option in plugin["options"]
        ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def field_docs(cls: type) -> dict[str, str]:
    """The docstrings that stand under the fields of a class, on one line each; none without its source."""
    try:
        tree = ast.parse(inspect.getsource(inspect.getmodule(cls) or cls))
    except (OSError, TypeError):
        return {}
    body = next(
        (
            node.body
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__
        ),
        [],
    )
    docs = {}
    for field, text in zip(body, body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            docs[field.target.id] = " ".join(text.value.value.split())
    return docs


def first_line(doc: str | None) -> str:
    """The first line of a docstring; empty without one."""
    return (doc or "").strip().partition("\n")[0]
