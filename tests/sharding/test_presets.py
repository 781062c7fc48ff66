"""Rules by name and by phase; that each preset runs is shown in ``tests/runtime/test_presets.py``."""

from __future__ import annotations

import pytest

from jdserve.core.errors import InvalidPlan
from jdserve.sharding.presets import PRESETS, PhaseRules, phase_rules


def test_rules_of_a_phase_are_named_or_given() -> None:
    tensor, sequence = PRESETS["tensor"], PRESETS["sequence"]
    assert phase_rules("sequence") == PhaseRules(sequence, sequence, sequence)
    assert phase_rules("prefill=sequence") == PhaseRules(prefill=sequence)
    assert phase_rules(sequence).of("decode") == sequence
    assert phase_rules(PhaseRules(decode=sequence)).of("prefill") == tensor
    with pytest.raises(InvalidPlan, match="'front' is no role"):
        phase_rules("front=tensor")
    with pytest.raises(InvalidPlan, match="known: tensor, sequence, expert, replicated"):
        phase_rules("diagonal")
