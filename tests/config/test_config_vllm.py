"""What of ``vllm:`` contradicts other keys."""

import pytest

from cluster.config import load_config
from cluster.errors import ConfigError


def test_a_batch_must_be_given_up_before_its_replica_is() -> None:
    times = {"vllm": {"timeout_s": 90}, "cluster": {"stall_timeout_s": 90}}
    with pytest.raises(ConfigError, match=r"vllm\.timeout_s.*must be below cluster\.stall_timeout_s = 90"):
        load_config(None, {"engine": "vllm", **times})
    assert load_config(None, times).vllm.timeout_s == 90
    assert load_config(None, {"engine": "vllm", **times, "cluster": {"stall_timeout_s": 91}}).engine == "vllm"
