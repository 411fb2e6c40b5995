#include "turns.h"

#include "kv4/error.h"

namespace kv4::python {

Turns::Turn::Turn(Turns& turns) : turns_(turns), lock_(turns.mutex_) {
  if (turns_.busy_)
    throw Error(
        ErrorCode::bad_state,
        "a callback may not call the cache or the tiers it was called from, nor another cache on their backend");
  turns_.busy_ = true;
}

}  // namespace kv4::python
