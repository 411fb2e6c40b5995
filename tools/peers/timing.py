"""Times of both sides in graphs of launches, and their ratio."""
import statistics
import time
from dataclasses import dataclass

REPEATS, WARM_UPS = 11, 3
GRAPH_US, MOST_LAUNCHES = 1000, 24
SWEEP_BYTES = 256 << 20


@dataclass
class Contender:
    """One side of a cell. queue(i) queues launch i; result() gives launch 0's output for comparison."""

    name: str
    queue: object
    is_kv4: bool = False
    result: object = None


class Gpu:
    """Graphs, the sweep and the clock, with torch."""

    repeats, warm_ups, most_launches = REPEATS, WARM_UPS, MOST_LAUNCHES
    pool_bytes = 1 << 30  # pages that launches take at random: many times L2, so that pages rarely repeat

    def __init__(self, torch, device):
        self.torch, self.device = torch, device
        self.swept = torch.ones(SWEEP_BYTES // 4, dtype=torch.int32, device=device)

    @property
    def stream(self):
        return self.torch.cuda.current_stream().cuda_stream

    def synchronize(self):
        self.torch.cuda.synchronize()

    def graph(self, queue, launches):
        """Queues `launches` launches each time it is called."""
        graph = self.torch.cuda.CUDAGraph()
        self.synchronize()
        with self.torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for i in range(launches):
                queue(i)
        return graph.replay

    def once_us(self, work):
        """Time of one call with a cold L2. The sweep and the work are queued without a wait between them."""
        start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.swept.sum()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3


class Host:
    """A rehearsal without a GPU: no graphs, and meaningless times."""

    stream, pool_bytes, repeats, warm_ups, most_launches = 0, 4 << 20, 1, 0, 2

    def __init__(self, torch):
        self.torch, self.device = torch, "cpu"

    def synchronize(self):
        pass

    def graph(self, queue, launches):
        return lambda: [queue(i) for i in range(launches)]

    def once_us(self, work):
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e6


def launches_for(us):
    """Launches for a graph of about a millisecond, because a replay's overhead is some microseconds."""
    return max(1, min(MOST_LAUNCHES, round(GRAPH_US / max(us, 1e-3))))


def time_in_both_orders(clock, graphs):
    """{name: (median of the first order, of the second)} of a replay, in microseconds."""
    medians = {name: [] for name in graphs}
    for order in (list(graphs), list(reversed(graphs))):
        for name in order:
            for _ in range(clock.warm_ups):
                clock.once_us(graphs[name])
            medians[name].append(statistics.median(clock.once_us(graphs[name]) for _ in range(clock.repeats)))
    return {name: tuple(both) for name, both in medians.items()}


def compare(us, kv4, public):
    """(ratio, ratio in the first order, in the second) of the mean times."""
    ours, theirs = us[kv4], us[public]
    return tuple(a / b for a, b in ((sum(ours), sum(theirs)), (ours[0], theirs[0]), (ours[1], theirs[1])))


def measure(clock, contenders, ordinary=None):
    """{name: {us, orders[, after_us, ordinary_us]}}. ordinary(i): the kernel before launch i."""
    launches = {}
    for c in contenders:
        c.queue(0)  # compiles, plans and loads kernels
        clock.synchronize()
        launches[c.name] = launches_for(clock.once_us(lambda c=c: c.queue(0)))
    count = min(max(launches.values()), clock.most_launches)  # of the fastest, so that all go through the same data
    graphs = {c.name: clock.graph(c.queue, count) for c in contenders}
    us = {name: tuple(t / count for t in both) for name, both in time_in_both_orders(clock, graphs).items()}
    out = {c.name: {"us": sum(us[c.name]) / 2, "orders": list(us[c.name])} for c in contenders}
    if ordinary is None:
        return out
    del graphs

    def behind(queue):
        def both(i):
            ordinary(i)
            queue(i)
        return both

    after = {c.name: clock.graph(behind(c.queue), count) for c in contenders}
    after[""] = clock.graph(ordinary, count)
    us = {name: tuple(t / count for t in both) for name, both in time_in_both_orders(clock, after).items()}
    for c in contenders:
        own = [a - b for a, b in zip(us[c.name], us[""])]
        out[c.name] |= {"after_us": sum(own) / 2, "after_orders": own, "ordinary_us": sum(us[""]) / 2}
    return out
