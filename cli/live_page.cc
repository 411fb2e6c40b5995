#include "live_page.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string_view>
#include <thread>

#include "base/check.h"

namespace kv4::cli {
namespace {

// Everything on the page is drawn from state.json, once a second.
constexpr std::string_view kPage = R"page(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>kv4 replay, live</title><style>
:root { color-scheme: light dark; --ink: light-dark(#1f2937, #e5e7eb); --grid: light-dark(#e5e7eb, #374151); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
table { border-collapse: collapse; } td, th { padding: .1rem 1rem .1rem 0; text-align: right; font-weight: 400; }
td:first-child, th:first-child { text-align: left; } th { opacity: .7; }
svg { width: 100%; height: 140px; border: 1px solid var(--grid); border-radius: 8px; }
polyline { fill: none; stroke: #2563eb; stroke-width: 2; vector-effect: non-scaling-stroke; }
#map { display: flex; flex-wrap: wrap; gap: 1px; } #map i { width: 9px; height: 9px; border-radius: 2px; background: var(--grid); }
#map i.held { background: #2563eb; } #map i.kept { background: #16a34a; } #map i:hover { outline: 2px solid var(--ink); }
.key { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin: 0 .3em 0 1em; }
</style></head><body>
<h1>kv4 replay, live</h1><div id="status">waiting for the first request</div>
<h2>Block hit rate so far</h2><svg viewBox="0 0 100 100" preserveAspectRatio="none"><polyline id="rate" points=""/></svg>
<h2>Cache</h2><table id="cache"></table><h2>Tiers</h2><table id="tiers"></table><h2>Tenants</h2><table id="tenants"></table>
<h2>Blocks <span class="key" style="background:#2563eb"></span>held by requests<span class="key" style="background:#16a34a"></span>kept<span class="key" style="background:var(--grid)"></span>free</h2>
<div id="map"></div>
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
  const per = Math.ceil(states.length / 4096), cells = [];
  for (let at = 0; at < states.length; at += per) {
    const part = states.slice(at, at + per), cell = document.createElement('i');
    const count = state => part.split(state).length - 1;
    cell.className = count('h') ? 'held' : count('k') ? 'kept' : '';
    cell.title = per == 1 ? `block ${at}: ${{h: 'held by a request', k: 'kept, evictable', f: 'free'}[part]}`
                          : `blocks ${at} to ${at + part.length - 1}: ${count('h')} held, ${count('k')} kept, ${count('f')} free`;
    cells.push(cell);
  }
  find('map').replaceChildren(...cells);
}
function show(s) {
  find('status').textContent = `${number(s.done)} of ${number(s.requests)} requests, block hit rate ${s.block_hit_rate.toFixed(4)}`;
  const x = i => 100 * i / Math.max(1, s.rates.length - 1);
  find('rate').setAttribute('points', s.rates.map((rate, i) => `${x(i)},${100 - 100 * rate}`).join(' '));
  fill('cache', [['what', 'now'], ...s.cache.map(([what, value]) => [what, number(value)])]);
  fill('tiers', [['tier', 'found', 'not', 'stored', 'bytes kept'],
                 ...s.tiers.map(t => [t.name, ...[t.hits, t.misses, t.stored, t.bytes].map(number)])]);
  fill('tenants', [['tenant', 'blocks', 'share'], ...s.tenants.map((t, i) => [i, number(t.blocks), number(t.share)])]);
  map(s.blocks);
  document.body.dataset.requests = s.done;
}
async function refresh() {
  try {
    const state = await (await fetch('state.json')).json();
    if (state.blocks) show(state);
    setTimeout(refresh, 1000);
  } catch (error) { find('status').textContent += '; the replay has ended'; }
}
refresh();
</script></body></html>
)page";

/// As much of a request as says what is wanted; whoever sends nothing is left.
std::string read_request(int socket) {
  constexpr std::size_t kMost = 8192;
  const timeval limit{.tv_sec = 1, .tv_usec = 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  std::string text;
  char piece[1024];
  while (text.size() < kMost && text.find("\r\n\r\n") == std::string::npos) {
    const ssize_t got = recv(socket, piece, sizeof piece, 0);
    if (got <= 0) break;
    text.append(piece, static_cast<std::size_t>(got));
  }
  return text;
}

void answer(int socket, std::string_view status, std::string_view type, std::string_view body) {
  const std::string text = fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}; charset=utf-8\r\nContent-Length: {}\r\nCache-Control: no-store\r\n"
      "Connection: close\r\n\r\n{}",
      status, type, body.size(), body);
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t sent = send(socket, text.data() + at, text.size() - at, MSG_NOSIGNAL);
    if (sent <= 0) return;
    at += static_cast<std::size_t>(sent);
  }
}

}  // namespace

struct LivePage::Server {
  int listener = -1;
  int port = 0;
  std::mutex mutex;
  std::string state = "{}", metrics;  // under the mutex
  std::atomic<bool> ends = false;
  std::thread thread;

  explicit Server(int wanted) : listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    require(listener >= 0, ErrorCode::bad_state, "there is no socket to serve a page: {}", std::strerror(errno));
    const int on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(wanted));
    socklen_t bytes = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener, any, bytes) != 0 || listen(listener, 16) != 0 || getsockname(listener, any, &bytes) != 0) {
      const std::string why = std::strerror(errno);
      close(listener);
      fail(ErrorCode::bad_argument, "--serve {}: the port cannot be served: {}", wanted, why);
    }
    port = ntohs(address.sin_port);
    thread = std::thread([this] { run(); });
  }
  ~Server() {
    ends = true;
    thread.join();
    close(listener);
  }

  void run() {
    while (!ends) {
      pollfd wait{listener, POLLIN, 0};
      if (poll(&wait, 1, 100) <= 0) continue;
      const int client = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (client < 0) continue;
      serve(client);
      close(client);
    }
  }

  void serve(int client) {
    const std::string request = read_request(client);
    const auto wants = [&](std::string_view path) { return request.starts_with(fmt::format("GET {} HTTP/1.", path)); };
    std::string body;
    {
      const std::lock_guard lock(mutex);
      if (wants("/state.json")) body = state;
      if (wants("/metrics")) body = metrics;
    }
    if (wants("/"))
      answer(client, "200 OK", "text/html", kPage);
    else if (wants("/state.json"))
      answer(client, "200 OK", "application/json", body);
    else if (wants("/metrics"))
      answer(client, "200 OK", "text/plain; version=0.0.4", body);
    else
      answer(client, "404 Not Found", "text/plain", "there are /, /state.json and /metrics\n");
  }
};

LivePage::LivePage(int port) : server_(std::make_unique<Server>(port)) {}
LivePage::~LivePage() = default;

int LivePage::port() const { return server_->port; }

void LivePage::set(std::string state_json, std::string metrics) {
  const std::lock_guard lock(server_->mutex);
  server_->state = std::move(state_json);
  server_->metrics = std::move(metrics);
}

}  // namespace kv4::cli
