"""What was measured on a model of GPU, for traces that don't show it themselves."""

from __future__ import annotations

_PINNED_RATES = {
    # 40 copies of 4 MiB each way, medians; CUDA 13.0, driver 580, nsys 2025.3.
    "NVIDIA H200": {"HtoD": 51.9, "DtoH": 51.8},
}


def pinned_rate(gpu: str | None, direction: str) -> float | None:
    """Bytes a ns of a large page-locked copy ("HtoD", "DtoH"); None if not measured.

    A rate is that of the bus as much as of the GPU: models on other buses than the
    measured one have other names.
    """
    return _PINNED_RATES.get(gpu or "", {}).get(direction)
