"""The result of a cell, and the table of cells."""
from dataclasses import dataclass, field

from .public_kernels import version_of
from .timing import compare


@dataclass
class Cell:
    group: str
    name: str
    times: dict = field(default_factory=dict)   # of measure()
    public: str = ""                            # the fastest public contender
    ours: list = field(default_factory=list)
    missing: list = field(default_factory=list)
    failure: str = ""

    def ratio(self, kv4, after=False):
        key = "after_orders" if after else "orders"
        if not self.public or key not in self.times[self.public]:
            return None
        us = {name: self.times[name][key] for name in (kv4, self.public)}
        if min(min(both) for both in us.values()) <= 0:  # the difference is below the clock's noise
            return None
        return compare(us, kv4, self.public)

    def json(self):
        out = {"group": self.group, "cell": self.name, "times": self.times, "public": self.public or None,
               "ratios": {}, "missing": self.missing}
        for name in self.ours:
            for after in (False, True):
                ratio = self.ratio(name, after)
                if ratio:
                    entry = out["ratios"].setdefault(name, {})
                    entry["after_an_ordinary_kernel" if after else "ratio"] = round(ratio[0], 4)
                    entry["after_by_order" if after else "by_order"] = [round(r, 4) for r in ratio[1:]]
        return out | ({"failure": self.failure} if self.failure else {})


def finish(cell, contenders):
    """Notes the contenders' names and the fastest public one."""
    cell.ours = [c.name for c in contenders if c.is_kv4]
    public = [c.name for c in contenders if not c.is_kv4]
    cell.public = min(public, key=lambda name: cell.times[name]["us"], default="")


def table(cells):
    lines = [("group", "cell", "kv4", "us", "public", "us", "ratio", "after an ordinary kernel")]
    for cell in cells:
        if cell.failure:
            lines.append((cell.group, cell.name, "FAILED: " + cell.failure, "", "", "", "", ""))
            continue
        for name in cell.ours:
            ratio, after = cell.ratio(name), cell.ratio(name, after=True)
            behind = f"{cell.times[name]['after_us']:.2f}" if "after_us" in cell.times[name] else ""
            if after:
                behind += f" / {cell.times[cell.public]['after_us']:.2f} = {after[0]:.2f}"
            lines.append((cell.group, cell.name, name, f"{cell.times[name]['us']:.2f}", cell.public or "not here",
                          f"{cell.times[cell.public]['us']:.2f}" if cell.public else "",
                          f"{ratio[0]:.2f}" if ratio else "", behind))
    widths = [max(len(line[i]) for line in lines if not line[2].startswith("FAILED") or i < 2) for i in range(len(lines[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines)


def peers_text(peers):
    return "\n".join(f"  {name:<34} {peer.label + ' ' + version_of(peer.module) if peer.call else 'not here: ' + peer.why}"
                     for name, peer in peers.items())
