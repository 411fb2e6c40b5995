#!/usr/bin/env python3
"""The tool with DeepSeek-V4.1: plans, and refusals to run. Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree); an argument runs only tests whose name contains it.
"""
import json
import sys
import tempfile
from pathlib import Path

from tool import ROOT, Skipped, equal, ok, ok_json, refused, run_tests


def test_plan_v41_flash():
    plan = ok_json("plan", "--model", "v4.1-flash", "--context", "1M", "--draft-layers", "3")
    equal(plan["block_bytes"], 113920)
    equal(plan["bytes_per_token"], 890)
    equal(plan["paper"]["bytes_per_token"], 890)
    equal(plan["state_bytes_per_request"], 2727936)
    equal(plan["draft_bytes_per_request"], 202752)
    equal(plan["formats"], "rows fp8_tile32 (windows) and nvfp4_row (entries), index keys mxfp4, pending f32, block_major, rewind 0")
    equal(sum(part["bytes"] for part in plan["parts"]), plan["total_bytes"])
    equal({row["name"]: (row["layers"], row["rows_per_block"], row["row_bytes"]) for row in plan["rows"]},
          {"ratio 2 entries": (3, 64, 288), "ratio 2 index keys": (3, 64, 68), "ratio 1 entries": (1, 128, 288), "ratio 1 index keys": (1, 128, 68)})
    equal(sum(row["block_bytes"] for row in plan["rows"]), plan["block_bytes"])
    boundaries = {boundary.pop("name"): boundary for boundary in plan["boundaries"]}
    equal(boundaries["image"], {"bytes": 2906112, "token_ids": 3, "replayed_tokens": 0, "token_layers": 0})
    equal(boundaries["encoder image"]["bytes"], 1351680)
    equal(boundaries["exact replay"], {"bytes": 0, "token_ids": 5081, "replayed_tokens": 5081, "token_layers": 104180})
    equal(boundaries["bounded replay"], {"bytes": 0, "token_ids": 131, "replayed_tokens": 128, "token_layers": 5120})
    plan = ok_json("plan", "--model", "v4.1-flash", "--context", "8K", "--rewind", "5")
    equal(plan["state_bytes_per_request"], 2896896)
    equal([image["bytes"] for image in plan["images"]], [33408, 2703360, 2715648])
    equal(plan["images"][2]["length"], "129, 131, ...")
    equal(ok_json("plan", "--model", "v4.1-flash", "--context", "8K", "--rows", "fp8_tile64", "--keys", "fp8")["bytes_per_token"], 1790)
    equal(ok_json("plan", "--model", "v4.1-flash", "--context", "8K", "--entry-rows", "bf16")["bytes_per_token"], 2.5 * (1024 + 68))
    text = ok("plan", "--model", "v4.1-flash", "--context", "1M").stdout
    for part in ("113,920", "890.00", "2,727,936", "2,703,360", "1,351,680", "104,180", "4 owners", "8 lists"):
        assert part in text, f"'{part}' is missing"
    assert max(len(line) for line in text.splitlines()) <= 110
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        ok("plan", "--model", "v4.1-flash", "--context", "8K", "--html", page)
        assert "890.00 B" in page.read_text() and "var(--pending-rows)" in page.read_text() and "var(--other)" not in page.read_text()
    assert "boundaries" not in ok_json("plan", "--context", "8K")
    for command in (["run", "--tokens", "2K"], ["bench"]):
        refused([*command, "--model", "v4.1-flash"], "has no inputs for v4.1-flash", "kv4 plan")


def test_released_config():
    path = ROOT.parent / "shared" / "configs" / "deepseek-v4.1-flash.json"
    if not path.exists():
        raise Skipped(f"not beside the checkout: {path}")
    preset, file = (ok_json("plan", *model, "--context", "1M") for model in (("--model", "v4.1-flash"), ("--config", str(path))))
    preset.pop("model"), file.pop("model")
    equal(file, preset)
    config = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "config.json"
        config["text_config"]["kv_source_layer_ids"] = [8, 14, 20]
        changed.write_text(json.dumps(config))
        refused(["plan", "--config", str(changed)], "config.json: layer 2 has ratio 2", "must own")


def test_golden():
    for folder, least in (ROOT / "tests/reference/vectors_v41", 120), (ROOT.parent / "shared" / "golden41", 90):
        if not folder.exists():
            raise Skipped(f"not beside the checkout: {folder}")
        result = ok_json("golden", folder)
        assert result["ok"] and len(result["checks"]) >= least
        names = {check["name"] for check in result["checks"]}
        assert {"codec.nvfp4_row.codes", "ties.masked_lists", "draft.attention"} <= names, names
        for kind in ("latents.entries.codes", "latents.keys.codes", "latents.candidates", "latents.lists", "projections.keys"):
            assert any(name.endswith("." + kind) for name in names), kind


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
