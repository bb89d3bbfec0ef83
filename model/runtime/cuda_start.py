"""Starts CUDA on a thread while torch is imported: each of the two takes seconds. Standard library only."""

import ctypes
import os
import threading


def start_cuda():
    """Begin to make the CUDA context that torch will use on this process's GPU; does nothing where there is none."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes"):
        return
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, before the driver reads it
    threading.Thread(target=_make_context, name="cuda", daemon=True).start()


def _make_context():
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), number) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
