// Replaces remote_tier.cc where hiredis was not found.
#include "base/check.h"
#include "tier/remote_tier.h"

namespace kv4::tier {

std::string why_no_remote_tier() {
  return "kv4 was built without hiredis; install libhiredis-dev (tools/install_dependencies run), configure and "
         "build "
         "again";
}

std::unique_ptr<Tier> make_remote_tier(const RemoteOptions&) {
  fail(ErrorCode::bad_state, "no remote tier: {}", why_no_remote_tier());
}

}  // namespace kv4::tier
