// The exact scan's matrix products by the units of a processor: matrix tiles (AMX), dot products of bf16 pairs (AVX-512
// BF16, NEON) or multiply-adds of float32 (AVX-512, AVX2, NEON).
//
// `TileProducts` and `VectorProducts` have the same static members; the scan is a template of them. A block is kBlock
// rows, a panel is kPanel queries; scores (kBlock, kPanel) of a block and a panel are float32.
//
//   Number, Factor     of a row, and of the factors of a product: rows of another type are converted, block by block
//   kFew               queries up to which `multiply_four` is faster than `multiply`
//   kPart              numbers of each row that lie in the first-level cache while several panels are multiplied
//   pack               lays queries out for `multiply`
//   multiply           scores (kBlock, width) = [scores +] rows · queriesᵀ over `depth` numbers from the d-th on
//   multiply_four      scores (4, queries) of four rows, wherever they lie, and few queries as they are
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "vector_units.h"

namespace {

constexpr int64_t kPanel = 32;      // queries that are multiplied together
constexpr int64_t kFour = 4;        // rows that one pass over few queries' numbers multiplies
constexpr int64_t kMostRows = 48;   // in a block, of any products
constexpr int64_t kLineBytes = 64;  // of a line of the caches

// Memory of whole lines.
class Lines {
public:
    void* reserve(int64_t bytes) {
        if (int64_t(lines.size()) * kLineBytes < bytes) lines.resize((bytes + kLineBytes - 1) / kLineBytes);
        return lines.data();
    }

private:
    struct alignas(kLineBytes) Line {
        char bytes[kLineBytes];
    };
    std::vector<Line> lines;
};

inline float sum_of(Floats values) {
    typedef float FourFloats __attribute__((vector_size(16)));
    FourFloats parts[kLanes / 4];
    std::memcpy(parts, &values, sizeof values);
    for (int half = kLanes / 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

inline float product_of(bf16 row, bf16 query) { return widen(row) * widen(query); }
inline float product_of(bf16 row, float query) { return widen(row) * query; }
inline float product_of(float row, float query) { return row * query; }

template <class Unit, class RowNumber>
struct VectorProducts {
    using Number = RowNumber;
    using Factor = typename Unit::Number;
    static constexpr const char* kName = Unit::kName;
    static constexpr int kTogether = Unit::kTogether;
    static constexpr int64_t kBlock = std::is_same_v<Factor, Number> ? kMostRows : 12, kPart = 128 * kTogether;
    static constexpr int64_t kFew = std::is_same_v<Factor, Number> ? 2 : 4;

    static void begin() {}
    static void end() {}

    // Strips of kWide queries: kTogether numbers of each query, then their next ones. (count, stride), count a multiple
    // of kWide, to as many numbers.
    static void pack(const Factor* queries, int64_t count, int64_t stride, Factor* out) {
        for (int64_t strip = 0; strip < count; strip += kWide)
            for (int64_t d = 0; d < stride; d += kTogether)
                for (int64_t j = 0; j < kWide; j++, out += kTogether)
                    std::memcpy(out, queries + (strip + j) * stride + d, kTogether * sizeof(Factor));
    }

    static void multiply(const Factor* rows, int64_t row_stride, const Factor* panel, int64_t stride, int64_t d,
                         int64_t depth, int64_t width, bool ahead, float* scores) {
        for (int64_t low = 0; low < std::min(width, kPanel); low += kWide, ahead = false) {
            const Factor* strip = panel + low * stride + d * kWide;
            const auto run = width - low <= kWide / 2 ? multiply_rows<kAcross / 2> : multiply_rows<kAcross>;
            for (int64_t r = 0; r < kBlock; r += kRows)
                run(rows + r * row_stride, row_stride, strip, depth, d > 0, ahead, scores + r * kPanel + low);
        }
    }

    static void multiply_four(const Number* const* row, const Factor* queries, int64_t count, int64_t stride,
                              float* scores) {
        constexpr int together = kLanes == 16 ? 4 : 2;  // as the registers hold the sums of
        for (; count >= together; count -= together, queries += together * stride, scores += together)
            multiply_few<together>(row, queries, stride, scores);
        if (together > 2 && count == 3) multiply_few<3>(row, queries, stride, scores);
        if (together > 2 && count == 2) multiply_few<2>(row, queries, stride, scores);
        if (count == 1) multiply_few<1>(row, queries, stride, scores);
    }

private:
    // kRows rows by `across` registers of queries, all sums in registers; with the same numbers of the next block's rows
    // `ahead` on their way to the second-level cache.
    template <int across>
    static void multiply_rows(const Factor* rows, int64_t stride, const Factor* strip, int64_t depth, bool accumulate,
                              bool ahead, float* scores) {
        constexpr int64_t line = kLineBytes / sizeof(Factor);
        Floats sums[kRows][across] = {};
        if (accumulate)
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++)
                for (int v = 0; v < across; v++) sums[r][v] = FloatUnit::load(scores + r * kPanel + v * kLanes);
        for (int64_t start = 0; start < depth; start += line) {
            if (ahead)
                for (int64_t r = kBlock; r < kBlock + kRows; r++) __builtin_prefetch(rows + r * stride + start, 0, 2);
            const int64_t stop = std::min(start + line, depth);
#pragma GCC unroll 2
            for (int64_t d = start; d < stop; d += kTogether, strip += kWide * kTogether) {
                typename Unit::Factor right[across];
                for (int v = 0; v < across; v++) right[v] = Unit::load(strip + v * kLanes * kTogether);
#pragma GCC unroll 12
                for (int r = 0; r < kRows; r++) {
                    const auto left = Unit::splat(rows + r * stride + d);
                    for (int v = 0; v < across; v++) sums[r][v] = Unit::multiply_add(sums[r][v], left, right[v]);
                }
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) std::memcpy(scores + r * kPanel, sums[r], sizeof sums[r]);
    }

    // Four rows by `count` queries: sums of kLanes parts of each product, which are then added up.
    template <int count>
    static void multiply_few(const Number* const* row, const Factor* queries, int64_t stride, float* scores) {
        constexpr int64_t step = kLanes * kTogether;
        Floats sums[kFour][count] = {};
        const int64_t whole = stride - stride % step;
        for (int64_t d = 0; d < whole; d += step) {
            typename Unit::Factor numbers[kFour];
            for (int r = 0; r < kFour; r++) numbers[r] = Unit::load(row[r] + d);
            for (int j = 0; j < count; j++) {
                const auto other = Unit::load(queries + j * stride + d);
                for (int r = 0; r < kFour; r++) sums[r][j] = Unit::multiply_add(sums[r][j], numbers[r], other);
            }
        }
        for (int r = 0; r < kFour; r++)
            for (int j = 0; j < count; j++) {
                float total = sum_of(sums[r][j]);
                for (int64_t d = whole; d < stride; d++) total += product_of(row[r][d], queries[j * stride + d]);
                scores[r * kPanel + j] = total;
            }
    }
};

#ifdef PLSC_TILES

struct TileProducts {
    using Number = bf16;
    using Factor = bf16;
    static constexpr const char* kName = "amx";
    static constexpr int64_t kBlock = 32, kPart = 256, kFew = 0;
    static constexpr int64_t kAhead = 128;  // rows, the distance at which rows are prefetched

    static void begin() { configure_tiles(); }
    static void end() { _tile_release(); }

    static void pack(const bf16* queries, int64_t count, int64_t stride, bf16* out) {
        pack_column_pairs(queries, count, stride, out);
    }

    static void multiply(const bf16* rows, int64_t row_stride, const bf16* panel, int64_t stride, int64_t d,
                         int64_t depth, int64_t width, bool ahead, float* scores) {
        const auto run = width <= 16 ? multiply_block<1> : multiply_block<2>;
        run(rows, row_stride, panel + d * 16, stride * 16, depth / 32, d > 0, ahead, scores);
    }

    static void multiply_four(const bf16* const*, const bf16*, int64_t, int64_t, float*) {}

private:
    // out (32, 16·halves) = [out +] the next 32·depth numbers of 32 rows · those of the queries of `panel`, in tiles.
    template <int halves>
    static void multiply_block(const bf16* rows, int64_t stride, const bf16* panel, int64_t width, int64_t depth,
                               bool accumulate, bool ahead, float* out) {
        const int64_t bytes = stride * 2;
        if (accumulate) {
            _tile_loadd(0, out, kPanel * 4);
            _tile_loadd(2, out + 16 * kPanel, kPanel * 4);
            if (halves == 2) {
                _tile_loadd(1, out + 16, kPanel * 4);
                _tile_loadd(3, out + 16 * kPanel + 16, kPanel * 4);
            }
        } else {
            clear_sums();
        }
        for (int64_t t = 0; t < depth; t++) {
            if (ahead)  // the same columns, some blocks further, into the second-level cache: the first is full
                for (int64_t r = kAhead; r < kAhead + kBlock; r++) __builtin_prefetch(rows + r * stride + t * 32, 0, 2);
            _tile_loadd(4, rows + t * 32, bytes);
            _tile_loadd(5, rows + 16 * stride + t * 32, bytes);
            _tile_loadd(6, panel + t * 512, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            if (halves == 2) {
                _tile_loadd(7, panel + width + t * 512, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, out, kPanel * 4);
        _tile_stored(2, out + 16 * kPanel, kPanel * 4);
        if (halves == 2) {
            _tile_stored(1, out + 16, kPanel * 4);
            _tile_stored(3, out + 16 * kPanel + 16, kPanel * 4);
        }
    }
};

#endif  // PLSC_TILES

}  // namespace
