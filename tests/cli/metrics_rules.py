"""The rules of Prometheus' text format 0.0.4 and of OpenMetrics 1.0, checked line by line without a library of theirs.

https://prometheus.io/docs/instrumenting/exposition_formats/, https://prometheus.io/docs/practices/naming/ and
https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""
import math
import re

NAME = r"[a-z][a-z0-9_]*"
SAMPLE = re.compile(rf'({NAME})(?:\{{(.*)\}})? (\S+)')
LABEL = re.compile(rf'({NAME})="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
RESERVED_ENDS = ("_total", "_created", "_bucket", "_count", "_sum")
WRONG_UNITS = re.compile(r"_(ms|us|ns|milliseconds|microseconds|minutes|hours|kb|mb|gb|kib|mib|gib|percent|kilobytes|megabytes)(_|$)")
MAX_SERIES_OF_A_FAMILY = 5000


def parse_labels(text):
    labels, at = {}, 0
    while at < len(text):
        match = LABEL.match(text, at)
        assert match, f"labels {text!r} from {at} on"
        assert match[1] not in labels, f"label {match[1]} twice: {text}"
        assert not match[1].startswith("__") and match[1] not in ("quantile", "job", "instance"), f"label {match[1]} is taken"
        labels[match[1]] = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], match[2])
        at = match.end()
    return labels


class Family:
    def __init__(self, name):
        self.name, self.type, self.help, self.unit = name, None, None, None
        self.samples = {}  # (sample's name, labels as a sorted tuple) -> value, in the order they came

    def label_names(self):
        return {name for _, labels in self.samples for name, _ in labels} - {"le"}

    def served_names(self):
        return {name for name, _ in self.samples}


def parse(text, openmetrics):
    """Families by name. Every rule that is broken is an AssertionError."""
    assert text.endswith("\n"), "the last line has no end"
    lines = text.split("\n")[:-1]
    if openmetrics:
        assert lines.pop() == "# EOF", "the last line is # EOF"
    families, family = {}, None
    for line in lines:
        if match := re.fullmatch(rf"# (HELP|TYPE|UNIT) ({NAME}) (.+)", line):
            what, name, value = match.groups()
            if family is None or family.name != name:
                assert name not in families, f"the family {name} comes twice: {line}"
                families[name] = family = Family(name)
            field = what.lower()
            assert getattr(family, field) is None, f"{what} twice: {line}"
            assert not family.samples, f"{what} after samples: {line}"
            assert what != "UNIT" or openmetrics, line
            setattr(family, field, value)
            continue
        assert line and not line.startswith("#"), f"a line that means nothing: {line!r}"
        match = SAMPLE.fullmatch(line)
        assert match, f"no sample: {line!r}"
        name, labels, value = match[1], parse_labels(match[2] or ""), float(match[3])
        assert family is not None and family.type in SUFFIXES, f"no TYPE before {line}"
        base = family.name[: -len("_total")] if family.type == "counter" and not openmetrics else family.name
        assert name in [base + suffix for suffix in SUFFIXES[family.type]], f"{name} is not of the {family.type} {family.name}"
        assert openmetrics or "le" not in labels or labels["le"] == "+Inf" or float(labels["le"]) >= 0, line
        key = (name, tuple(sorted(labels.items())))
        assert key not in family.samples, f"a series twice: {line}"
        family.samples[key] = value
    for each in families.values():
        check_family(each, openmetrics)
    check_names(families)
    return families


def check_family(family, openmetrics):
    assert family.type and family.help, f"{family.name} has no TYPE or no HELP"
    assert family.samples, f"{family.name} has no sample"
    assert len(family.samples) <= MAX_SERIES_OF_A_FAMILY, f"{family.name}: {len(family.samples)} series"
    if family.type == "counter":
        assert family.name.endswith("_total") != openmetrics, f"the counter {family.name}"
    else:
        assert not family.name.endswith(RESERVED_ENDS), f"the {family.type} {family.name} ends like another type's samples"
    base = re.sub("_total$", "", family.name)
    assert not WRONG_UNITS.search(base), f"{family.name}: base units are seconds, bytes and ratios"
    if openmetrics:
        units = [unit for unit in ("seconds", "bytes") if base.endswith("_" + unit)]
        assert [family.unit] == (units or [None]), f"{family.name}: UNIT {family.unit}"
    for (name, labels), value in family.samples.items():
        assert math.isfinite(value) and value >= 0, f"{name}{dict(labels)} is {value}: what is not known has no sample"
        assert {name for name, _ in labels}.isdisjoint({"le"}) or name.endswith("_bucket"), f"{name}: label le"
    if family.type == "histogram":
        check_histograms(family, openmetrics)


def check_histograms(family, openmetrics):
    groups = {}
    for (name, labels), value in family.samples.items():
        rest = tuple(label for label in labels if label[0] != "le")
        groups.setdefault(rest, []).append((name[len(family.name):], dict(labels).get("le"), value))
    for rest, samples in groups.items():
        buckets = [(bound, value) for suffix, bound, value in samples if suffix == "_bucket"]
        bounds, counts = [float(bound) for bound, _ in buckets], [value for _, value in buckets]
        assert bounds == sorted(set(bounds)) and bounds[-1] == math.inf, f"{family.name}{rest}: bounds {bounds}"
        assert counts == sorted(counts), f"{family.name}{rest}: buckets do not add up: {counts}"
        last = {suffix: value for suffix, _, value in samples if suffix != "_bucket"}
        assert last["_count"] == counts[-1] and "_sum" in last, f"{family.name}{rest}: {last}"
        if openmetrics:
            for bound, _ in buckets:
                assert bound == "+Inf" or bound == repr(float(bound)), f"{family.name}: le {bound} is {float(bound)!r}"


def check_names(families):
    """No two families may give samples of one name, in either format: x and x_total are one family in OpenMetrics."""
    bases = {}
    for family in families.values():
        base = re.sub("_total$", "", family.name) if family.type == "counter" else family.name
        assert base not in bases, f"{family.name} and {bases[base]} are one family in OpenMetrics"
        bases[base] = family.name
    for family in families.values():
        if family.type == "histogram":
            clash = {family.name + suffix for suffix in ("_bucket", "_count", "_sum", "_total", "_created")} & set(bases)
            assert not clash, f"{clash} are samples of {family.name}, too"
