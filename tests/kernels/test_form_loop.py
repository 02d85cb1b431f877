"""Every form and everything around it, in torch, against a plain loop over slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_rule import FORMS, cases, scores

from ace_moe import rule


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60)
@given(st.data())
def test_a_form_is_its_loop(name, data):
    form = FORMS[name]
    case = data.draw(cases(form))
    (ids, gates, tables), setting = case.tensors(), case.setting
    c = rule.contribution(form, gates, ids, tables)
    c = rule.protect(c, gates, ids, setting.min_active, setting.min_mass)
    c = c if setting.common is None else rule.weigh(c, torch.tensor(setting.common))
    keep, new = rule.decide(c, gates, torch.tensor(case.taus).reshape(-1, 1), setting.gain)
    expected, rescaled = case.expected(form)
    assert keep.tolist() == expected
    tolerance = 2**-7 if case.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(new.float(), torch.tensor(rescaled).reshape(gates.shape), rtol=tolerance, atol=0)
    whole = keep.all(-1)
    assert torch.equal(new[whole], gates[whole]), "a token that loses nothing has the router's own gates"


@pytest.mark.parametrize("name", FORMS)
def test_the_cases_are_no_formality(name):
    """Slots are kept and skipped, and τ falls on contributions wherever it may."""
    form, seen = FORMS[name], {"kept": 0, "skipped": 0, "tie": 0}

    @settings(max_examples=15, database=None, derandomize=True)
    @given(cases(form))
    def look(case):
        for token, tau in zip(case.tokens, case.taus, strict=True):
            values = scores(form, case.setting, token, case.tables)
            seen["kept"] += sum(c >= tau for c in values)
            seen["skipped"] += sum(c < tau for c in values)
            seen["tie"] += tau in values

    look()
    assert seen["kept"] and seen["skipped"] and (seen["tie"] or form.cumulative), seen
