// The nearest row of every query, exactly, by 8-bit codes of both, and a bound of how near any other row is.
//
// Codes are those of row_codes.h. With x' and c' what the codes of a query x and of a row c stand for,
// |<x, c> - <x', c'>| <= |x| rho(c) + |c'| rho(x) (plsc/index/codes.py). Scores are <x', c'> + |x| rho(c), by the step of the
// query, and `margin` is twice the rest of the bound. So a row whose score is below the highest lower end less the margin
// is not the nearest. All others are compared in float64, ties by number. The query's digit has 8 bits, for units that add
// products of bytes without saturation.
#pragma once

#include "code_products.h"
#include "scan_ranking.h"

namespace {

constexpr int64_t kChunk = 256;  // queries that a thread takes at a time: their codes stay in the second-level cache
constexpr size_t kCrowd = 4096;  // candidates of a query above which it is compared with all rows
constexpr float kScoreRounding = 1e-6f;  // above the float32 rounding of a score of vectors of length 1

// Vectors (count, dim) of length 1 with their codes (count, stride), and steps, residues and lengths (count).
struct Coded {
    const float* vectors;
    const uint8_t* codes;
    const float *steps, *residues, *lengths;
    int64_t count, dim, stride;
};

// Rows' codes (count rounded up to kRows, stride): four bytes of each of kRows rows, then their next four.
inline const uint8_t* pack_tiles(const Coded& rows, Lines& memory) {
    const int64_t tiles = (rows.count + kRows - 1) / kRows;
    auto* const packed = static_cast<uint8_t*>(memory.reserve(tiles * kRows * rows.stride));
    for (int64_t row = 0; row < tiles * kRows; row++) {
        const uint8_t* codes = rows.codes + std::min(row, rows.count - 1) * rows.stride;
        uint8_t* to = packed + row / kRows * kRows * rows.stride + row % kRows * 4;
        for (int64_t d = 0; d < rows.stride; d += 4, to += 4 * kRows) std::memcpy(to, codes + d, 4);
    }
    return packed;
}

class NearestFinder {
public:
    // least (queries): a product that some row is known to reach, or null.
    // tiles: of pack_tiles.
    NearestFinder(const Coded& rows, const Coded& queries, const float* least, const uint8_t* tiles)
        : rows(rows), queries(queries), least(least), tiles(tiles), query(rows.dim), candidates(kChunk) {
        longest = *std::max_element(rows.lengths, rows.lengths + rows.count);
    }

    // The nearest rows of the queries from `first` on, up to kChunk; -1 where none reaches `least`.
    void find(int64_t first, float* products, int64_t* found, float* others) {
        const int64_t here = std::min(kChunk, queries.count - first);
        pack(first, here);
        for (int64_t row = 0; row < rows.count; row += kMostRows) {
            const int64_t stop = std::min(row + kMostRows, rows.count);
            for (int64_t low = 0; low < here; low += kWide)
                for (int64_t at = row; at < stop; at += kRows) multiply(at, low);
        }
        for (int64_t q = 0; q < here; q++) rank(q, first + q, products, found, others);
    }

private:
    struct Scored {
        float score;
        int64_t row;
    };

    const Coded &rows, &queries;
    const float* least;
    const uint8_t* tiles;
    float longest;
    std::vector<double> query;
    std::vector<std::vector<Scored>> candidates;
    Lines packed;
    alignas(64) int32_t offsets[kChunk];
    // Of each query by its step: its length; the margin; the highest lower end; the two highest scores.
    alignas(64) float lengths[kChunk], margins[kChunk], lower[kChunk], highest[kChunk], second[kChunk];

    void pack(int64_t first, int64_t here) {
        const int64_t stride = rows.stride, padded = (here + kWide - 1) / kWide * kWide;
        int8_t* out = static_cast<int8_t*>(packed.reserve(padded * stride));
        for (int64_t q = 0; q < padded; q++) {
            const int64_t number = first + std::min(q, here - 1);
            const uint8_t* codes = queries.codes + number * stride;
            int8_t* to = out + q / kWide * kWide * stride + q % kWide * 4;
            int32_t total = 0;
            for (int64_t d = 0; d < stride; d++) {
                const int8_t digit = int8_t(codes[d] ^ 0x80);
                to[d / 4 * kWide * 4 + d % 4] = digit;
                total += digit;
            }
            const float step = queries.steps[number], error = queries.residues[number] * longest + kScoreRounding;
            offsets[q] = ByteUnit::kOffset * total;
            lengths[q] = queries.lengths[number] / step;
            margins[q] = 2 * error / step;
            lower[q] = least ? (least[number] + error) / step : -kInfinity;
            highest[q] = second[q] = -kInfinity;
            candidates[q].clear();
        }
    }

