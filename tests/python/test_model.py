import json

import numpy as np
import pytest

import kv4
from small_cache import KINDS, small_config, small_options


def test_presets_and_schedule():
    flash = kv4.model_preset("v4-flash")
    assert (flash.num_layers, flash.head_dim, flash.window) == (43, 512, 128)
    schedule = kv4.layer_schedule(flash, draft_layers=1)
    assert [spec.kind for spec in schedule[:3]] == [kv4.LayerKind.swa, kv4.LayerKind.swa, kv4.LayerKind.csa]
    assert schedule[-1].group == 1
    assert [row.role for row in schedule[2].rows] == [kv4.RowRole.entry, kv4.RowRole.index_key]


def test_v41_config_schedule_and_plan():
    config = kv4.model_preset("v4.1-flash")
    assert config.shares_entries() and config.sharing.owners == [2, 8, 14, 20] and config.sharing.candidate_source == 20
    assert config.engram.layers == [1, 14] and config.draft_targets == [37, 38, 39]
    schedule = kv4.layer_schedule(config, draft_layers=3)
    assert (len(schedule), schedule[25].kind, schedule[25].ranker) == (43, kv4.LayerKind.shared, 24)
    assert [row.owner_layer for row in schedule[24].rows] == [20, 20] and schedule[24].candidate_source == 20
    schema = kv4.build_schema(config, kv4.CacheOptions())
    assert (schema.block_bytes, schema.slot_bytes) == (113920, 2727936)
    assert (schema.options.row_format, schema.options.window_format, schema.options.entry_format) == (
        None, kv4.Format.fp8_tile32, kv4.Format.nvfp4_row)
    assert kv4.plan_memory(schema).bytes_per_token == 890
    options = kv4.CacheOptions(row_format="fp8_tile64", entry_format="nvfp4_row", index_format="fp8")
    assert kv4.build_schema(config, options).layer(2).pages[0].row.bytes() == 288
    options.entry_format = None
    assert kv4.plan_memory(kv4.build_schema(config, options)).bytes_per_token == 1790
    kv4.KVCacheManager(config, kv4.CacheOptions(max_requests=1, max_context=256))


def test_config_files(tmp_path):
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [0, 4], "head_dim": 512}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(kv4.ConfigError) as caught:
        kv4.load_model_config(path)
    assert caught.value.code == "bad_config" and isinstance(caught.value, ValueError)
    with pytest.raises(kv4.ArgumentError, match="v5"):
        kv4.model_preset("v5")
    with pytest.raises(kv4.ConfigError, match="head_dim"):
        config = small_config()
        config.head_dim = 0
        kv4.validate(config)


def test_records_take_keywords_and_names():
    options = kv4.CacheOptions(row_format="bf16", index_format=kv4.Format.fp8, pending_dtype="bf16", hca_mode="raw",
                               prefix=kv4.PrefixOptions(enabled=True, eviction="s3fifo",
                                                        snapshots=kv4.SnapshotPolicy(kind="full")))
    assert options.row_format == kv4.Format.bf16 and options.index_format == kv4.Format.fp8
    assert options.pending_dtype == kv4.DType.bf16 and options.hca_mode == kv4.HcaMode.raw
    assert options.prefix.eviction == kv4.EvictionKind.s3fifo
    assert kv4.PrefixOptions(eviction="density").eviction == kv4.EvictionKind.density
    assert options.prefix.snapshots.kind == kv4.SnapshotPolicy.Kind.full
    options.prefix.num_snapshots = 3
    assert options.prefix.num_snapshots == 3
    with pytest.raises(TypeError, match="row_fmt"):
        kv4.CacheOptions(row_fmt="bf16")
    with pytest.raises(kv4.ArgumentError, match="fp7.*fp8_tile64"):
        kv4.CacheOptions(row_format="fp7")


def test_schema_budget_and_plan():
    schema = kv4.build_schema(small_config(), small_options())
    assert schema.block_tokens == 16 and schema.blocks_per_request == 6
    assert [layer.spec.kind for layer in schema.layers] == KINDS
    csa = schema.layer(1)
    assert [page.rows_per_block for page in csa.pages] == [4, 4]
    assert csa.tail_buffer_size_b() == csa.pending[0].rows == 2 * 4 + 3
    assert csa.window.rows == 8 + 3 and not csa.needs_inv_scale()
    budget = kv4.compute_block_budget(schema, requests=4, context=90)
    assert (budget.blocks_per_request, budget.blocks) == (6, 27)
    assert budget.bytes == budget.csa_entry_bytes + budget.index_key_bytes + budget.hca_entry_bytes
    assert budget.bytes == 27 * schema.block_bytes
    plan = kv4.plan_memory(schema)
    assert plan.total_bytes == sum(part.bytes for part in plan.parts)
    assert kv4.compute_context_budget(schema, plan.total_bytes * 10, 4).context >= 96
    with pytest.raises(kv4.Error, match="7"):
        schema.layer(7)


def test_rope_table():
    cos, sin = kv4.build_rope_table(kv4.RopeSpec(theta=100.0), rope_dim=4, first=3, count=2, step=5)
    angles = np.array([3, 8])[:, None] * np.array([1.0, 0.1])
    assert cos.dtype == np.float32 and cos.shape == (2, 2)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-7)
