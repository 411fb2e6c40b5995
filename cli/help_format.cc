#include "help_format.h"

#include <sstream>
#include <string_view>

namespace kv4::cli {
namespace {

constexpr std::size_t kColumns = HelpFormat::kColumns, kNameColumns = HelpFormat::kNameColumns;
constexpr std::size_t kExplanationIndent = 6;

/// The words of `text` in lines of at most kColumns, each indented by `indent` spaces. The first line already has
/// `used` columns.
std::string wrapped(const std::string& text, std::size_t indent, std::size_t used) {
  std::istringstream words(text);
  std::string out, word;
  std::size_t column = used;
  bool first = true;
  while (words >> word) {
    if (!first && column + 1 + word.size() > kColumns) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
      first = true;
    }
    out += (first ? "" : " ") + word;
    column += (first ? 0 : 1) + word.size();
    first = false;
  }
  return out;
}

/// A name with its meaning beside it, or below it where the name is long.
std::string entry(const std::string& name, const std::string& meaning) {
  std::string out = name;
  if (meaning.empty()) return out + "\n";
  if (name.size() + 1 > kNameColumns) out += "\n" + std::string(kNameColumns, ' ');
  if (name.size() + 1 <= kNameColumns) out.resize(kNameColumns, ' ');
  return out + wrapped(meaning, kNameColumns, kNameColumns) + "\n";
}

/// "  kv4 plan    what it does"; in a line that is too long, the explanation moves below.
std::string example(const std::string& line) {
  if (line.size() <= kColumns) return line + "\n";
  const std::size_t begin = line.find_first_not_of(' '), gap = line.find("  ", begin);
  if (gap == std::string::npos) return line.substr(0, begin) + wrapped(line, kExplanationIndent, begin) + "\n";
  return line.substr(0, gap) + "\n" + std::string(kExplanationIndent, ' ') +
         wrapped(line.substr(gap), kExplanationIndent, kExplanationIndent) + "\n";
}

/// Lines that begin with a space are examples; all others are paragraphs, up to an empty line or "Examples:".
std::string flowed(const std::string& text) {
  std::istringstream lines(text);
  std::string out, paragraph, line;
  const auto end_paragraph = [&] {
    if (!paragraph.empty()) out += wrapped(paragraph, 0, 0) + "\n";
    paragraph.clear();
  };
  while (std::getline(lines, line)) {
    const bool is_example = line.starts_with(' '), is_title = line.starts_with("Example");
    if (line.empty() || is_example || is_title) end_paragraph();
    if (line.empty()) out += "\n";
    if (is_example) out += example(line);
    if (!is_example && !line.empty()) paragraph += line + " ";
    if (is_title) end_paragraph();
  }
  end_paragraph();
  return out;
}

}  // namespace

std::string HelpFormat::make_option(const CLI::Option* option, bool is_positional) const {
  return entry("  " + make_option_name(option, is_positional) + make_option_opts(option), make_option_desc(option));
}

std::string HelpFormat::make_subcommand(const CLI::App* command) const {
  return entry("  " + command->get_display_name(), command->get_description());
}

std::string HelpFormat::make_description(const CLI::App* app) const { return flowed(app->get_description()); }

std::string HelpFormat::make_footer(const CLI::App* app) const {
  return app->get_footer().empty() ? "" : "\n" + flowed(app->get_footer());
}

}  // namespace kv4::cli
