"""GPU metrics through NVIDIA's management library."""

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)


class GpuCollector(Collector):
    """Utilisation and memory of GPUs at scrape time. Create it with :func:`gpu_collector`."""

    def __init__(self, nvml: Any, handles: dict[str, Any]) -> None:
        self._nvml, self._handles = nvml, handles

    def collect(self) -> Iterator[Metric]:
        busy = GaugeMetricFamily("sightline_gpu_busy_ratio", "Share of time in which a kernel ran.", labels=["gpu"])
        decoder = GaugeMetricFamily(
            "sightline_gpu_decoder_busy_ratio", "Share of the video decoder's capacity in use.", labels=["gpu"]
        )
        memory = GaugeMetricFamily("sightline_gpu_memory_bytes", "Memory of a GPU.", labels=["gpu", "kind"])
        for gpu, handle in self._handles.items():
            with self._supported(gpu):
                busy.add_metric([gpu], self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            with self._supported(gpu):
                decoder.add_metric([gpu], self._nvml.nvmlDeviceGetDecoderUtilization(handle)[0] / 100)
            with self._supported(gpu):
                held = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                memory.add_metric([gpu, "used"], held.used)
                memory.add_metric([gpu, "total"], held.total)
        yield from (busy, decoder, memory)

    @contextmanager
    def _supported(self, gpu: str) -> Iterator[None]:
        """Skip a query that the device does not support; MIG partitions support only some."""
        try:
            yield
        except self._nvml.NVMLError as error:
            log.debug("GPU %s: no metrics: %s", gpu, error)


def gpu_collector(visible: str | None = None) -> GpuCollector | None:
    """Collector of the GPUs in ``visible`` (default ``CUDA_VISIBLE_DEVICES``), by number or UUID; ``None`` without the
    library (package ``nvidia-ml-py``) or any GPU."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except (ImportError, OSError):
        return None
    except Exception as error:
        log.info("no GPU metrics: %s", error)
        return None
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    names = [str(number) for number in range(nvml.nvmlDeviceGetCount())] if wanted is None else wanted.split(",")
    handles = {}
    for name in (name.strip() for name in names):
        try:
            if name.startswith(("GPU-", "MIG-")):
                handles[name] = nvml.nvmlDeviceGetHandleByUUID(name)
            else:
                handles[name] = nvml.nvmlDeviceGetHandleByIndex(int(name))
        except (ValueError, nvml.NVMLError):
            continue
    return GpuCollector(nvml, handles) if handles else None
