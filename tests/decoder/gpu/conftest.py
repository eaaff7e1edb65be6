from pathlib import Path

import pytest

from cluster.lab.bench.gpu_frontend import made_clips


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Half as long as the benchmark's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cluster.lab.bench.gpu_frontend.CLIP_S", 6.0)
        return made_clips(tmp_path_factory.mktemp("clips"))
