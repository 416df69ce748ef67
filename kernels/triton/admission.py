"""Whether Triton kernels can run here. Importing this module needs no Triton."""

from __future__ import annotations

import importlib.util

import torch

from kernels.walk import Unsupported


def admit_triton(backend: str, device: torch.device) -> None:
    """Unsupported where Triton is missing, or where the tensors are not on a GPU and its interpreter is off."""
    if importlib.util.find_spec("triton") is None:
        raise Unsupported(f"{backend} needs Triton, which is not installed; run: pip install -e '.[gpu]'")
    from kernels.triton.exponential_race import interpreted

    if device.type != "cuda" and not interpreted():
        raise Unsupported(f"{backend} on {device} needs Triton's interpreter; set TRITON_INTERPRET=1 before starting Python.")
