"""Two nodes: whatever dies on one of them, the cameras go on on the other, and no window is missing from the counts."""

import pytest
from two_nodes import FAULTS, TwoNodes, judge

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ALWAYS = ("kill-decoder",)
"""Every fault takes a minute or two: `make test` causes these alone."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with TwoNodes(tmp_path_factory.mktemp("two-nodes")) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault in ALWAYS else pytest.mark.long) for fault in FAULTS]
)
def test_the_other_node_goes_on(cluster: TwoNodes, fault: str) -> None:
    assert judge(cluster, fault) == []
