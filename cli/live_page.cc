#include "live_page.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "page.h"

namespace kv4::cli {
namespace {

// Everything on the page is drawn from state.json.
constexpr const char* kBody = R"html(<style>
#map { display: flex; flex-wrap: wrap; gap: 1px; }
#map i { width: 9px; height: 9px; border-radius: 2px; background: var(--grid); }
#map i.held { background: var(--held); } #map i.kept { background: var(--kept); }
#map i:hover { outline: 2px solid var(--ink); }
#rates { padding-bottom: 2rem; } #tables { display: flex; flex-wrap: wrap; gap: 0 4rem; }
#tables section { overflow-x: auto; }
#state { display: inline-block; border-radius: 4px; padding: 0 .5em; margin-right: .5em; color: white; background: #2d6a9f; }
[data-state=waiting] #state { background: #5b6472; } [data-state=finished] #state { background: #00704f; } [data-state=interrupted] #state { background: #a34700; }
[data-state=lost] #state { background: #a3172e; }
[data-state=lost] figure, [data-state=lost] #map, [data-state=lost] #tables { opacity: .5; }
</style>
<h1>kv4, live</h1><p role="status"><span id="state">waiting</span><span id="status">waiting for the first figures</span></p>
<div class="figures"><figure class="chart wide" id="rates"><figcaption id="rate-title">Hit rate</figcaption>
<ul class="legend"><li><i style="background:var(--found)"></i>found</li></ul><div class="plot" tabindex="0" role="img" aria-label="hit rate"></div></figure></div>
<h2>Blocks</h2><ul class="legend"><li><i style="background:var(--held)"></i>held by requests</li><li><i style="background:var(--kept)"></i>kept</li>
<li><i style="background:var(--grid)"></i>free</li><li id="per"></li></ul><div id="map"></div>
<div id="tables"><section><h2>Cache</h2><table id="cache"></table></section>
<section><h2>Tiers</h2><table id="tiers"></table><h2>Tenants</h2><table id="tenants"></table></section>
<section><h2>Requests</h2><table id="requests"></table></section></div>
)html";

constexpr const char* kScript = R"js(
const number = n => n.toLocaleString('en'), find = id => document.getElementById(id);
let rates = null, last = null;
// A cell is a text or number, or {bytes}; null is not known.
function cell(tag, content) {
  if (content === null || content.bytes === null) return make(tag, {textContent: 'not known'});
  if (typeof content != 'object') return make(tag, {textContent: content});
  return make(tag, {textContent: format(content.bytes, 'bytes'), title: number(content.bytes) + ' bytes'});
}
function fill(id, rows) {
  find(id).replaceChildren(
      ...rows.map((row, i) => make('tr', {}, ...row.map(content => cell(i ? 'td' : 'th', content)))));
}
function map(states) {
  const per = Math.ceil(states.length / 4096) || 1, cells = find('map').children,
        count = Math.ceil(states.length / per);
  find('per').textContent = per > 1 ? `${per} blocks a cell: held where one of them is, else kept where one is` : '';
  while (cells.length > count) cells[count].remove();
  while (cells.length < count) find('map').append(make('i'));
  for (let i = 0; i < count; ++i) {  // the same cells again: one that is pointed at goes on saying what it is
    const at = i * per, part = states.slice(at, at + per), of = state => part.split(state).length - 1;
    cells[i].className = of('h') ? 'held' : of('k') ? 'kept' : '';
    cells[i].title = per == 1 ?
        `block ${at}: ${{h: 'held by a request', k: 'kept, evictable', f: 'free'}[part]}` :
        `blocks ${at} to ${at + part.length - 1}: ${of('h')} held, ${of('k')} kept, ${of('f')} free`;
  }
}
function say(state, words) {
  document.body.dataset.state = state;
  find('state').textContent = {running: 'live', lost: 'connection lost'}[state] ?? state;
  find('status').textContent = words;
}
function show(s) {
  find('rate-title').textContent = s.rate_title;
  const data = {
    type: 'lines',
    x: {label: s.rate_label, unit: 'count', values: s.rate_at},
    panels: [{
      label: 'hit rate',
      unit: 'share',
      marks: 'lines',
      high: 1,
      series: [{id: 'rate', name: 'found', color: 'var(--found)', values: s.rates}]
    }]
  };
  if (rates) rates.set(data);
  else
    rates = chart(find('rates'), data);
  fill('cache', [
    ['what', 'now'], ...s.cache.map(([what, value, unit]) => [what, unit == 'bytes' ? {bytes: value} : number(value)])
  ]);
  fill('tiers', [
    ['tier', 'found', 'not found', 'stored', 'kept'],
    ...s.tiers.map(t => [t.name, ...[t.hits, t.misses, t.stored].map(number), {bytes: t.bytes}])
  ]);
  fill('tenants', [['tenant', 'blocks', 'share'], ...s.tenants.map((t, i) => [i, number(t.blocks), number(t.share)])]);
  fill('requests', [
    ['request', 'tokens', 'blocks', 'shared', 'kept'],
    ...s.requests.map(r => [r.request, ...[r.tokens, r.blocks, r.shared_blocks, r.kept_blocks].map(number)])
  ]);
  map(s.blocks);
  document.body.dataset.updates = s.updates;
}
async function refresh() {
  let state;
  try {
    const answer = await fetch('state.json', {signal: AbortSignal.timeout(5000)});
    if (!answer.ok) throw new Error(answer.statusText);
    state = await answer.json();
  } catch (error) {  // it may come back
    say('lost',
        `${last ? last.headline + '; ' : ''}nobody serves this page any more` +
            (last ? '; these are the last figures' : ''));
    setTimeout(refresh, 2000);
    return;
  }
  say('blocks' in state ? state.state : last ? 'lost' : 'waiting', state.headline);
  if ('blocks' in state) {
    last = state;
    show(state);
  }
  if (state.state == 'running') setTimeout(refresh, PERIOD);  // a run that is over changes no more
}
refresh();
)js";

