"""A running cache seen from outside, by the command line tool where it was built."""
import json
import os
import subprocess
from pathlib import Path

import pytest

import kv4
from small_cache import SmallCache

KV4 = Path(os.environ.get("KV4", Path(__file__).resolve().parents[2] / "build" / "kv4"))
TOKENS = 45


def run(status, *arguments, key_file=None):
    """Exit code, stdout and stderr of the tool; the cache publishes as long as it runs."""
    if not KV4.exists():
        pytest.skip(f"there is no {KV4}")
    environment = {name: value for name, value in os.environ.items() if name != "KV4_KEY_FILE"}
    if key_file is not None:
        environment["KV4_KEY_FILE"] = str(key_file)
    process = subprocess.Popen([KV4, *map(str, arguments), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    while process.poll() is None:
        assert status.publish()
    return process.returncode, *process.communicate()


def answered(status, *arguments, key_file=None):
    code, out, err = run(status, *arguments, key_file=key_file)
    assert code == 0, err
    return json.loads(out)


def test_a_running_request_is_inspected_and_goes_on(tmp_path):
    cache, undisturbed = SmallCache(), SmallCache()
    request, same = cache.manager.admit(), undisturbed.manager.admit()
    cache.feed(request, TOKENS)
    undisturbed.feed(same, TOKENS + 7)
    with kv4.StatusFolder(cache.manager, tmp_path / "status", interval=0) as status:
        svg = tmp_path / "now.svg"
        found = answered(status, "inspect", tmp_path / "status", "--request", request, "--svg", svg)
        parts = {(part["layer"], part["part"]): part for part in found["parts"]}
        assert found["tokens"] == TOKENS and found["missing_blocks"] == 0
        assert parts[0, "window"]["rows"] == 8
        assert parts[1, "entries"]["rows"] == parts[1, "keys"]["rows"] == TOKENS // 4
        assert parts[2, "entries"]["rows"] == TOKENS // 8
        assert all(part["not_finite"] == 0 for part in found["parts"])
        assert found["running"]["blocks"] == 3 and found["running"]["shared_blocks"] == 0
        assert "1 CSA" in svg.read_text()
        assert not [name for name in os.listdir(tmp_path / "status") if name.startswith("inspect-")]
        cache.feed(request, 7)
        assert cache.state(request) == undisturbed.state(same)
        listed = answered(status, "inspect", tmp_path / "status")["status"]["requests"]
        assert [(one["request"], one["lengths"]) for one in listed] == [(request, [TOKENS + 7])]
    assert not (tmp_path / "status" / "status.json").exists()


def test_a_request_is_sealed_where_there_are_keys(tmp_path):
    key, other = bytes([1] * 32), bytes([2] * 32)
    mine, theirs, both = tmp_path / "mine", tmp_path / "theirs", tmp_path / "both"
    for path, keys in ((mine, [key]), (theirs, [other]), (both, [other, key])):
        path.write_text("".join(each.hex() + "\n" for each in keys))
        path.chmod(0o600)
    cache = SmallCache()
    request = cache.manager.admit()
    cache.feed(request, TOKENS)
    ask = lambda folder: ("inspect", tmp_path / folder, "--request", request)
    with kv4.StatusFolder(cache.manager, tmp_path / "plain", interval=0) as plain:
        for path in (None, mine, both):  # the folder is its owner's: plain files there are read with keys, too
            assert answered(plain, *ask("plain"), key_file=path)["tokens"] == TOKENS
        assert answered(plain, *ask("plain"), "--key-file", mine)["tokens"] == TOKENS
    with kv4.StatusFolder(cache.manager, tmp_path / "sealed", interval=0, keys=[key]) as sealed:
        for path in (mine, both):
            assert answered(sealed, *ask("sealed"), key_file=path)["tokens"] == TOKENS
        assert answered(sealed, *ask("sealed"), "--key-file", mine)["tokens"] == TOKENS
        code, out, err = run(sealed, *ask("sealed"))
        assert code == 2 and out == "" and "--key-file or KV4_KEY_FILE" in err
        code, out, err = run(sealed, *ask("sealed"), key_file=theirs)
        assert code == 2 and out == "" and "not among those given" in err
    with pytest.raises(kv4.ArgumentError, match="32 bytes"):
        kv4.StatusFolder(cache.manager, tmp_path / "short", keys=[b"short"])


def test_with_tiers(tmp_path):
    cache = SmallCache(prefix=kv4.PrefixOptions(enabled=True, weights_id="w"))
    tiers = kv4.Tiers(cache.manager.schema(), kv4.TiersOptions(host_bytes=1 << 20))
    status = kv4.StatusFolder(cache.manager, tmp_path, tiers=tiers)
    assert status.publish()
    published = json.loads((tmp_path / "status.json").read_text())
    assert [tier["name"] for tier in published["status"]["tiers"]] == ["host"]
    first = (tmp_path / "status.json").read_bytes()
    assert status.publish() and (tmp_path / "status.json").read_bytes() == first  # not more often than once a second
    status.close()
    with pytest.raises(kv4.StateError, match="closed"):
        status.publish()


def test_refusals(tmp_path):
    cache = SmallCache()
    with pytest.raises(kv4.ArgumentError, match="interval"):
        kv4.StatusFolder(cache.manager, tmp_path, interval=-1)
    with pytest.raises(kv4.FileError, match="nowhere"):
        kv4.StatusFolder(cache.manager, tmp_path / "nowhere" / "status")
    status = kv4.StatusFolder(cache.manager, tmp_path)
    with pytest.raises(kv4.StateError, match="in use"):
        kv4.StatusFolder(cache.manager, tmp_path)
    assert status.publish()
