"""Memory and one stream of device 0, through the driver library and ctypes alone."""

import ctypes

POISON = 0xFF


class Gpu:
    """The primary context of device 0, current on this thread.

    Without `poison`, memory is as it was found: initcheck takes everything that was once written for initialised.
    """

    def __init__(self, library="libcuda.so.1", poison=True):
        self.cuda, self.poison = ctypes.CDLL(library), poison
        self.call("cuInit", 0)
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxPushCurrent_v2", context)
        self.call("cuStreamCreate", ctypes.byref(stream), 0)
        self.stream, self.owned = stream, []

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with {code}")

    def allocate(self, size):
        """New memory: its address."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.owned.append(address)
        if self.poison:
            self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(POISON), ctypes.c_size_t(size))
        return address.value

    def upload(self, array):
        """A copy of a contiguous array: its address."""
        address = self.allocate(max(1, array.nbytes))
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), array.ctypes.data_as(ctypes.c_void_p), array.nbytes)
        return address

    def download(self, array, address):
        self.call("cuMemcpyDtoH_v2", array.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(address), array.nbytes)

    def synchronize(self):
        self.call("cuCtxSynchronize")

    def free_all(self):
        while self.owned:
            self.call("cuMemFree_v2", self.owned.pop())
