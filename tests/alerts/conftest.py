"""The makers of alert_parts."""

import pytest
from alert_parts import Make


@pytest.fixture
def make() -> Make:
    return Make()
