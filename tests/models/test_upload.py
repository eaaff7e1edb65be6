"""Patches go to the device beside the computation, which reads them only once they are there; and nothing waits."""

from __future__ import annotations

import contextlib

import torch

from cluster.models import upload


class Queue:
    """A stream that notes what is asked of it, in order."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Queue) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_the_computation_waits_for_patches_and_keeps_their_memory(monkeypatch) -> None:
    """No GPU is here: queues are replaced by ones that note the order; copies are real, in host memory."""
    log: list[str] = []
    compute, uploads = Queue("compute", log), Queue("uploads", log)
    running = [compute]

    @contextlib.contextmanager
    def stream(queue: Queue):
        running.append(queue)
        yield
        running.pop()

    empty, to = torch.empty, torch.Tensor.to

    def copied(tensor, device, *, non_blocking):
        log.append(f"copy in {running[-1].name}, {'without' if non_blocking else 'with'} waiting")
        return to(tensor, "cpu", copy=True)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: running[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **options: empty(*shape, **options))
    monkeypatch.setattr(torch.Tensor, "to", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, queue: log.append(f"memory of {queue.name}"))
    monkeypatch.setattr(upload, "_queue", lambda device: uploads)
    patches = [torch.full((2, 2, 3), value, dtype=torch.uint8) for value in (1, 2)]
    found = upload.upload(patches, torch.device("cuda"))
    assert log == ["copy in uploads, without waiting", "compute waits for uploads", "memory of compute"]
    assert found[:, 0, 0].tolist() == [1, 1, 2, 2]


def test_small_tensors_do_not_make_the_host_wait(monkeypatch) -> None:
    """They go through pinned memory, to which no expanded tensor can be written."""
    sent: list[bool] = []
    to = torch.Tensor.to

    def pinned(tensor):
        assert tensor.is_contiguous()
        return tensor.clone()

    def copied(tensor, device, *, non_blocking=False):
        sent.append(non_blocking)
        return to(tensor, "cpu", copy=True)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", copied)
    expanded = torch.arange(4).expand(3, -1)
    assert torch.equal(upload.to_device(expanded, torch.device("cuda", 0)), expanded)
    assert upload.to_device(expanded[:0], torch.device("cuda", 0)).shape == (0, 4)
    assert torch.equal(upload.to_device(expanded, torch.device("cpu")), expanded)
    assert sent == [True, False, False]


def test_memory_that_is_there_is_written_without_waiting(monkeypatch) -> None:
    sent: list[tuple[bool, bool]] = []
    pinned: list[torch.Tensor] = []

    class Device(torch.Tensor):
        """Host memory that says it is on a GPU."""

        device = torch.device("cuda", 0)

        def copy_(self, tensor, non_blocking=False):
            sent.append((any(tensor is each for each in pinned), non_blocking))
            return self

    def pin(tensor):
        assert tensor.is_contiguous()
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    upload.fill(torch.zeros(3, 4).as_subclass(Device), torch.arange(4.0).expand(3, -1))
    here = torch.zeros(3, 4)
    upload.fill(here, torch.arange(4.0).expand(3, -1))
    assert sent == [(True, True)]
    assert here[2].tolist() == [0, 1, 2, 3]
