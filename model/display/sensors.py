"""What the driver tells about GPUs: memory, utilisation, temperature, power. Only the screen's process asks it."""

from contextlib import suppress
from dataclasses import dataclass

MILLIWATTS = 1000


@dataclass(frozen=True)
class Sensors:
    """One GPU as the driver sees it, all processes together; None where it does not tell."""

    used_bytes: int | None = None
    total_bytes: int | None = None
    busy_percent: int | None = None
    celsius: int | None = None
    watts: float | None = None
    limit_watts: float | None = None


class Driver:
    """Asks NVIDIA's driver. Without nvidia-ml-py, a driver or a GPU of that name it knows nothing."""

    def __init__(self):
        self._nvml, self._handles = None, {}
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._nvml = pynvml

    def read(self, uuid: str) -> Sensors | None:
        """The Sensors of the GPU `uuid` (as torch writes it, without "GPU-"); None if the driver does not know it."""
        nvml = self._nvml
        if nvml is None or not uuid:
            return None
        with suppress(nvml.NVMLError):
            if uuid not in self._handles:
                self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            return self._sensors(self._handles[uuid])
        return None

    def _sensors(self, handle):
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        watts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        limit = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return Sensors(
            used_bytes=memory and memory.used, total_bytes=memory and memory.total, busy_percent=rates and rates.gpu,
            celsius=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            watts=watts and watts / MILLIWATTS, limit_watts=limit and limit / MILLIWATTS,
        )  # fmt: skip

    def _ask(self, question, *args):
        """The driver's answer, None where the GPU has no such sensor."""
        with suppress(self._nvml.NVMLError):
            return question(*args)
        return None
