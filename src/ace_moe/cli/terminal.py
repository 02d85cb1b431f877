"""The two output streams: no commands hidden in names, no character that the terminal's encoding does not have."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

# control characters but tab and line end, and marks that turn the direction of what follows
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
PLAIN = {"–": "-", "—": "-", "−": "-", "·": "-", "→": "->", "…": "...", "τ": "tau", "×": "x", "±": "+-", "∘": "*"}
HANDLER = "ace_plain"


class Plain(Console):
    """Names of models, layers and files come from outside; what they hold is shown, not obeyed."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(
            COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text), **options
        )


def speak_plainly() -> None:
    """A terminal without – → τ gets what is nearest in its own characters, instead of nothing at all."""
    codecs.register_error(HANDLER, _nearest)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and getattr(stream, "errors", None) in ("strict", "backslashreplace"):
            reconfigure(errors=HANDLER)
    if getattr(sys.stdin, "errors", None) == "strict":  # a text that is not Unicode is refused in words of ours
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]


def hand_over() -> None:
    """Flush the output while an error can still be reported: at exit it would be lost with a code of 0 or 120."""
    if sys.stdout is None:  # closed by whoever called
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else it is tried again at exit
        raise


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


# ---- streams ----


out, err = Plain(), Plain(stderr=True)


def say(line: str, console: Console = out) -> None:
    """Print one line as it is: names of files may hold brackets, and a command to copy is not broken into lines."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def note(message: object) -> None:
    """Print one line on the error stream, beside the result."""
    err.print(f"[yellow]note:[/] {escape(str(message))}", highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))
