#include "live_page.h"

#include <nlohmann/json.hpp>
#include <string_view>

namespace kv4::cli {
namespace {

// Everything on the page is drawn from state.json, once a second.
constexpr std::string_view kPage = R"page(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>kv4, live</title><style>
:root { color-scheme: light dark; --ink: light-dark(#1f2937, #e5e7eb); --grid: light-dark(#e5e7eb, #374151); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
table { border-collapse: collapse; } td, th { padding: .1rem 1rem .1rem 0; text-align: right; font-weight: 400; }
td:first-child, th:first-child { text-align: left; } th { opacity: .7; }
svg { width: 100%; height: 140px; border: 1px solid var(--grid); border-radius: 8px; }
polyline { fill: none; stroke: #2563eb; stroke-width: 2; vector-effect: non-scaling-stroke; }
#map { display: flex; flex-wrap: wrap; gap: 1px; } #map i { width: 9px; height: 9px; border-radius: 2px; background: var(--grid); }
#map i.held { background: #2563eb; } #map i.kept { background: #16a34a; } #map i:hover { outline: 2px solid var(--ink); }
#tables { display: flex; flex-wrap: wrap; gap: 0 4rem; }
.key { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin: 0 .3em 0 1em; }
</style></head><body>
<h1>kv4, live</h1><div id="status">waiting for the first figures</div>
<h2 id="rate-title">Hit rate</h2><svg viewBox="0 0 100 100" preserveAspectRatio="none"><polyline id="rate" points=""/></svg>
<h2>Blocks <span class="key" style="background:#2563eb"></span>held by requests<span class="key" style="background:#16a34a"></span>kept<span class="key" style="background:var(--grid)"></span>free</h2>
<div id="map"></div>
<div id="tables"><section><h2>Cache</h2><table id="cache"></table></section>
<section><h2>Tiers</h2><table id="tiers"></table><h2>Tenants</h2><table id="tenants"></table></section>
<section><h2>Requests</h2><table id="requests"></table></section></div>
<script>
const number = n => n.toLocaleString('en'), find = id => document.getElementById(id);
function fill(id, rows) {
  find(id).replaceChildren(...rows.map((row, i) => {
    const line = document.createElement('tr');
    line.append(...row.map(text => Object.assign(document.createElement(i ? 'td' : 'th'), {textContent: text})));
    return line;
  }));
}
function map(states) {
  const per = Math.ceil(states.length / 4096), cells = find('map').children, count = Math.ceil(states.length / per);
  while (cells.length > count) cells[count].remove();
  while (cells.length < count) find('map').append(document.createElement('i'));
  for (let i = 0; i < count; ++i) {  // the same cells again: one that is pointed at goes on saying what it is
    const at = i * per, part = states.slice(at, at + per), of = state => part.split(state).length - 1;
    cells[i].className = of('h') ? 'held' : of('k') ? 'kept' : '';
    cells[i].title = per == 1 ? `block ${at}: ${{h: 'held by a request', k: 'kept, evictable', f: 'free'}[part]}`
                              : `blocks ${at} to ${at + part.length - 1}: ${of('h')} held, ${of('k')} kept, ${of('f')} free`;
  }
}
function show(s) {
  find('status').textContent = s.headline;
  find('rate-title').textContent = s.rate_title + ', 0 to 100 %';
  const x = i => 100 * i / Math.max(1, s.rates.length - 1);
  find('rate').setAttribute('points', s.rates.map((rate, i) => `${x(i)},${100 - 100 * rate}`).join(' '));
  fill('cache', [['what', 'now'], ...s.cache.map(([what, value]) => [what, number(value)])]);
  fill('tiers', [['tier', 'found', 'not', 'stored', 'bytes kept'],
                 ...s.tiers.map(t => [t.name, ...[t.hits, t.misses, t.stored, t.bytes].map(number)])]);
  fill('tenants', [['tenant', 'blocks', 'share'], ...s.tenants.map((t, i) => [i, number(t.blocks), number(t.share)])]);
  fill('requests', [['request', 'tokens', 'blocks', 'shared', 'kept'],
                    ...s.requests.map(r => [r.request, ...[r.tokens, r.blocks, r.shared_blocks, r.kept_blocks].map(number)])]);
  map(s.blocks);
  document.body.dataset.updates = s.updates;
}
async function refresh() {
  try {
    const state = await (await fetch('state.json')).json();
    if ('blocks' in state) show(state); else find('status').textContent = state.headline;
    setTimeout(refresh, 1000);
  } catch (error) { find('status').textContent += '; nobody serves this page any more'; }
}
refresh();
</script></body></html>
)page";

using nlohmann::json;

constexpr std::size_t kMostRates = 400;

json figures(const CacheStatistics& c) {
  const std::pair<const char*, std::int64_t> named[] = {{"running requests", c.requests},
                                                        {"blocks held", c.held_blocks},
                                                        {"blocks kept", c.evictable_blocks},
                                                        {"blocks free", c.free_blocks},
                                                        {"blocks evicted", c.prefix.evicted_blocks},
                                                        {"snapshots", c.prefix.snapshots},
                                                        {"state slots free", c.free_slots},
                                                        {"tokens found", c.prefix.usable_tokens},
                                                        {"tokens replayed", c.prefix.replayed_tokens},
                                                        {"memory, bytes", c.memory_bytes}};
  json out = json::array();
  for (const auto& [what, value] : named) out.push_back({what, value});
  return out;
}

void add_status(json& out, const CacheStatus& status) {
  out["cache"] = figures(status.cache);
  out["blocks"] = status.block_states;
  for (const char* const list : {"tiers", "tenants", "requests"}) out[list] = json::array();
  for (const TierReport& t : status.tiers)
    out["tiers"].push_back({{"name", t.name},
                            {"hits", t.hits},
                            {"misses", t.misses},
                            {"stored", t.stored},
                            {"bytes", t.tier.payload_bytes}});
  for (const TenantUse& t : status.cache.tenants)
    out["tenants"].push_back({{"blocks", t.blocks}, {"share", t.share_blocks}});
  for (const RequestStatus& r : status.requests)
    out["requests"].push_back({{"request", r.request},
                               {"tokens", r.lengths.empty() ? 0 : r.lengths[0]},
                               {"blocks", r.blocks},
                               {"shared_blocks", r.shared_blocks},
                               {"kept_blocks", r.kept_blocks}});
}

}  // namespace

void serve_page(HttpServer& server, const std::string& path, const CacheStatus* status, const PageHead& head) {
  json state = {{"headline", head.headline},
                {"rate_title", head.rate_title},
                {"rates", json::array()},
                {"updates", head.rates.size()}};
  const std::size_t step = head.rates.size() / kMostRates + 1;
  for (std::size_t i = 0; i < head.rates.size(); i += step) state["rates"].push_back(head.rates[i]);
  if (status != nullptr) add_status(state, *status);
  server.set(path, "text/html", std::string(kPage));
  server.set(path + "state.json", "application/json", state.dump(-1, ' ', false, json::error_handler_t::replace));
}

void serve_metrics(HttpServer& server, const MetricsText& text) {
  server.set("/metrics", {{"text/plain; version=0.0.4", text.prometheus},
                          {"application/openmetrics-text; version=1.0.0", text.openmetrics}});
}

}  // namespace kv4::cli
