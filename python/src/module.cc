#include "bindings.h"
#include "kv4/version.h"

NB_MODULE(_kv4, m) {
  m.doc() = "The KV cache of DeepSeek-V4. Use it as `import kv4`.";
  m.attr("__version__") = KV4_VERSION;
  kv4::python::bind_errors(m);
  kv4::python::bind_model(m);
  kv4::python::bind_options(m);
  kv4::python::bind_schema(m);
  kv4::python::bind_pools(m);
  kv4::python::bind_views(m);
  kv4::python::bind_layer(m);
  kv4::python::bind_prefix(m);
  kv4::python::bind_statistics(m);
  kv4::python::bind_manager(m);
  kv4::python::bind_keys(m);
  kv4::python::bind_sessions(m);
  kv4::python::bind_tiers(m);
  kv4::python::bind_chunks(m);
  kv4::python::bind_status(m);
  kv4::python::bind_foreign_pages(m);
  kv4::python::bind_log(m);
  kv4::python::bind_tensor_calls(m);
}
