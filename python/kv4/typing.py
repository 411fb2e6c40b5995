"""Types for annotations."""
from typing import Any, Protocol, Union


class SupportsDLPack(Protocol):
    """A NumPy array, a torch tensor on the CPU or a GPU, a CuPy array, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


#: What array arguments take: anything with DLPack, or the buffer protocol.
ArrayLike = Union[SupportsDLPack, bytes, bytearray, memoryview]


class SupportsCudaStream(Protocol):
    """A torch.cuda.Stream."""

    @property
    def cuda_stream(self) -> int: ...


#: What `stream` takes: a cudaStream_t as an int, a torch.cuda.Stream, or an object with `__cuda_stream__`.
Stream = Union[int, SupportsCudaStream, Any]
