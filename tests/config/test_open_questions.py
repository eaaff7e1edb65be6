"""A standing question that asks for more than yes or no is refused where it is written."""

import pytest

from cluster.config import InvalidConfigError, load_config
from cluster.types.cameras import is_open_question


@pytest.mark.parametrize(
    "text", ["Describe the scene", "What happened?", "how many people are there?", " Who came in?"]
)
def test_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="asks for more than yes or no"):
        load_config(None, {"questions": [{"id": "q", "text": text}]})


@pytest.mark.parametrize(
    "text", ["Is anyone there?", "When a car stops, does it block the gate?", "Ist jemand da?", "?"]
)
def test_taken(text: str) -> None:
    assert not is_open_question(text)
