"""Costs, demands and a fleet with numbers that can be checked by hand."""

from cluster.control.costs import CostModel
from cluster.control.demand import Demand
from cluster.control.fleet import Fleet
from cluster.control.ladder import Ladder, LadderPolicy, Rung

LADDER = Ladder(
    (
        Rung("full"),
        Rung("prune", prune=1.5, kept=0.8, f1=0.98),
        Rung("stride", prune=1.5, kept=0.8, stride=2.0, f1=0.9),
        Rung("shed", shed=True, f1=0.0),
    ),
    "made up",
)


def costs(**changes) -> CostModel:
    """A window costs 0.1 s whatever is in it, unless changed."""
    numbers = {"step_s": 0.0, "window_s": 0.1, "encoded_s": 0.0, "computed_s": 0.0, "attended_s": 0.0}
    return CostModel("made-up", "none", "made up", **(numbers | {"spread": 0.0, "error": 0.0} | changes))


def demand(name: str = "camera", **changes) -> Demand:
    return Demand(name, **({"stride_s": 1.0, "window_s": 5.0, "anchor_interval_s": 8.0} | changes))


def fleet(replicas: int = 1, **options) -> Fleet:
    """Of replicas that do ten windows a second each."""
    options = {"policy": LadderPolicy(LADDER, high=0.95, aim=0.9, low=0.8)} | options
    made = Fleet(costs(), LADDER, **options)
    for number in range(replicas):
        made.join(f"r{number}")
    return made
