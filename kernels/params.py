"""The one struct every walk kernel is launched with: the ctypes mirror of `kernels/cuda/common/params.cuh`."""

from __future__ import annotations

import ctypes


class Params(ctypes.Structure):
    """See params.cuh for the meaning of each field; pointers are device addresses."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("latents", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("anchor", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("seed", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("mail", ctypes.c_void_p),
        ("round", ctypes.c_void_p),
        ("clocks", ctypes.c_void_p),
        ("base_request_stride", ctypes.c_int64),
        ("base_step_stride", ctypes.c_int64),
        ("logits_request_stride", ctypes.c_int64),
        ("logits_step_stride", ctypes.c_int64),
        ("tokens_request_stride", ctypes.c_int64),
        ("vocab", ctypes.c_int32),
        ("latent_vocab", ctypes.c_int32),
        ("steps", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("base_slots", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


assert ctypes.sizeof(Params) == 160, "params.cuh mirrors this struct"
