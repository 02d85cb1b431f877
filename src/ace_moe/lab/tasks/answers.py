"""Answers in generated texts: a number, a boxed expression, code; and a judgement of each."""

from __future__ import annotations

import re
from fractions import Fraction

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
LETTER_GROUP = re.compile(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}")
NOISE = re.compile(r"\\[!,;: ]|\\left|\\right|\\displaystyle|\\\$|\$|\^\{?\\circ\}?|\\%|%|\s")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}|(-?\d+)/(-?\d+)")
FENCE = re.compile(r"```(?:\w*)\n(.*?)(?:```|\Z)", re.DOTALL)


def last_number(text: str) -> str:
    """The last number in a text without thousands separators; empty if there is none."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "").rstrip(".") if found else ""


def boxed(text: str) -> str:
    r"""The inside of the last \boxed{…}, braces counted; empty if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return ""
    depth = 0
    for place in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 7 : place]
    return ""


def same_answer(given: str, right: str) -> bool:
    """Equal as written once spacing and decoration are gone, or equal as numbers."""
    first, second = plain(given), plain(right)
    if not first or first == second:
        return bool(first) and first == second
    numbers = [as_number(text) for text in (first, second)]
    return numbers[0] is not None and numbers[0] == numbers[1]


def plain(text: str) -> str:
    """An expression without units, spacing and the many ways to write a fraction."""
    text = LETTER_GROUP.sub(r"\1", text.strip().rstrip("."))
    text = NOISE.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)


def as_number(text: str) -> Fraction | None:
    match = FRACTION.fullmatch(text)
    try:
        if match:
            sign, over, under = (match[1], match[2], match[3]) if match[2] else ("", match[4], match[5])
            return Fraction(int(f"{sign}{over}" if not over.startswith("-") else over), int(under))
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def program(prompt: str, completion: str, test: str, entry_point: str) -> str:
    """A HumanEval problem's file: the function, from a fenced block if there is one, and the call of its tests.

    A completion that writes the whole function again takes its place; what the prompt has in front of it stays.
    """
    block = FENCE.search(completion)
    code = block[1] if block else completion
    head = f"def {entry_point}"
    front = prompt.partition(head)[0] if head in code else prompt
    return f"{front}{code}\n{test}\ncheck({entry_point})\n"
