#!/usr/bin/env python3
"""The metrics: Prometheus' and OpenMetrics' rules, and the documents and the dashboard that name them.

Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree); an argument runs only tests whose name contains it.
Where the Python package prometheus-client is installed, its parsers check them, too.
"""
import json
import re
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from metrics_rules import parse
from running_cache_test import replay_with_page, serving
from server_test import ask, place_of, publish, publishing
from tool import ROOT, Skipped, equal, kv4, ok, run_tests

TEXT, OPEN = "text/plain; version=0.0.4; charset=utf-8", "application/openmetrics-text; version=1.0.0; charset=utf-8"
BUCKETS = 23
ODD_NAME = 'my "own"\\\ntier {x="y"} # EOF é'


def times(*counts):
    return {"counts": list(counts) + [0] * (BUCKETS - len(counts)), "sum_seconds": 3, "sum_ns": 250_000_000}


def tier(name, **changes):
    return {"name": name, "protection": "sealed", "hits": 10, "misses": 7, "failed_gets": 2, "damaged": 3, "hit_bytes": 1 << 40, "stored": 9,
            "failed_puts": 1, "refused_puts": 4, "stored_bytes": 5000, "promoted": 6, "waiting_bytes": 11, "open": False, "times_opened": 2,
            "get_times": times(1, 2, 3), "put_times": times(0, 5),
            "tier": {"records": 5, "payload_bytes": 500, "capacity_bytes": 1000, "evicted_records": 8, "unauthenticated_records": 1}, **changes}


def full_status():
    """A status with every field of a cache, as another version or a stranger may have written it."""
    remote = tier("remote", open=True, failure="server_full", failures={"server_full": 4, "of a later version": 1},
                  tier={"records": -1, "payload_bytes": -1, "capacity_bytes": -1})
    return {"build": {"version": "0.2.0", "cuda": True, "compiler": "gcc 12.2.0"},
            "cache": {"requests": 3, "max_requests": 8, "blocks": 100, "free_blocks": 50, "held_blocks": 30, "evictable_blocks": 20, "slots": 9,
                      "free_slots": 4, "memory_bytes": 1 << 33, "tenants": [{"share_blocks": 5, "blocks": 6}, {"share_blocks": 0, "blocks": 2}],
                      "prefix": {"prompts": 9, "hits": 5, "prompt_tokens": 4000, "usable_tokens": 3000, "replayed_tokens": 128, "stored_blocks": 20,
                                 "joined_blocks": 1, "inserted_blocks": 2, "evicted_blocks": 3, "saved_snapshots": 4, "restored_snapshots": 5,
                                 "dropped_snapshots": 6, "lost_events": 7, "blocks": 21, "snapshots": 2},
                      "usable_tokens": {"counts": [4] + [1] * 15, "sum": 3000}, "replayed_tokens": {"counts": [5] + [0] * 15, "sum": 128},
                      "times": {name: times(1, 0, 2) for name in ("admit", "prepare_forward", "tier_load", "tier_save", "session_restore", "session_save")},
                      "admit_shortages": {"requests": 1, "blocks": 0, "slots": 2}, "prepare_forward_shortages": {"requests": 0, "blocks": 3, "slots": 0}},
            "tiers": [tier("host", protection="none"), tier("disk"), remote, tier(ODD_NAME)]}


OLD = {"cache": {"requests": 3, "max_requests": 4}, "tiers": [{"name": "host", "hits": 4, "tier": {"records": -1, "payload_bytes": 7}}]}
LYING = {"cache": {"requests": -5, "prefix": {"prompts": 1, "hits": 9}, "usable_tokens": {"counts": [-4] + [1] * 15, "sum": -1}},
         "tiers": [{"name": "host", "misses": 1, "damaged": 5, "hits": -1}], "build": {"version": 'a"\n\\', "compiler": "x"}}


@contextmanager
def served(**statuses):
    """`kv4 serve-metrics` of folders of these names: a function that asks for /metrics with headers."""
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        folders = [str(Path(parent) / name) for name in statuses]
        for folder, status in zip(folders, statuses.values()):
            if status is not None:
                stack.enter_context(publishing(folder, status=status))
        _, _, first = stack.enter_context(serving(*folders))
        get = lambda **headers: ask(place_of(first), headers=headers)
        # A status of another machine counts when it has changed.
        wanted, deadline = sum(status is not None for status in statuses.values()), time.time() + 60
        while sum(line.startswith(b"kv4_up{") and line.endswith(b" 1") for line in get()[1].splitlines()) < wanted:
            assert time.time() < deadline, get()[1]
            time.sleep(0.05)
        yield get


