"""Who is compared: an engine and a way to use it, one entry each."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from cluster.engine.base import Engine
from cluster.engine.native.engine import NativeEngine
from cluster.models.base import VisionLanguageModel

Start = Callable[[VisionLanguageModel], AbstractContextManager[Engine]]

# Seconds that vLLM may take for a batch: whole windows of a large model on a processor take minutes.
TIMEOUT_S = 1800.0


@contextmanager
def _native(model: VisionLanguageModel) -> Iterator[Engine]:
    yield NativeEngine(model)


@contextmanager
def _vllm(
    model: VisionLanguageModel, *, mode: Literal["full", "pruned"], prefix_cache: bool = True
) -> Iterator[Engine]:
    from cluster.engine.vllm.engine import VllmEngine
    from cluster.engine.vllm.settings import VllmSettings

    arguments = {"enforce_eager": True, "enable_prefix_caching": prefix_cache}
    engine = VllmEngine(model, mode=mode, settings=VllmSettings(arguments, timeout_s=TIMEOUT_S))
    try:
        yield engine
    finally:
        engine.close()


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to answer the windows.

    * ``whole``: it is given every patch of every frame; else what the pruner keeps
    * ``refresh``: the policy of its streams
    * ``vllm``: it needs vLLM, which this environment may lack
    * ``budget``: share of the overlap that it refreshes; the policy's own amount where there is none
    * ``goes_on``: a window costs it less for the windows before, so it answers every one of them; else it is spared
      those before the first whole one
    """

    name: str
    what: str
    start: Start
    whole: bool
    refresh: str
    vllm: bool = False
    goes_on: bool = False
    budget: float | None = None


def check(contestants: Iterable[Contestant]) -> None:
    """Refuse what this environment cannot run, before minutes are spent.

    Raises:
        ConfigError: vLLM is needed and not there, or of a version that is not tested.
    """
    if any(contestant.vllm for contestant in contestants):
        from cluster.engine.vllm.settings import check_version

        check_version()


CONTESTANTS: dict[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Contestant("native_full", "every token of every window; a frame is encoded once", _native, True, "all"),
        Contestant("native", "pruned, reused, refreshed by policy", _native, False, "anchors", goes_on=True),
        Contestant("native_none", "the same with nothing refreshed", _native, False, "none", goes_on=True),
        Contestant(
            "vllm_full",
            "vLLM, every token; each frame is encoded once, by our tower, and its embeddings are kept; prefix cache on",
            partial(_vllm, mode="full"),
            True,
            "all",
            vllm=True,
        ),
        Contestant(
            "vllm_full_uncached",
            "vllm_full with the prefix cache off",
            partial(_vllm, mode="full", prefix_cache=False),
            True,
            "all",
            vllm=True,
        ),
        Contestant("vllm_pruned", "vLLM, kept tokens alone", partial(_vllm, mode="pruned"), False, "all", vllm=True),
    )
}
