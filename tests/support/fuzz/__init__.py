"""Nonsense by the hundred thousand: at every gRPC method, at HTTP, and at what people write in YAML.

Nothing may die of it, hang, answer with a defect of its own (UNKNOWN, INTERNAL, 500), write an exception that nobody
expected to its log, or keep the memory. Every case follows from ``--seed``, its part and its number, so that one that
failed is done again with ``--only``.
"""

from fuzz.bench import add_arguments, run

__all__ = ["add_arguments", "run"]
