"""Two texts side by side: what the model writes, and what it writes with a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..writing import Pair, Words

DIFFERS = "bold yellow"
NOT_FASTER = (
    "Not faster here: skipping saves the reading and computing of experts. That is most of the time of a large model on a GPU, "
    "little of a small one's, which deciding and launching take up (docs/speed.md)."
)


def print_pair(console: Console, pair: Pair, prompt: str | None = None) -> None:
    """Words that the other text does not have are coloured, or stand between stars where there are no colours."""
    if prompt is not None:
        console.print(Text(f"prompt: {prompt}", style="dim"), soft_wrap=True)
    colours = console.color_system is not None
    texts = [_marked(words, colours) for words in pair.words]
    made = Table(expand=True, show_lines=True)
    for heading in ("unskipped", f"{pair.requested:.0%} asked, {pair.realised:.1%} skipped"):
        made.add_column(heading, ratio=1, overflow="fold")
    made.add_row(*texts)
    made.add_row(*(f"{text.tokens} tokens, {text.speed:.1f} a second" for text in (pair.unskipped, pair.skipped)))
    console.print(made, highlight=False)
    console.print(_agreement(pair), highlight=False)
    if pair.requested and pair.skipped.speed < pair.unskipped.speed:
        console.print(NOT_FASTER, highlight=False)


def _marked(words: Words, colours: bool) -> Text:
    made = Text()
    for word, shared in words:
        space, bare = word[: len(word) - len(word.lstrip())], word.lstrip()
        made.append(space)
        made.append(bare if shared or colours else f"*{bare}*", style="" if shared else DIFFERS)
    return made


def _agreement(pair: Pair) -> str:
    words = pair.words[1]
    shared = sum(same for _, same in words)
    if shared == len(words) == len(pair.words[0]):
        return "Both texts are the same."
    return (
        f"{shared} of {len(words)} words are the unskipped text's; greedy texts part at the first token that differs."
    )