def both(get):
    text, opened = get()[1].decode(), get(Accept="application/openmetrics-text")[1].decode()
    return text, opened, parse(text, False), parse(opened, True)


def test_rules_of_both_formats():
    with served(full=full_status(), old=OLD, lying=LYING, away=None) as get:
        text, opened, plain, families = both(get)
        equal({re.sub("_total$", "", name) for name in plain}, set(families))
        # The same figures in both.
        for name, family in plain.items():
            other = families[re.sub("_total$", "", name) if family.type == "counter" else name]
            equal(family.type, other.type)
            if family.type != "histogram":
                ours = {key[1]: value for key, value in family.samples.items() if ("cache", "lying") not in key[1]}
                equal(ours, {key[1]: value for key, value in other.samples.items() if ("cache", "lying") not in key[1]})


def test_judged_by_prometheus_client():
    try:
        from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
        from prometheus_client.parser import text_string_to_metric_families as plain_families
    except ImportError:
        raise Skipped("prometheus-client is not installed")
    with served(full=full_status(), old=OLD, lying=LYING) as get:
        text, opened, plain, families = both(get)
        equal({family.name for family in open_families(opened)}, set(families))
        found = {family.name: family for family in plain_families(text)}
        equal(set(found), {re.sub("_total$", "", name) for name in plain})
        names = {sample.labels["tier"] for sample in found["kv4_tier_healthy"].samples}
        assert ODD_NAME in names, names


def test_what_is_not_known_has_no_sample():
    with served(full=full_status(), old=OLD) as get:
        families = both(get)[2]
        tiers = lambda name: {dict(labels)["tier"] for _, labels in families[name].samples if ("cache", "full") in labels}
        for name in ("kv4_tier_records", "kv4_tier_bytes", "kv4_tier_capacity_bytes"):
            equal((name, tiers(name)), (name, {"host", "disk", ODD_NAME}))
        caches = lambda name: {dict(labels)["cache"] for _, labels in families[name].samples}
        for name, family in families.items():
            if name.endswith("_seconds") or name in ("kv4_build_info", "kv4_shortages_total"):
                equal((name, caches(name)), (name, {"full"}))  # a cache of 0.1 has neither
        equal(caches("kv4_requests"), {"full", "old"})


def test_a_size_that_is_not_known_is_null():
    """A page must not show -1 bytes for a server."""
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "gpu0")
        with publishing(folder, status=full_status()), serving(folder) as (get, _, _):
            deadline = time.time() + 60
            while "tiers" not in (state := json.loads(get("state.json"))):
                assert time.time() < deadline, state
                time.sleep(0.05)
        equal([each["bytes"] for each in state["tiers"]], [500, 500, None, 500])


def test_values():
    with served(full=full_status()) as get:
        families = both(get)[2]

        def value(name, sample=None, **labels):
            family = families[name]
            return family.samples[sample or name, tuple(sorted({"cache": "full", **labels}.items()))]

        equal([value("kv4_tier_healthy", tier=name) for name in ("host", "disk", "remote")], [1, 1, 0])
        equal([value("kv4_tier_reads_total", tier="disk", result=r) for r in ("hit", "miss", "failed", "damaged")], [10, 4, 2, 3])
        equal(value("kv4_tier_unauthenticated_records_total", tier="disk"), 1)
        equal(value("kv4_tier_failures_total", tier="remote", reason="server_full"), 4)
        equal(value("kv4_tier_failing", tier="remote", reason="server_full"), 1)
        equal(value("kv4_tier_failures_total", tier="remote", reason="connection_refused"), 0)  # there before it happens
        equal(value("kv4_build_info", version="0.2.0", cuda="on", compiler="gcc 12.2.0"), 1)
        equal(value("kv4_shortages_total", call="prepare_forward", shortage="blocks"), 3)
        equal(value("kv4_admit_seconds", "kv4_admit_seconds_sum"), 3.25)
        equal([value("kv4_admit_seconds", "kv4_admit_seconds_bucket", le=le) for le in ("1e-06", "2.5e-06", "5e-06", "10", "+Inf")], [1, 1, 3, 3, 3])
        equal(value("kv4_tier_put_seconds", "kv4_tier_put_seconds_count", tier="disk"), 5)
        equal(value("kv4_load_seconds", "kv4_load_seconds_count", place="session"), 3)
        equal(value("kv4_replayed_tokens", "kv4_replayed_tokens_sum"), 128)


