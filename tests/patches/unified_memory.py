"""A machine whose GPU and host share one memory, as far as its readings go; nothing is allocated.

What the kernel and CUDA say of it:

* MemFree: what nobody has. cudaMemGetInfo's free memory is this.
* MemAvailable: MemFree and the page cache, less what the kernel keeps for itself.
* An allocation takes free memory down to ``floor``, and then pages of the cache.
* A file that is read fills the cache, which takes its own oldest pages where no memory is free.

The floor and the kernel's part are of the size that Linux takes on a machine like this (its low
watermarks); no result here hangs on them.
"""

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass
class Machine:
    """Bytes of one memory."""

    total: int
    held: int
    """What the kernel and all processes hold on the host, other than cache."""
    cache: int = 0
    """Clean page cache."""
    gpu: int = 0
    """What CUDA holds."""
    floor: int = 512 * MIB

    @property
    def free(self) -> int:
        return self.total - self.held - self.cache - self.gpu

    @property
    def available(self) -> int:
        return max(self.free + self.cache - min(self.cache // 2, 128 * MIB) - 128 * MIB, 0)

    def _reclaim(self, wanted: int) -> None:
        missing = wanted + self.floor - self.free
        if missing <= 0:
            return
        assert missing <= self.cache, "nothing is left to reclaim"
        self.cache -= missing

    def allocate_gpu(self, wanted: int) -> None:
        self._reclaim(wanted)
        self.gpu += wanted

    def free_gpu(self, given: int) -> None:
        self.gpu -= given
        assert self.gpu >= 0

    def allocate_host(self, wanted: int) -> None:
        self._reclaim(wanted)
        self.held += wanted

    def read_file(self, size: int) -> None:
        room = max(self.free - self.floor, 0)
        self.cache += min(size, room)  # beyond that it takes the place of older pages
