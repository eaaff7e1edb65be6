"""A Kubernetes API server without Kubernetes."""

import pytest
from kube_server import KubeServer


@pytest.fixture
def kube(tmp_path):
    server = KubeServer(tmp_path)
    yield server
    server.close()
