from pathlib import Path

import pytest
import torch

from cluster.lab.bench.gpu_frontend import made_clips


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_clips(tmp_path_factory.mktemp("clips"))
