"""Shared by all cells: the clock, kv4, the public kernels, and makers of the data that both sides read."""
import sys

from .kv4_library import BadInput, open_kv4
from .public_kernels import find_peers
from .timing import Gpu, Host

WIDTH, WINDOW, ROW, DATA = 512, 128, 584, 576  # a row: 576 B of data, 8 of scales, which follow all data of a page
KEY_WIDTH, INDEX_HEADS, TOPK = 128, 64, 512
SCALE = WIDTH ** -0.5


def round_up(value, by):
    return (value + by - 1) // by * by


class Bench:
    """The clock, kv4, the public kernels, and makers of tensors."""

    def __init__(self, torch, clock, kv4, peers):
        self.torch, self.clock, self.kv4, self.peers, self.device = torch, clock, kv4, peers, clock.device
        self.on_host, self.lengths = int(clock.device == "cpu"), {}
        self.random = torch.Generator(device=clock.device).manual_seed(7)
        self.attend_workspace = self.make_attend_workspace(1, 1, 0)

    def make_attend_workspace(self, tokens, requests, entries):
        room = self.kv4.attend_workspace_bytes(tokens, requests, entries)
        return self.torch.zeros(room, dtype=self.torch.uint8, device=self.device)

    def normal(self, *shape, dtype=None):
        return self.torch.randn(*shape, generator=self.random, device=self.device).to(dtype or self.torch.bfloat16)

    def below(self, limit, *shape):
        return self.torch.randint(limit, shape, generator=self.random, device=self.device, dtype=self.torch.int32)

    def ints(self, *values):
        return self.torch.tensor(values, dtype=self.torch.int32, device=self.device)

    def ints_of(self, value):
        """The same tensor [1] for the same value, so that a graph's launches allocate none."""
        if value not in self.lengths:
            self.lengths[value] = self.ints(value)
        return self.lengths[value]

    def empty(self, *shape, dtype):
        return self.torch.empty(*shape, dtype=dtype, device=self.device)

    def row_pages(self, pages, rows):
        """[pages, stride] bytes, stride a multiple of 576; rows_view of it is FlashMLA's cache."""
        torch = self.torch
        stride = round_up(rows * ROW, DATA)
        out = self.empty(pages, stride, dtype=torch.uint8)
        some = min(pages, max(1, 4096 // rows))
        data = self.empty(some, rows, DATA, dtype=torch.uint8)
        data[..., :448] = self.normal(some, rows, 448, dtype=torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
        data[..., 448:] = self.normal(some, rows, 64).view(torch.uint8)
        scales = (126 + self.below(3, some, rows, 8)).to(torch.uint8)  # about 1
        scales[..., 7] = 0
        one = self.torch.cat((data.flatten(1), scales.flatten(1)), 1)
        for at in range(0, pages, some):
            out[at:at + some, :rows * ROW] = one[:pages - at]
        return out

    def rows_view(self, pages, rows):
        return pages.as_strided((pages.shape[0], rows, 1, ROW), (pages.stride(0), ROW, ROW, 1))

    def key_pages(self, pages, rows, payload):
        """[pages, rows * (payload + 4)] bytes; fp8: no NaN, the whole range of codes, and fp32 scales of 0.5 to 2."""
        torch = self.torch
        out = self.empty(pages, rows * (payload + 4), dtype=torch.uint8)
        if payload == KEY_WIDTH:
            some = min(pages, 4096)
            keys = self.full_range(self.normal(some, rows, payload, dtype=torch.float32)).view(some, rows * payload)
            scales = 0.5 + 1.5 * torch.rand(some, rows, generator=self.random, device=self.device)
            one = torch.cat((keys, scales.view(torch.uint8)), 1)
            for at in range(0, pages, some):
                out[at:at + some] = one[:pages - at]
        else:
            out[:] = self.below(256, *out.shape).to(torch.uint8)
            out[:, rows * payload:] = (126 + self.below(3, pages, rows * 4)).to(torch.uint8)
        return out

    def full_range(self, rows):
        """Bytes of rows as e4m3, scaled as engines scale them: a row's largest code is that of 448."""
        largest = rows.abs().amax(-1, keepdim=True)
        return (rows * (448 / largest)).to(self.torch.float8_e4m3fn).view(self.torch.uint8)

    def records(self, rows, lengths, counts, firsts, slots, positions, long_step=False):
        """i32 [tokens, 8], StepRecord: row, length, count, first_token, read_slot, write_slot, position, block."""
        write = slots + 1 if long_step else slots
        return self.torch.stack((rows, lengths, counts, firsts, slots, write, positions, self.torch.full_like(rows, -1)),
                                1).to(self.torch.int32).contiguous()

    def different(self, tokens, count, limit):
        """i32 [tokens, count], different numbers below limit in each row: a random start, and a random odd step."""
        if limit & (limit - 1):
            raise ValueError("limit must be a power of two")
        steps = 2 * self.below(max(limit // 2, 1), tokens, 1).long() + 1
        return ((self.below(limit, tokens, 1).long() + steps * self.torch.arange(count, device=self.device)) %
                limit).to(self.torch.int32)


def open_bench(args):
    try:
        import torch
    except Exception as error:
        raise BadInput(f"torch cannot be imported by {sys.executable}: {error}") from None
    rehearsal = args.device == "cpu"
    if not rehearsal and not torch.cuda.is_available():
        raise BadInput("torch finds no GPU: peer_bench measures on one (--device cpu rehearses, and measures nothing)")
    kv4 = open_kv4(args.kv4)
    if not rehearsal:
        if not kv4.has_cuda:
            raise BadInput("this kv4 library was built without CUDA")
        torch.cuda.set_device(args.device)
    clock = Host(torch) if rehearsal else Gpu(torch, args.device)
    bench = Bench(torch, clock, kv4, find_peers())
    return bench, "no GPU: a rehearsal" if rehearsal else torch.cuda.get_device_name(args.device)
