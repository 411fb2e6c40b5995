"""kv4's raw operations (bench/peer_calls.h), called with ctypes."""
import ctypes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "libkv4_peer.so"


class BadInput(Exception):
    """The bench cannot run; the message is for people."""


class Call(ctypes.Structure):
    """A struct of bench/peer_calls.h: 8 bytes per field; tensors are passed by their addresses."""

    def __init__(self, **fields):
        unknown = set(fields) - {name for name, _ in self._fields_}
        if unknown:
            raise TypeError(f"no fields {unknown}")
        self.tensors = [value for value in fields.values() if hasattr(value, "data_ptr")]  # kept alive
        super().__init__(**{name: value.data_ptr() if hasattr(value, "data_ptr") else value
                            for name, value in fields.items()})


def fields(text):
    return [(name, ctypes.c_double if name == "softmax_scale" else ctypes.c_int64) for name in text.split()]


class PeerAttend(Call):
    _fields_ = fields("on_host stream num_tokens num_requests num_heads softmax_scale q sink out lse records block_table "
                      "blocks_per_request ring ring_scales ring_stride scratch scratch_scales pages page_stride page_rows "
                      "ratio chosen num_chosen workspace workspace_bytes")


class PeerIndex(Call):
    _fields_ = fields("on_host stream num_tokens num_requests num_heads format q q_scale q_row_stride weights records "
                      "block_table blocks_per_request pages page_stride page_rows ratio scores score_stride fast top indices "
                      "workspace workspace_bytes")


class Kv4:
    """The library of bench/peer_calls.h."""

    def __init__(self, path):
        try:
            self.library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BadInput(f"cannot load kv4: {error}; build the target kv4_peer, or name the file with --kv4") from None
        for name in ("attend_struct_bytes", "index_struct_bytes", "attend_workspace_bytes", "index_workspace_bytes"):
            getattr(self.library, f"kv4_peer_{name}").restype = ctypes.c_int64
        self.library.kv4_peer_attend_workspace_bytes.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self.library.kv4_peer_index_workspace_bytes.argtypes = (ctypes.c_int64, ctypes.c_int64)
        for name in ("refusal", "version"):
            getattr(self.library, f"kv4_peer_{name}").restype = ctypes.c_char_p
        for struct, name in ((PeerAttend, "attend"), (PeerIndex, "index")):
            if getattr(self.library, f"kv4_peer_{name}_struct_bytes")() != ctypes.sizeof(struct):
                raise BadInput(f"{path} is of another version of kv4 than this script")
        self.version = self.library.kv4_peer_version().decode()
        self.has_cuda = bool(self.library.kv4_peer_has_cuda())
        self.attend_workspace_bytes = self.library.kv4_peer_attend_workspace_bytes
        self.index_workspace_bytes = self.library.kv4_peer_index_workspace_bytes

    def run(self, function, call):
        code = getattr(self.library, f"kv4_peer_{function}")(ctypes.byref(call))
        if code == -1:
            raise RuntimeError(f"kv4 refuses {function}: {self.library.kv4_peer_refusal().decode()}")
        if code != 0:
            raise RuntimeError(f"kv4's {function}: CUDA error {code}")


def open_kv4(path):
    if path:
        return Kv4(path)
    places = [ROOT / "build" / "lib" / LIBRARY, ROOT / "lib" / LIBRARY]
    for place in places:
        if place.exists():
            return Kv4(place)
    raise BadInput(f"there is no {LIBRARY} in {', '.join(str(p.parent) for p in places)}; build the target kv4_peer, or "
                   "name the file with --kv4")
