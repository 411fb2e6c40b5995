// Files of cache keys: their format and permissions.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "kv4/cache_keys.h"
#include "kv4/error.h"

namespace kv4::test {
namespace {

struct KeyFile : testing::Test {
  std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kv4_keys_" + std::to_string(::getpid()) + ".txt");
  ~KeyFile() override { std::filesystem::remove(path); }

  std::vector<CacheKey> read(const std::string& text, mode_t mode = 0600) {
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary) << text;
    ::chmod(path.c_str(), mode);
    return read_key_file(path.string());
  }
  void refused(const std::string& part, const std::string& text, mode_t mode = 0600) {
    try {
      read(text, mode);
      FAIL() << "not refused: " << part;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_file);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
      EXPECT_EQ(std::string(e.what()).find(std::string(8, 'a')), std::string::npos) << "a key in a message";
    }
  }
};

TEST_F(KeyFile, TheFirstIsTheFirst) {
  const std::string a(64, 'a'), b = "0123456789abcdefABCDEF" + std::string(42, '0');
  const std::vector<CacheKey> keys = read(a + "\n\n" + b + "\r\n");
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(keys[0][0], std::byte{0xaa});
  EXPECT_EQ(keys[1][0], std::byte{0x01});
  EXPECT_EQ(keys[1][10], std::byte{0xef});
  EXPECT_EQ(read(a).size(), 1u);  // no newline at its end
  EXPECT_EQ(read(a + "\n", 0400).size(), 1u);
}

TEST_F(KeyFile, IsRefusedWhereOthersMayUseIt) {
  const std::string a = std::string(64, 'a') + "\n";
  for (const mode_t mode : {0640, 0604, 0620, 0602, 0610, 0644, 0666}) refused("chmod 600", a, mode);
}

TEST_F(KeyFile, IsRefusedWithItsLineNumber) {
  const std::string a(64, 'a');
  refused("line 1", "key: " + a);
  refused("line 2", a + "\n" + std::string(63, 'a') + "\n");
  refused("line 2", a + "\n" + std::string(65, 'a') + "\n");
  refused("line 1", std::string(63, 'a') + "g\n");
  refused("line 1", a + " " + a);
  refused("no key", "");
  refused("no key", "\n\n");
  std::string many;
  for (std::size_t i = 0; i <= kMaxCacheKeys; ++i) many += a + "\n";
  refused("more than 64 keys", many);
  refused("bytes", std::string(1 << 20, '\n'));
}

TEST_F(KeyFile, IsARegularFile) {
  const auto refused_path = [](const std::string& name) { EXPECT_THROW(read_key_file(name), Error) << name; };
  refused_path(path.string());  // missing file
  refused_path(std::filesystem::temp_directory_path().string());
  refused_path("/dev/zero");
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  refused_path(path.string());  // and it does not wait for a writer of the FIFO
}

}  // namespace
}  // namespace kv4::test
