#pragma once

namespace kv4 {

/// Opens a public class's implementation to the library. Public headers only declare this class and only this header
/// defines it, so only code inside the library can make one.
class InternalKey {};

}  // namespace kv4