using nlohmann::json;

constexpr std::size_t kMostRates = 400;
const char* const kStateNames[] = {"running", "finished", "interrupted"};

json figures(const CacheStatistics& c) {
  struct Named {
    const char* what;
    std::int64_t value;
    const char* unit = "count";
  };
  const Named named[] = {{"running requests", c.requests},
                         {"blocks held", c.held_blocks},
                         {"blocks kept", c.evictable_blocks},
                         {"blocks free", c.free_blocks},
                         {"blocks evicted", c.prefix.evicted_blocks},
                         {"snapshots", c.prefix.snapshots},
                         {"state slots free", c.free_slots},
                         {"tokens found", c.prefix.usable_tokens},
                         {"tokens replayed", c.prefix.replayed_tokens},
                         {"memory", c.memory_bytes, "bytes"}};
  json out = json::array();
  for (const auto& [what, value, unit] : named) out.push_back({what, value, unit});
  return out;
}

/// One text for every cache and state.
const std::string& page() {
  static const std::string text = open_page("kv4, live") + kBody + chart_hint() +
                                  close_page(fmt::format("const PERIOD = {};", kPagePeriodMs) + kScript);
  return text;
}

/// Null: the value is unknown, because others put and remove too (TierStats::kUnknown) or a foreign status is invalid.
json known(std::int64_t value) { return value < 0 ? json() : json(value); }

void add_status(json& out, const CacheStatus& status) {
  out["cache"] = figures(status.cache);
  out["blocks"] = status.block_states;
  for (const char* const list : {"tiers", "tenants", "requests"}) out[list] = json::array();
  for (const TierReport& t : status.tiers)
    out["tiers"].push_back({{"name", t.name},
                            {"hits", t.hits},
                            {"misses", t.misses},
                            {"stored", t.stored},
                            {"bytes", known(t.tier.payload_bytes)}});
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
  json state = {{"headline", head.headline},     {"state", kStateNames[static_cast<int>(head.state)]},
                {"rate_title", head.rate_title}, {"rate_label", head.rate_label},
                {"rates", json::array()},        {"rate_at", json::array()},
                {"updates", head.rates.size()}};
  // Every step-th rate, counted from the last: the newest is always included.
  const std::size_t step = head.rates.size() / kMostRates + 1;
  for (std::size_t i = head.rates.empty() ? 0 : (head.rates.size() - 1) % step; i < head.rates.size(); i += step) {
    state["rates"].push_back(head.rates[i]);
    state["rate_at"].push_back(i + 1);
  }
  if (status != nullptr) add_status(state, *status);
  server.set(path, "text/html", page());
  server.set(path + "state.json", "application/json", state.dump(-1, ' ', false, json::error_handler_t::replace));
}

void serve_metrics(HttpServer& server, const MetricsText& text) {
  server.set("/metrics", {{"text/plain; version=0.0.4", text.prometheus},
                          {"application/openmetrics-text; version=1.0.0", text.openmetrics}});
}

}  // namespace kv4::cli
