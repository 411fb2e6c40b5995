// The library's log, in Python.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "bindings.h"
#include "kv4/log.h"

namespace kv4::python {
namespace {

struct Record {
  LogLevel level = LogLevel::info;
  std::string event, message;
  std::map<std::string, std::string> fields;

  explicit Record(const LogRecord& record) : level(record.level), event(record.event), message(record.message) {
    for (const LogField& field : record.fields) fields.emplace(field.name, field.value);
  }
};

constexpr std::size_t kMaxWaiting = 4096;

bool is_sink(PyObject* object) { return object == Py_None || PyCallable_Check(object); }

struct Sink : nb::object {
  NB_OBJECT_DEFAULT(Sink, nb::object, "collections.abc.Callable[[LogRecord], object]", is_sink)
};

/// A thread that hands records to Python. The library's own threads only leave records here: they neither take the GIL
/// nor wait for a slow callable, which may call kv4.
class Listener {
 public:
  static std::shared_ptr<Listener> start(nb::object call) {
    auto listener = std::shared_ptr<Listener>(new Listener(std::move(call)));
    listener->thread_ = std::thread([listener] { listener->run(); });
    return listener;
  }

  void leave(const LogRecord& record) {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() < kMaxWaiting)
      waiting_.emplace_back(record);
    else
      ++lost_;
    changed_.notify_one();
  }

  /// Hands over the remaining records, then never calls the callable again. If the callable itself asks for it, it is
  /// not called again at all. Called without the GIL.
  void stop() {
    const bool from_inside = thread_.get_id() == std::this_thread::get_id();
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
      silent_ = from_inside;
      changed_.notify_one();
    }
    if (from_inside)
      thread_.detach();  // ends when the callable has returned
    else
      thread_.join();
  }

 private:
  explicit Listener(nb::object call) : call_(std::move(call)) {}

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopped_ || !waiting_.empty(); });
      if (waiting_.empty() || silent_) break;
      std::deque<Record> records = std::exchange(waiting_, {});
      if (const std::int64_t lost = std::exchange(lost_, 0)) records.push_back(loss(lost));
      lock.unlock();
      hand_over(records);
      lock.lock();
    }
    lock.unlock();
    const nb::gil_scoped_acquire gil;
    call_.reset();
  }

  static Record loss(std::int64_t count) {
    const std::string records = std::to_string(count);
    const std::string message = records + " records were lost: they came faster than the callable took them";
    const LogField field{"records", records};
    return Record({LogLevel::warning, "log.lost", message, {&field, 1}});
  }

  void hand_over(std::deque<Record>& records) const {
    const nb::gil_scoped_acquire gil;
    for (Record& record : records) {
      if (silent_) return;
      try {
        call_(nb::cast(std::move(record)));
      } catch (nb::python_error& error) {
        error.discard_as_unraisable(call_);  // goes to sys.unraisablehook
      }
    }
  }

  nb::object call_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Record> waiting_;  // this and the next two under mutex_
  std::int64_t lost_ = 0;
  bool stopped_ = false;
  std::atomic<bool> silent_{false};
  std::thread thread_;
};

// Never destroyed, like the library's sink.
std::mutex& present_mutex = *new std::mutex;
std::shared_ptr<Listener>& present = *new std::shared_ptr<Listener>;  // under present_mutex

void listen(const Sink& call) {
  const std::shared_ptr<Listener> next = call.is_none() ? nullptr : Listener::start(call);
  const nb::gil_scoped_release no_gil;
  std::shared_ptr<Listener> before;
  {
    const std::lock_guard lock(present_mutex);
    before = std::exchange(present, next);
    set_log_sink(next ? LogSink([next](const LogRecord& record) { next->leave(record); }) : LogSink());
  }
  if (before) before->stop();
}

}  // namespace

void bind_log(nb::module_& m) {
  nb::enum_<LogLevel>(m, "LogLevel")
      .value("info", LogLevel::info)
      .value("warning", LogLevel::warning)
      .value("error", LogLevel::error);
  nb::class_<Record>(m, "LogRecord", "One event.")
      .def_ro("level", &Record::level)
      .def_ro("event", &Record::event, "a name that stays the same: 'tier.opened' (docs/operations.md lists them)")
      .def_ro("message", &Record::message, "a sentence for people")
      .def_ro("fields", &Record::fields, "dict of str by name: 'tier', 'reason', ...")
      .def("__repr__", [](const Record& self) {
        return "LogRecord(" + std::string(to_string(self.level)) + ", " + self.event + ": " + self.message + ")";
      });
  m.def("set_log_sink", &listen, nb::arg("sink").none(),
        "sink(record: LogRecord) is told from now on what happens in all caches and tiers of the process; None: "
        "silence,\n"
        "as at the start. It is called by a thread of its own, one record after the other, and may call kv4; what it\n"
        "raises goes to sys.unraisablehook. When this returns, the one before has been told everything and is not "
        "called\n"
        "any more. At the interpreter's exit the log ends.");
  nb::module_::import_("atexit").attr("register")(m.attr("set_log_sink"), nb::none());
}

}  // namespace kv4::python
