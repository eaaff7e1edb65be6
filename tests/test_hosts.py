"""What a host's name or address says about where it is."""

import pytest

from cluster.hosts import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"])
def test_of_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "gateway", ""])
def test_of_others(host):
    assert not is_loopback(host)
