"""The statistics of a cache."""
import kv4
from small_cache import SmallCache


def test_times_and_pools():
    cache = SmallCache()
    request = cache.manager.admit()
    cache.feed(request, 20)
    now = cache.manager.statistics()
    assert now.requests == 1 and now.blocks == now.free_blocks + now.held_blocks + now.evictable_blocks
    assert now.times.admit.count == sum(now.times.admit.counts) == 1
    assert now.times.prepare_forward.count > 0 and now.times.prepare_forward.seconds > 0
    bounds = kv4.TimeHistogram.bounds()
    assert len(bounds) + 1 == len(now.times.admit.counts) and bounds == sorted(bounds) and bounds[0] == 1e-6 and bounds[-1] == 10
    assert "times=" in repr(now) and now.tenants == []


def test_shortages():
    cache = SmallCache()
    try:
        while True:
            cache.manager.admit()
    except kv4.ShortageError:
        pass
    assert cache.manager.statistics().admit_shortages.requests == 1


def test_times_of_tiers():
    cache = SmallCache(prefix=kv4.PrefixOptions(enabled=True, weights_id="w"))
    with_tier = kv4.Tiers(cache.manager.schema(), kv4.TiersOptions(host_bytes=1 << 20))
    report = with_tier.report()[0]
    assert report.get_times.count == report.put_times.count == 0
