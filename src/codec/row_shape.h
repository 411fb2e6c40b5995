#pragma once

#include "kv4/params.h"

namespace kv4::codec {

using kv4::RowShape;

}  // namespace kv4::codec
