"""What a step of windows costs: the model, its fit to timed steps, and its files."""

from cluster.control.costs.fit import fit
from cluster.control.costs.model import CostModel, WindowWork, load, names, save

__all__ = ["CostModel", "WindowWork", "fit", "load", "names", "save"]
