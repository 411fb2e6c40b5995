#include "base/one_thread.h"

#include "base/check.h"

namespace kv4 {

void OneThread::Call::refuse() {
  fail(ErrorCode::bad_state,
       "another thread is inside a call of this cache; one thread at a time drives a cache, its handles, sessions and "
       "tiers: wait for that call, lock around calls, or give each thread a cache of its own");
}

}  // namespace kv4
