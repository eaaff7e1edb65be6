"""What a step of windows costs: the model, its fit to timed steps, and its files."""

from cluster.scheduling.costs.fit import fit
from cluster.scheduling.costs.model import CostModel, WindowWork
from cluster.scheduling.costs.store import load, names, save

__all__ = ["CostModel", "WindowWork", "fit", "load", "names", "save"]
