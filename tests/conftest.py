"""What every test runs under."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from waiting import until_async

from cluster.redaction.known_secrets import KNOWN

pytest_plugins = ["border_types"]

# The same examples in every run, so that a red run is red again; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# On a GPU machine SIGHTLINE_DEVICE=cuda runs tests/conformance and tests/engine there. Elsewhere kernels for a GPU run
# in Triton's interpreter, which it reads when it is imported, by torch or by us.
os.environ.setdefault("SIGHTLINE_DEVICE", "cpu")
if os.environ["SIGHTLINE_DEVICE"] == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
# Threads of a command that takes all cores sleep while they wait for each other. Beside other tests they would spin for
# cores that the others have: twenty times the work itself, of two threads with the demo model on two busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A call of Ray without a cluster is an error, and does not start one in the test's process.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Ray's workers run at a low priority, and would wait for whatever else this machine does.
os.environ.setdefault("RAY_worker_niceness", "0")
# Readline, which pytest loads, gives pytest-xdist's workers a terminal of 80 columns, to which tables would be fitted.
os.environ.pop("COLUMNS", None)
# Processes that tests start replace themselves at once: gRPC need not, and at times cannot, prepare for a fork.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# A shell starts background jobs with Ctrl-C ignored, which children inherit: tests that send it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A module a process, except that one runs all modules with clusters, first as they take longest: two clusters at a
    time would be too many for a small machine."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "clusters" if _starts_clusters(config.rootpath / module) else super()._split_scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if "clusters" in self.workqueue:
                self.workqueue.move_to_end("clusters", last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


@cache
def _starts_clusters(module: Path) -> bool:
    return "mark.cluster" in module.read_text()


# Hundreds of thousands of objects of imported modules stay to the end: the collector need not go through them again and
# again. In processes that collect, which xdist's own does not.
def pytest_collectstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# Triton's binding reports what is frozen when the process ends as leaked.
atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def forgotten_secrets() -> Iterator[None]:
    """Secrets that one test's sources have are words of another's texts."""
    yield
    KNOWN.clear()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A command or a replica in the test's process takes all cores for torch's products; the tests after it would wait
    for threads that fight for them."""

    def limit() -> None:
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)

    limit()
    yield
    limit()


@pytest.fixture(name="until")
def until_fixture() -> Any:
    return until_async


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 s of a street, 160x96."""
    from cluster.lab.scenes.street_clips import make_clip

    path = tmp_path_factory.mktemp("clips") / "street.mp4"
    make_clip("street", path, seconds=24, size=(160, 96))
    return path


@pytest.fixture(scope="module")
def small_cameras() -> Iterator[None]:
    """Made scenes have a third of their cameras' width and height, and a quarter of their rate."""
    from cluster.lab.scenes import scene

    small = {
        split: [replace(camera, width=214, height=120, fps=camera.fps / 4) for camera in cameras]
        for split, cameras in scene._CAMERAS.items()
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scene, "_CAMERAS", small)
        yield


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Any]:
    """``sightline`` in a folder of its own, in this process or as others; what it leaves running is ended."""
    from command_line import Cli

    cli = Cli(tmp_path)
    yield cli
    cli.close()
