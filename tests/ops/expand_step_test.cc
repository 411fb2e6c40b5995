// The tables of a step from the records of its items, in small numbers.
#include "ops/expand_step.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace kv4 {
namespace {

/// Two rows of three blocks of 4 tokens; ring of 8 rows, CSA 2, HCA 4.
struct Tables {
  std::vector<std::int32_t> blocks = {10, 11, 12, 20, 21, -1};
  std::vector<std::int32_t> rows = {99, 99}, slots = {99, 99}, csa = {99, 99}, hca = {99, 99}, heads = {99, 99},
                            begins = {99, 99};

  ops::StepTableDesc desc() {
    ops::StepTableDesc out;
    out.item_rows = rows.data();
    out.item_slots = slots.data();
    out.csa_lens = csa.data();
    out.hca_lens = hca.data();
    out.ring_heads = heads.data();
    out.block_table = blocks.data();
    out.window_begins = begins.data();
    out.dummy_block = 55;
    out.blocks_per_request = 3;
    out.block_tokens = 4;
    out.ring_rows = 8;
    out.csa_ratio = 2;
    out.hca_ratio = 4;
    return out;
  }
};

ops::StepRecord item_of(std::int32_t row, std::int32_t length, std::int32_t count, std::int32_t first_token) {
  ops::StepRecord out;
  out.row = row;
  out.length = out.position = length;
  out.count = count;
  out.first_token = first_token;
  out.read_slot = 3;
  out.write_slot = 4;
  out.block = 0;
  return out;
}

TEST(ExpandStep, TokensGetPositionsAndBlocks) {
  Tables tables;
  const ops::StepRecord item = item_of(1, 2, 5, 7);  // tokens 7 .. 11 are positions 2 .. 6
  const std::int32_t blocks[] = {20, 20, 21, 21, 21};
  for (std::int32_t i = 0; i < 5; ++i) {
    const ops::StepRecord token = ops::token_record(tables.desc(), item, 7 + i);
    EXPECT_EQ(token.position, 2 + i);
    EXPECT_EQ(token.block, blocks[i]) << i;
    EXPECT_EQ(token.row, 1);
    EXPECT_EQ(token.length, 2);
    EXPECT_EQ(token.count, 5);
    EXPECT_EQ(token.first_token, 7);
    EXPECT_EQ(token.read_slot, 3);
    EXPECT_EQ(token.write_slot, 4);
  }
}

TEST(ExpandStep, EntriesThatAreThereGoToTheDummyBlock) {
  Tables tables;
  ops::StepRecord item = item_of(0, 3, 4, 0);
  item.block = 5;  // positions 0 .. 4 go to the dummy block
  const std::int32_t blocks[] = {55, 55, 11, 11};
  for (std::int32_t i = 0; i < 4; ++i) EXPECT_EQ(ops::token_record(tables.desc(), item, i).block, blocks[i]) << i;
}

TEST(ExpandStep, PositionsWithoutABlock) {
  Tables tables;
  EXPECT_EQ(ops::token_record(tables.desc(), item_of(1, 8, 1, 0), 0).block, -1);   // none in the table
  EXPECT_EQ(ops::token_record(tables.desc(), item_of(0, 11, 1, 0), 0).block, 12);  // the last of the row
  EXPECT_EQ(ops::token_record(tables.desc(), item_of(0, 12, 1, 0), 0).block, -1);  // not the next row's first
}

TEST(ExpandStep, PaddingStaysPadding) {
  Tables tables;
  ops::StepRecord padding;
  padding.first_token = 2;
  padding.count = 3;
  ops::StepTableDesc desc = tables.desc();
  desc.block_table += 3;  // memory before the table, at row -1, is not read
  const ops::StepRecord token = ops::token_record(desc, padding, 4);
  EXPECT_TRUE(token.padded());
  EXPECT_EQ(token.position, 2);
  EXPECT_EQ(token.block, -1);

  ops::write_item_arrays(tables.desc(), padding, 1, 7);
  EXPECT_EQ(tables.rows, (std::vector<std::int32_t>{99, -1}));
  EXPECT_EQ(tables.slots, (std::vector<std::int32_t>{99, -1}));
  EXPECT_EQ(tables.csa, (std::vector<std::int32_t>{99, 0}));
  EXPECT_EQ(tables.hca, (std::vector<std::int32_t>{99, 0}));
  EXPECT_EQ(tables.heads, (std::vector<std::int32_t>{99, 0}));
  EXPECT_EQ(tables.begins, (std::vector<std::int32_t>{99, 99}));
}

TEST(ExpandStep, ItemsGetTheirLengthsAfterTheStep) {
  Tables tables;
  ops::write_item_arrays(tables.desc(), item_of(1, 6, 5, 0), 0, 2);  // 11 tokens
  EXPECT_EQ(tables.rows, (std::vector<std::int32_t>{1, 99}));
  EXPECT_EQ(tables.slots, (std::vector<std::int32_t>{4, 99}));
  EXPECT_EQ(tables.csa, (std::vector<std::int32_t>{5, 99}));
  EXPECT_EQ(tables.hca, (std::vector<std::int32_t>{2, 99}));
  EXPECT_EQ(tables.heads, (std::vector<std::int32_t>{3, 99}));
  EXPECT_EQ(tables.begins, (std::vector<std::int32_t>{99, 2}));  // by the table's row, not the item's index

  ops::StepTableDesc no_begins = tables.desc();
  no_begins.window_begins = nullptr;
  ops::write_item_arrays(no_begins, item_of(0, 0, 8, 0), 1, 5);
  EXPECT_EQ(tables.heads[1], 0);
  EXPECT_EQ(tables.begins, (std::vector<std::int32_t>{99, 2}));
}

TEST(ExpandStep, RingRowsHoldTheLastPositions) {
  for (std::int32_t end = 0; end <= 30; ++end) {
    for (const std::int32_t begin : {0, 4, 20}) {
      std::vector<std::int32_t> want(8, -1);
      for (std::int32_t position = begin; position < end; ++position)  // later ones overwrite
        want[static_cast<std::size_t>(position % 8)] = position;
      for (std::int32_t r = 0; r < 8; ++r)
        EXPECT_EQ(ops::ring_position(end, end % 8, 8, r, begin), want[static_cast<std::size_t>(r)])
            << "row " << r << " after " << end << " from " << begin;
    }
  }
}

}  // namespace
}  // namespace kv4
