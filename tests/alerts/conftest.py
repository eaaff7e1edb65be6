"""The makers of alert_parts."""

from __future__ import annotations

import pytest
from alert_parts import Make


@pytest.fixture
def make() -> Make:
    return Make()