def test_negotiation():
    prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5," \
                 "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    cases = [(None, TEXT), ("", TEXT), ("*/*", TEXT), ("text/plain", TEXT), ("text/html, */*;q=0.8", TEXT), (prometheus, OPEN),
             ("application/openmetrics-text", OPEN), ("Application/OpenMetrics-Text; version=\"1.0.0\"", OPEN),
             ("application/openmetrics-text;q=0.1, text/plain;q=0.9", TEXT), ("application/openmetrics-text;q=0, */*", TEXT),
             ("application/openmetrics-text, text/plain", OPEN), ("application/openmetrics-text; version=9.0.0", TEXT),
             ("application/openmetrics-text;q=x", TEXT), ("application/openmetrics-text;q=nan", TEXT), ("application/openmetrics-text;q=9", TEXT),
             (";;;,,,=;q", TEXT), ("application/json", TEXT), ('a/b;x="application/openmetrics-text,"', TEXT), ("," * 8000, TEXT)]
    with tempfile.TemporaryDirectory() as folder, serving(folder) as (_, _, first):
        for accept, wanted in cases:
            got, body = ask(place_of(first), headers={} if accept is None else {"Accept": accept})
            equal((accept, got.status, got.headers["Content-Type"]), (accept, 200, wanted))
            equal((accept, body.endswith(b"# EOF\n")), (accept, wanted == OPEN))
            equal(got.headers["Vary"], "Accept")
        page, _ = ask(place_of(first), path="/", headers={"Accept": "application/openmetrics-text"})
        equal(page.headers["Content-Type"], "text/html; charset=utf-8")


