"""Lets an unmodified verl run on a machine without an accelerator; imported by titanium.verl when TITANIUM_VERL_CPU=1.

verl 0.9.1 knows accelerators only.  A platform is one of its plug-in points; the rest stands here because there is none.
"""

import contextlib
import types

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform


class _DeviceId(str):
    """verl uses the id of the current device as `tensor.to(id)` and inside f"cpu:{id}"."""

    def __format__(self, _):
        return "0"


_DEVICE_ID = _DeviceId("cpu")


def _device_module():
    """What verl asks of torch.cuda, for a device of which there is one and that keeps no statistics."""
    module = types.ModuleType("titanium_verl_cpu_device")
    nothing = {name: lambda *_, **__: None for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")}
    statistics = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    module.__dict__.update(
        nothing,
        **{name: lambda *_: 0 for name in statistics},
        is_available=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: _DEVICE_ID,
        mem_get_info=lambda *_: (0, 0),
        get_device_name=lambda *_: "cpu",
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self):
        return True

    def current_device(self):
        return _DEVICE_ID

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def ray_resource_options(self, num_gpus):
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None

    def get_collective_module(self):
        return None


_init_process_group = torch.distributed.init_process_group


def _init_process_group_once_per_device(backend=None, *args, **kwargs):
    # verl asks for "cpu:gloo,<device>:<backend>"; torch refuses a device that is named twice.
    return _init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


set_platform(PlatformCPU())
torch.distributed.init_process_group = _init_process_group_once_per_device
