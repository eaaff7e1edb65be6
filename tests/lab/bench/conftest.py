"""Windows that are shorter than a bench's."""

import pytest

from cluster.lab.bench import gpu, gpu_host
from cluster.lab.bench.gpu_host import camera_samples


@pytest.fixture
def short_windows(monkeypatch):
    """Half as long as the bench's, and as many: every launch is one of Python's."""
    for module in (gpu, gpu_host):
        monkeypatch.setattr(module, "WINDOW_S", 20.0)
        monkeypatch.setattr(module, "STRIDE_S", 4.0)
    camera_samples.cache_clear()
    yield
    camera_samples.cache_clear()
