"""A JSON value changed somewhere, for tests of everything that reads JSON."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.just(10**400), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


def replace_somewhere(node: Any, seed: st.DataObject) -> None:
    """One value anywhere in a nest of lists and objects becomes another."""
    while True:
        step = seed.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        child = node[step]
        if not (isinstance(child, (dict, list)) and child) or seed.draw(st.integers(0, 3)) == 0:
            node[step] = seed.draw(JSON)
            return
        node = child
