#pragma once

namespace kv4 {

/// Asks a public class for its inner parts. Public headers declare this class, and only this header defines it: calls
/// that take one come from inside the library.
class InternalKey {};

}  // namespace kv4
