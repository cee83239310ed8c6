"""Costs in text and in JSON."""

import json

from dualpipe.schedule import Costs
from dualpipe.schedule.read_costs import parse_costs


def test_costs_in_text_and_json(tmp_path):
    assert parse_costs("") == Costs()
    assert parse_costs("F=1.5, FB=3,p2p=0.1,FI=2") == Costs(F=1.5, FB=3.0, p2p=0.1, pairs={("F", "I"): 2.0})
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"F": 2, "FB": 4, "pairs": {"FF": 3}, "per_stage": {"7": {"F": 2.5}}}))
    base = Costs(F=2, FB=4, pairs={("F", "F"): 3})
    own = Costs(F=2.5, FB=4, pairs={("F", "F"): 3})
    assert parse_costs(str(file)) == Costs(F=2, FB=4, pairs=base.pairs, per_stage={7: own})