def test_counters_of_a_replay():
    """A real cache's metrics keep the rules, and no counter falls."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics")
        arguments = ["replay", "--generate", "--seed", "3", "--data", "real", "--layers", "3", "--capacity", "64K", "--tenants", "2", "--host", "8MB"]
        ok(*arguments, "--limit", "20", "--metrics", str(path))
        families = parse(path.read_text(), False)
        for name in ("kv4_admit_seconds", "kv4_prepare_forward_seconds", "kv4_tier_put_seconds"):
            count = sum(value for (sample, _), value in families[name].samples.items() if sample == name + "_count")
            assert count > 0, (name, families[name].samples)
        version = ok("--version").stdout.split()[1]
        equal([dict(labels)["version"] for _, labels in families["kv4_build_info"].samples], [version])
    with replay_with_page() as (_, _, address, _):
        place = ("127.0.0.1", int(address.split(":")[2][:-1]))
        got, body = ask(place, headers={"Accept": "application/openmetrics-text"})
        equal(got.headers["Content-Type"], OPEN)
        parse(body.decode(), True)
        parse(ask(place)[1].decode(), False)


def test_a_status_with_too_many_reasons_is_refused():
    """Each would be a series."""
    for count, code in ((64, 0), (65, 1)):
        failures = {f"reason {i}": 1 for i in range(count)}
        with tempfile.TemporaryDirectory() as folder, publishing(folder, status={"tiers": [tier("disk", failures=failures)]}):
            done = kv4("serve-metrics", folder, "--once")
        equal((count, done.returncode), (count, code))
        equal((count, "kv4_tier_failures_total" in parse(done.stdout, False)), (count, code == 0))


def served_families():
    with served(full=full_status()) as get:
        return both(get)[2]


def test_table_of_the_documents():
    """docs/operations.md has every metric, with its type and labels, and no other."""
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text[text.index("### Metrics\n"):]
    rows = re.findall(r"^\| `(kv4_\w+)` \| (\w+) \| ([^|]*) \|", section[: section.index("\n### ", 5)], re.M)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    equal(len(documented), len(rows))
    equal(documented, {name: (family.type, family.label_names() - {"cache"}) for name, family in served_families().items()})


FUNCTIONS = {"sum", "max", "min", "rate", "increase", "histogram_quantile", "clamp_min"}
KEYWORDS = {"by", "and", "or", "le", "on", "group_left", "ignoring"}


def check_expression(expression, families):
    """Names, labels and label values of a PromQL expression against what is served."""
    names = {name: family for family in families.values() for name in family.served_names()}
    rest = re.sub(r"\[\$__rate_interval\]|\[\d+[smhd]\]|\b\d+(\.\d+)?(e-?\d+)?\b", "", expression)
    equal((expression, [rest.count(c) for c in "({["]), (expression, [rest.count(c) for c in ")}]"]))
    used = re.findall(r"(kv4_\w+)(?:\{([^}]*)\})?", rest)
    assert used, expression
    label_names = {"le", "cache"}
    for name, selector in used:
        assert name in names, f"{name} is not served: {expression}"
        labels = {key for _, pairs in names[name].samples for key, _ in pairs}
        label_names |= labels
        for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', selector):
            assert label in labels, f"{name} has no label {label}: {expression}"
            values = {dict(pairs).get(label) for _, pairs in names[name].samples}
            assert value.startswith("$") or operator != "=" or value in values, f"{label}={value}: {expression}"
    for labels in re.findall(r"\bby\s*\(([^)]*)\)", rest):
        for label in re.split(r"\s*,\s*", labels):
            assert label in label_names, f"by {label}: {expression}"
    words = set(re.findall(r"[a-z_]\w*", re.sub(r"kv4_\w+(\{[^}]*\})?|\bby\s*\([^)]*\)", "", rest)))
    assert words <= FUNCTIONS | KEYWORDS, f"{words - FUNCTIONS - KEYWORDS}: {expression}"
    for name in re.findall(r"(?:rate|increase)\((kv4_\w+)", rest):
        assert names[name].type in ("counter", "histogram"), f"the rate of the gauge {name}: {expression}"
    for name, selector in used:
        if names[name].type == "counter":
            assert re.search(rf"(rate|increase)\({name}", rest), f"{name} rises for ever; its rate tells: {expression}"


def test_dashboard():
    families = served_families()
    board = json.loads((ROOT / "docs" / "grafana" / "kv4.json").read_text())
    assert board["schemaVersion"] >= 36 and board["uid"] == "kv4" and board["title"] and "id" not in board, board.keys()
    equal([one["type"] for one in board["templating"]["list"]], ["datasource", "query"])
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    equal(len({panel["id"] for panel in board["panels"]}), len(board["panels"]))
    seen, cells = set(), set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        covered = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert covered.isdisjoint(cells) and place["x"] + place["w"] <= 24, panel["title"]
        cells |= covered
    for panel in panels:
        assert panel["targets"] and panel["title"] and panel["description"], panel
        equal((panel["title"], panel["datasource"]), (panel["title"], {"type": "prometheus", "uid": "${datasource}"}))
        for target in panel["targets"]:
            check_expression(target["expr"], families)
            seen |= set(re.findall(r"kv4_\w+", target["expr"]))
        if any("_seconds" in target["expr"] for target in panel["targets"]):
            equal((panel["title"], panel["fieldConfig"]["defaults"]["unit"]), (panel["title"], "s"))
    check_expression(re.search(r"label_values\((.*), \w+\)", board["templating"]["list"][1]["query"])[1], families)
    for name in ("admit", "prepare_forward", "load", "save", "tier_get", "tier_put"):
        assert f"kv4_{name}_seconds_bucket" in seen, name
    assert {"kv4_tier_failures_total", "kv4_shortages_total", "kv4_blocks", "kv4_tier_bytes", "kv4_build_info", "kv4_up"} <= seen, seen


def test_the_checks_can_fail():
    """Invalid pages, such as those of earlier versions."""
    good = "# HELP kv4_x X.\n# TYPE kv4_x gauge\nkv4_x 1\n"
    parse(good, False)
    bad = [good + "# HELP kv4_x_total X.\n# TYPE kv4_x_total counter\nkv4_x_total 1\n", good.replace(" 1\n", " -1\n"), good + good, good[:-1],
           good.replace("gauge", "counter"), good + "kv4_y 1\n", good + "kv4_x 1\n", good.replace("kv4_x 1", 'kv4_x{le="1"} 1'),
           good.replace("kv4_x", "kv4_x_ms"), good.replace("kv4_x 1", 'kv4_x{a="b"c"} 1'), good.replace("kv4_x 1", "kv4_x NaN"), "# TYPE kv4_x gauge\nkv4_x 1\n",
           good.replace("kv4_x 1\n", ""), good.replace("kv4_x", "kv4_x_count")]
    families = parse(good, False)
    for text in bad:
        try:
            parse(text, False)
        except AssertionError:
            continue
        raise RuntimeError(f"taken: {text}")
    for text in (good, good + "# EOF", good + "# EOF\n\n"):
        try:
            parse(text, True)
        except AssertionError:
            continue
        raise RuntimeError(f"taken: {text}")
    for expression in ("kv4_y", "sum(kv4_x", 'kv4_x{cache="a"}', "rate(kv4_x[5m])", "sum by (job) (kv4_x)", "avg(kv4_x)", "1"):
        try:
            check_expression(expression, families)
        except AssertionError:
            continue
        raise RuntimeError(f"taken: {expression}")


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
