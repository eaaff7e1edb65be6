"""The way of one camera's samples on the GPU, from its decoder to kept patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.codec.nvdec import DevicePicture, Nvdec, shared_nvdec
from cluster.types import FrameSample
from cluster.vision.sampler import PatchSampler

if TYPE_CHECKING:
    from cluster.decoder.gpu.frontend import DeviceCamera, DeviceFrontend, DeviceSample


def _shared_frontend() -> DeviceFrontend:
    # With it comes torch, which a decoder on the CPU does without.
    from cluster.decoder.gpu.frontend import shared_frontend

    return shared_frontend()


@dataclass(frozen=True, slots=True)
class DecodeDevices:
    """The GPU of a process: ``nvdec`` decodes; ``frontend`` gives what works on its pictures, once there are any."""

    nvdec: Nvdec = field(default_factory=shared_nvdec)
    frontend: Callable[[], DeviceFrontend] = _shared_frontend


class DevicePath:
    """One camera's part of the front end; used by its thread."""

    def __init__(self, sampler: PatchSampler, devices: DecodeDevices) -> None:
        self._sampler = sampler
        self._devices = devices
        self._camera: DeviceCamera | None = None

    def process(self, picture: DevicePicture, *, alone: bool) -> tuple[DeviceSample, FrameSample | None]:
        """Prune a sample, in one batch with those of other cameras; ``alone``: its frame has no other samples.

        Raises:
            ImportError: there is no torch.
            NotImplementedError: a format that cannot be read on the GPU.
            RuntimeError: the GPU failed.
        """
        frontend = self._devices.frontend()
        if self._camera is None:
            self._camera = frontend.add_camera(self._sampler)
        try:
            sample = frontend.process(self._camera, picture)
        except frontend.fatal as error:
            # No call of this process to the GPU will succeed again.
            self._devices.nvdec.fail(f"the GPU failed: {str(error).splitlines()[0]}")
            raise
        return sample, self.flush() if sample.frame is None and alone else sample.frame

    def flush(self) -> FrameSample | None:
        """See :meth:`PatchSampler.flush`."""
        return None if self._camera is None else self._devices.frontend().flush(self._camera)

    def clear(self) -> None:
        """Give the camera's memory on the GPU back."""
        self._camera = None
