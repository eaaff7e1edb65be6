"""vLLM's engine core dies, hangs, or does not start: one clear error, no hang, and windows that can be asked again."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")

from dataclasses import replace

from cluster.engine.vllm.plugin import OWNED
from cluster.errors import ConfigError, ModelError, UnavailableError
from cluster.models.loading import load_model


def gone(process: int, seconds: float) -> bool:
    """Whether a process ends (or has ended and is only not yet asked after) within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if status == "Z":
            return True
        time.sleep(0.05)
    return False


def processes(engine: Any) -> list[int]:
    """Ids of its engine core's processes."""
    return [each.pid for each in engine.core._llm.engine_core.resources.engine_manager.processes]


def test_a_prompt_that_vllm_refuses_costs_no_core(qwen: Any, spec: Any) -> None:
    from vllm.inputs import tokens_input

    from cluster.engine.vllm.core import PromptRequest

    core, cores = qwen.engine.core, processes(qwen.engine)
    with pytest.raises(ValueError, match=r"vLLM refuses a window: .*longer than the maximum model length"):
        core.answer([PromptRequest(tokens_input([1] * 8)), PromptRequest(tokens_input([1] * (core.max_tokens + 1)))])
    assert processes(qwen.engine) == cores
    (reply,) = core.answer([PromptRequest(tokens_input([1] * 8), max_tokens=2)])
    assert (reply.prompt, len(reply.scores)) == (8, len(qwen.model.yes_no_ids()[0]) * 2)


def test_a_killed_core_is_told_and_started_anew(qwen: Any, spec: Any) -> None:
    engine, samples = qwen.engine, qwen.frames(6, seed=7)
    expected = qwen.drive(qwen.native, spec(), samples)

    engine.admit(spec())
    requests = [request for sample in samples for request in engine.push(sample)]
    answers = engine.step(requests[:1])
    (core,) = processes(engine)
    os.kill(core, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="has died"):
        engine.step(requests[1:2])
    engine.core.check()
    # The same window again: another core, the same answers; nothing had to be encoded or sent again.
    answers += engine.step(requests[1:2])
    engine.evict("cam")

    assert len(processes(engine)) == 1
    assert processes(engine) != [core]
    assert [a.score for a in answers] == pytest.approx([a.score for a in expected[: len(answers)]], abs=2e-5)


def test_a_core_that_hangs_is_given_up_after_the_deadline(qwen: Any, spec: Any) -> None:
    engine, settings = qwen.engine, qwen.engine.core.settings
    engine.admit(spec())
    requests = [request for sample in qwen.frames(4) for request in engine.push(sample)]
    engine.step(requests[:1])
    (core,) = processes(engine)
    os.kill(core, signal.SIGSTOP)
    engine.core.settings = replace(settings, timeout_s=1.0, restarts=0)
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="did not answer 2 prompts within 1 s"):
        engine.step(requests[1:2])
    # No core may be started any more: the engine says so at once, and the replica will be replaced.
    with pytest.raises(UnavailableError, match="the replica must be replaced"):
        engine.step(requests[1:2])
    with pytest.raises(UnavailableError, match="the replica must be replaced"):
        engine.core.check()
    assert time.monotonic() - began < 20
    # What hung was ended, with its memory.
    assert gone(core, 5)
    engine.core.settings = settings
    engine.evict("cam")


def test_a_core_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    from cluster.engine.vllm.core import VllmCore
    from cluster.engine.vllm.served_model import write_model_folder
    from cluster.engine.vllm.settings import VllmSettings

    served = write_model_folder(load_model("tiny-qwen2_5_vl"), tmp_path, [32])
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    arguments = {
        "model": served.weights,
        "hf_config_path": str(served.config),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "kv_cache_memory_bytes": 2**26,
        "max_model_len": 1024,
        "enforce_eager": True,
        "skip_mm_profiling": True,
    }
    with pytest.raises(ModelError, match="engine core did not start"):
        VllmCore(arguments, [1], [2], VllmSettings())


def test_too_little_memory_for_one_prompt_is_refused_before_anything_starts() -> None:
    from cluster.engine.vllm.engine import VllmEngine
    from cluster.engine.vllm.settings import VllmSettings

    settings = VllmSettings({"kv_cache_memory_bytes": 2**20, "max_model_len": 8192})
    with pytest.raises(ConfigError, match="KV cache of 1 MiB is too small for one prompt of 8192 tokens"):
        VllmEngine(load_model("tiny-qwen2_5_vl"), settings=settings)


PARENT = """
import multiprocessing, time
from cluster.engine.vllm.plugin import register

def child():
    register()
    print("ready", multiprocessing.current_process().pid, flush=True)
    time.sleep(60)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=child).start()
    time.sleep(60)
"""


def test_a_core_ends_with_the_replica_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, OWNED: "1"}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        core = next(int(line.split()[1]) for line in parent.stdout if line.startswith("ready "))
        parent.kill()
    assert gone(core, 10)


def test_a_vllm_that_is_not_ours_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import enumerate as threads

    from cluster.engine.vllm.plugin import register

    monkeypatch.delenv(OWNED, raising=False)
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    register()
    assert not [thread for thread in threads() if thread.name == "parent-watch"]