    // kRows rows by kWide queries; candidates are rare once the highest lower end is known.
    void multiply(int64_t first, int64_t low) {
        const int64_t stride = rows.stride, here = std::min<int64_t>(kRows, rows.count - first);
        const int8_t* strip = static_cast<const int8_t*>(packed.reserve(0)) + low * stride;
        const uint8_t* tile = tiles + first * stride;
        Integers sums[kRows][kAcross] = {};
#pragma GCC unroll 2
        for (int64_t d = 0; d < stride; d += 4, strip += 4 * kWide, tile += 4 * kRows) {
            Words right[kAcross];
            for (int v = 0; v < kAcross; v++) right[v] = read<Words>(strip + v * kLanes * 4);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                const Words left = read<uint32_t>(tile + 4 * r) - Words{};
                for (int v = 0; v < kAcross; v++) sums[r][v] = ByteUnit::multiply_add(sums[r][v], left, right[v]);
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < kAcross; v++) {
            const int64_t q = low + v * kLanes;
            const auto offset = read<Integers>(offsets + q);
            const auto length = read<Floats>(lengths + q), margin = read<Floats>(margins + q);
            auto end = read<Floats>(lower + q);
            Floats scores[kRows], best = Floats{} - kInfinity, next = best;  // of these rows
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                if (r >= here) break;
                const Floats rest = length * rows.residues[first + r];
                const Floats product = __builtin_convertvector(sums[r][v] - offset, Floats) * rows.steps[first + r];
                scores[r] = product + rest;
                const Floats lowest = product - rest, lesser = scores[r] < best ? scores[r] : best;
                end = end > lowest ? end : lowest;
                next = next > lesser ? next : lesser;
                best = best > scores[r] ? best : scores[r];
            }
            const Floats needed = end - margin;
            if (any(best >= needed))
                for (int r = 0; r < here; r++) keep(first + r, q, scores[r], scores[r] >= needed);
            const auto former = read<Floats>(highest + q), former_next = read<Floats>(second + q);
            const Floats lesser = former < best ? former : best;
            best = former > best ? former : best;
            next = next > former_next ? next : former_next;
            next = next > lesser ? next : lesser;
            std::memcpy(lower + q, &end, sizeof end);
            std::memcpy(highest + q, &best, sizeof end);
            std::memcpy(second + q, &next, sizeof end);
        }
    }

    static bool any(Integers flags) {
        int64_t parts[sizeof flags / 8], together = 0;
        std::memcpy(parts, &flags, sizeof flags);
        for (const int64_t part : parts) together |= part;
        return together;
    }

    void keep(int64_t row, int64_t low, Floats scores, Integers reached) {
        if (!any(reached)) return;
        for (int lane = 0; lane < kLanes; lane++) {
            auto& list = candidates[low + lane];
            if (!reached[lane] || list.size() > kCrowd) continue;
            list.push_back({scores[lane], row});
        }
    }

    void rank(int64_t q, int64_t number, float* products, int64_t* found, float* others) {
        const float needed = lower[q] - margins[q], step = queries.steps[number];
        const bool is_crowded = candidates[q].size() > kCrowd;
        for (int64_t d = 0; d < rows.dim; d++) query[d] = queries.vectors[number * rows.dim + d];
        double best = -kInfinity;
        float score = 0;
        found[number] = -1;
        const auto compare = [&](int64_t row, float its_score) {
            const double product = multiply_exactly(rows.vectors + row * rows.dim, query.data(), rows.dim);
            if (found[number] < 0 || product > best) best = product, found[number] = row, score = its_score;
        };
        if (is_crowded)
            for (int64_t row = 0; row < rows.count; row++) compare(row, kInfinity);
        else
            for (const auto& candidate : candidates[q])
                if (candidate.score >= needed) compare(candidate.row, candidate.score);
        products[number] = float(best);
        const bool is_highest = found[number] >= 0 && score == highest[q];
        others[number] = (is_highest ? second[q] : highest[q]) * step + margins[q] / 2 * step;
    }
};

}  // namespace
