// The commands of the kv4 tool. Each adds itself to the app; when it was chosen it runs while the app parses and leaves
// its exit code: 0 fine, 1 a check failed. Bad input is a thrown kv4::Error (exit code 2, see main.cc).
#pragma once

namespace CLI {
class App;
}

void add_plan(CLI::App& app, int& exit_code);
void add_run(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_golden(CLI::App& app, int& exit_code);
void add_store(CLI::App& app, int& exit_code);
void add_session(CLI::App& app, int& exit_code);
void add_inspect(CLI::App& app, int& exit_code);
void add_replay(CLI::App& app, int& exit_code);
void add_serve_metrics(CLI::App& app, int& exit_code);
void add_completion(CLI::App& app, int& exit_code);
