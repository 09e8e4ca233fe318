// Exact search over rows of 8-bit codes, bf16 or float32: products compared with thresholds, then the candidates in
// float64.
//
// Compiled on demand by build.py for this processor; plain C functions, called through ctypes. Rows are read in blocks,
// queries are multiplied in panels (scan_products.h), and threads take stripes of rows from a shared counter, because other
// programs may slow one of them. A row becomes a query's candidate when its score reaches the k-th best so far less
// `margin`, which is twice what rounding can change; so the shortlists contain every row of the true answer. Of codes,
// each row has a bound of its own (plsc/index/codes.py): its score is the highest that it can have, and the k-th best is
// taken of the lowest.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ios>
#include <system_error>
#include <thread>
#include <vector>

#include "code_products.h"
#include "nearest_row.h"
#include "row_codes.h"
#include "scan_products.h"
#include "scan_ranking.h"

namespace {

constexpr int64_t kGroup = 4;      // panels that are multiplied by one part of the rows while it is in the cache
constexpr int64_t kAheadBytes = 16384;  // the distance at which rows are prefetched for few queries
constexpr int64_t kStripe = 2048;  // rows that a thread takes at a time, rounded down to whole blocks
constexpr int kFloats = 0, kBfloats = 1, kCodes = 2;  // kinds of rows
constexpr int64_t kNoMemory = -1, kUnreadable = -2;  // return values of a call that failed

// Prefetch as many bytes, some way behind these.
inline void prefetch(const void* from, int64_t bytes) {
    const char* ahead = static_cast<const char*>(from) + kAheadBytes;
    for (int64_t offset = 0; offset < bytes; offset += kLineBytes) __builtin_prefetch(ahead + offset);
}

// The rows of a block, at one distance: in place where they are, else copied, and the last one repeated. Copies do not
// lie a power of two apart, where the lines of many rows would share few sets of a cache.
template <class Number, class Factor>
class Block {
public:
    const Factor* numbers = nullptr;
    int64_t stride = 0;
    bool in_place = false;

    void load(const Search& search, int64_t position, int64_t here, int64_t rows) {
        const Number* base = static_cast<const Number*>(search.base);
        stride = search.stride;
        if constexpr (std::is_same_v<Number, Factor>)
            if (!search.index && here == rows) {
                numbers = base + position * stride;
                in_place = true;
                return;
            }
        stride = (search.stride * sizeof(Factor) / kLineBytes / 2 * 2 + 3) * kLineBytes / sizeof(Factor);
        Factor* copy = static_cast<Factor*>(memory.reserve(rows * stride * sizeof(Factor)));
        for (int64_t r = 0; r < rows; r++) {
            const Number* row = base + search.row(position + std::min(r, here - 1)) * search.stride;
            if (!search.index) prefetch(row, search.stride * sizeof(Number));
            convert(row, search.stride, copy + r * stride);
        }
        numbers = copy;
        in_place = false;
    }

private:
    Lines memory;

    static void convert(const Number* row, int64_t count, Factor* out) {
        if constexpr (std::is_same_v<Number, Factor>) {
            std::memcpy(out, row, count * sizeof(Factor));
        } else {
            for (int64_t d = 0; d < count; d += kLanes) {
                const Floats wide = FloatUnit::load(row + d);
                std::memcpy(out + d, &wide, sizeof wide);
            }
        }
    }
};

template <class Products>
constexpr bool kIsOfCodes = std::is_same_v<typename Products::Number, uint8_t>;

// One thread's part of the scan.
class Scanner {
public:
    Scanner(const Search& search, Common& common)
        : search(search), common(common), shortlists(search.query_count),
          least((search.query_count + kPanel - 1) / kPanel * kPanel, kInfinity) {
        for (auto& list : shortlists) list.limit = 2 * search.k + 64;
    }

    template <class Products>
    void run() {
        constexpr int64_t block = Products::kBlock, stripe = kStripe / block * block;
        Block<typename Products::Number, typename Products::Factor> rows;
        Products::begin();
        for (int64_t start; (start = common.next_row.fetch_add(stripe)) < search.count;) {
            for (int64_t q = 0; q < search.query_count; q++) least[q] = known(q);
            const int64_t stop = std::min(start + stripe, search.count);
            for (int64_t position = start; position < stop; position += block) {
                const int64_t here = std::min(block, stop - position);
                if (search.query_count <= Products::kFew) {
                    multiply_few<Products>(position, here);
                } else {
                    rows.load(search, position, here, block);
                    if constexpr (kIsOfCodes<Products>)
                        multiply_code_panels<Products>(rows, position, here);
                    else
                        multiply_panels<Products>(rows, position, here);
                }
            }
        }
        Products::end();
    }

    std::vector<Candidate>& found(int64_t query) { return shortlists[query].entries; }

private:
    const Search& search;
    Common& common;
    std::vector<Shortlist> shortlists;
    std::vector<float> least;  // for each query the score from which on a row is a candidate; infinite behind the last
    alignas(64) float scores[kGroup * kMostRows * kPanel];  // of a panel behind the other
    alignas(64) int32_t sums[kMostRows * 2 * kPanel];       // of codes: products of the digits of a panel

    float known(int64_t query) const {
        return common.crowded[query].load(std::memory_order_relaxed) ? kInfinity
                                                                     : common.least[query].load(std::memory_order_relaxed);
    }

    // Few queries: the rows are read once, at the rate of the memory, and nothing is copied.
    template <class Products>
    void multiply_few(int64_t position, int64_t here) {
        using Number = typename Products::Number;
        const Number* base = static_cast<const Number*>(search.base);
        const Number* row[kFour];
        for (int64_t start = 0; start < here; start += kFour) {
            for (int64_t r = 0; r < kFour; r++)
                row[r] = base + search.row(position + std::min(start + r, here - 1)) * search.stride;
            if (!search.index) prefetch(row[0], kFour * search.stride * sizeof(Number));
            const auto* queries = search.queries_of(typename Products::Factor());
            if constexpr (kIsOfCodes<Products>)
                Products::multiply_four(row, queries, search.query_count, search.stride, sums + start * 2 * kPanel);
            else
                Products::multiply_four(row, queries, search.query_count, search.stride, scores + start * kPanel);
        }
        if constexpr (kIsOfCodes<Products>) score_codes(position, here, 0, search.query_count);
        take(position, here, 0, search.query_count, scores);
    }

    // Of codes: a block of rows is small enough for the first-level cache.
    template <class Products, class Block>
    void multiply_code_panels(const Block& rows, int64_t position, int64_t here) {
        const int8_t* packed = static_cast<const int8_t*>(search.packed);
        for (int64_t low = 0; low < search.query_count; low += kPanel) {
            const int64_t width = std::min(kPanel, search.query_count - low);
            Products::multiply(rows.numbers, rows.stride, packed + low * 2 * search.stride, search.stride, width,
                               rows.in_place && low == 0, sums);
            score_codes(position, here, low, width);
            take(position, here, low, width, scores);
        }
    }

    // The highest scores that `here` rows can have with `width` queries, from the sums of the digits' products.
    void score_codes(int64_t position, int64_t here, int64_t low, int64_t width) {
        const int64_t padded = (width + 15) / 16 * 16, panels = int64_t(least.size());
        const float *scales = search.query_scales + low, *lengths = search.lengths + low;
        const int32_t *high_offsets = search.offsets + low, *low_offsets = high_offsets + panels;
        for (int64_t r = 0; r < here; r++) {
            const int64_t row = search.row(position + r);
            const float scale = search.scales[row], residue = search.residues[row];
            const int32_t *high = sums + r * 2 * kPanel, *rest = high + kPanel;
            float* of_row = scores + r * kPanel;
#pragma omp simd
            for (int64_t q = 0; q < padded; q++) {
                const float product = 128.0f * float(high[q] - high_offsets[q]) + float(rest[q] - low_offsets[q]);
                of_row[q] = product * scales[q] * scale + lengths[q] * residue;
            }
        }
    }

    // In groups of panels, so that a part of the rows stays in the first-level cache for all panels of a group.
    template <class Products, class Block>
    void multiply_panels(const Block& rows, int64_t position, int64_t here) {
        using Factor = typename Products::Factor;
        constexpr int64_t block = Products::kBlock;
        const Factor* packed = static_cast<const Factor*>(search.packed);
        for (int64_t first = 0; first < search.query_count; first += kGroup * kPanel) {
            const int64_t stop = std::min(first + kGroup * kPanel, search.query_count);
            const int64_t part = stop - first > kPanel ? Products::kPart : search.stride;
            for (int64_t d = 0; d < search.stride; d += part) {
                const int64_t depth = std::min(part, search.stride - d);
                for (int64_t low = first; low < stop; low += kPanel)
                    Products::multiply(rows.numbers + d, rows.stride, packed + low * search.stride, search.stride, d, depth,
                                       stop - low, rows.in_place && low == 0, scores + (low - first) * block);
            }
            for (int64_t low = first; low < stop; low += kPanel)
                take(position, here, low, std::min(kPanel, stop - low), scores + (low - first) * block);
        }
    }

    // Keep what reaches the thresholds among the scores of `here` rows and `width` queries.
    void take(int64_t position, int64_t here, int64_t low, int64_t width, const float* scores) {
        const int64_t padded = (width + 15) / 16 * 16;
        for (int64_t r = 0; r < here; r++) {
            const float* of_row = scores + r * kPanel;
            const float* needed = least.data() + low;
            for (int64_t q = 0; q < padded; q += 16) {
                int reached = 0;
#pragma omp simd reduction(| : reached)
                for (int64_t j = 0; j < 16; j++) reached |= of_row[q + j] >= needed[q + j];
                if (!reached) continue;
                for (int64_t j = q; j < std::min(q + 16, width); j++)
                    if (of_row[j] >= needed[j]) add(low + j, of_row[j], search.row(position + r));
            }
        }
    }

    void add(int64_t query, float score, int64_t row) {
        if (!search.may_find(row)) return;
        Shortlist& list = shortlists[query];
        list.entries.push_back({score, search.lowest(query, score, row), row});
        if (list.entries.size() < list.limit) return;
        least[query] = list.prune(search.k, search.margin[query], std::max(least[query], known(query)));
        if (int64_t(list.entries.size()) > search.most) {
            common.crowded[query] = true;
            least[query] = kInfinity;
            std::vector<Candidate>().swap(list.entries);
        } else if (least[query] > common.least[query].load(std::memory_order_relaxed)) {
            common.least[query].store(least[query], std::memory_order_relaxed);  // any thread's value is a bound
        }
    }
};

// Run work(number) for all numbers below `count`, each in a thread where the system grants one.
template <class Work>
void run_threads(int64_t count, Common& common, const Work& work) {
    const auto guarded = [&](int64_t number) {
        try {
            work(number);
        } catch (const std::ios_base::failure&) {
            common.failure = kUnreadable;
        } catch (const std::exception&) {
            common.failure = kNoMemory;
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(count);
    for (int64_t number = 1; number < count; number++) {
        try {
            threads.emplace_back(guarded, number);
        } catch (const std::system_error&) {
            break;  // threads take work from a counter, so fewer of them still do all of it
        }
    }
    guarded(0);
    for (auto& thread : threads) thread.join();
}

// run(products), of rows of a kind, with the fastest products that this process can use.
template <class Run>
auto with_products(int kind, [[maybe_unused]] bool low_queries, const Run& run) {
#ifdef PLSC_TILES
    static const bool has_tiles = tiles_are_allowed();
    if (kind == kBfloats && low_queries && has_tiles) return run(TileProducts());
#endif
#ifdef PLSC_BYTE_TILES
    if (kind == kCodes && has_tiles) return run(TileCodeProducts());
#endif
    if (kind == kCodes) return run(CodeProducts());
#ifdef PLSC_PAIRS
    if (kind == kBfloats && low_queries) return run(VectorProducts<PairUnit, bf16>());
#endif
    return kind == kBfloats ? run(VectorProducts<FloatUnit, bf16>()) : run(VectorProducts<FloatUnit, float>());
}

int64_t padded_to_panels(int64_t queries) { return (queries + kPanel - 1) / kPanel * kPanel; }

template <class Products>
const void* pack_queries(const Search& search, Lines& memory) {
    using Factor = typename Products::Factor;
    const int64_t padded = padded_to_panels(search.query_count);
    if constexpr (kIsOfCodes<Products>) {
        int8_t* packed = static_cast<int8_t*>(memory.reserve(padded * 2 * search.stride));
        Products::pack(search.queries_of(Factor()), padded, search.stride, packed);
        return packed;
    } else {
        Factor* packed = static_cast<Factor*>(memory.reserve(padded * search.stride * sizeof(Factor)));
        Products::pack(search.queries_of(Factor()), padded, search.stride, packed);
        return packed;
    }
}

// What the sums of codes' products are too high, (2, panels·32): Products::kOffset times the sum of each digit.
template <class Products>
std::vector<int32_t> code_offsets(const Search& search) {
    std::vector<int32_t> offsets;
    if constexpr (kIsOfCodes<Products>) {
        const int64_t padded = padded_to_panels(search.query_count);
        const int8_t* digits = search.queries_of(typename Products::Factor());
        offsets.resize(2 * padded);
        for (int64_t q = 0; q < 2 * padded; q++, digits += search.stride) {
            int32_t total = 0;
            for (int64_t d = 0; d < search.stride; d++) total += digits[d];
            offsets[q % 2 * padded + q / 2] = Products::kOffset * total;
        }
    }
    return offsets;
}

}  // namespace

extern "C" {

// The name of the unit that multiplies rows of a kind: 0 float32, 1 bf16, 2 codes.
const char* plsc_scan_products(int kind) {
    return with_products(kind, true, [](auto products) { return decltype(products)::kName; });
}

// 1 if bf16 rows are multiplied by bf16 queries, 0 if by float32 ones.
int plsc_rounds_queries() {
    return with_products(kBfloats, true,
                         [](auto products) { return std::is_same_v<typename decltype(products)::Factor, bf16>; });
}

// scores, rows (queries, k): the best rows of each query by float64 products, ties by row number. The arguments are
// the fields of `Search` but for those that are made here; `base` null means that every row is scored in float64. At
// least k rows may be found. Returns how many rows were scored in float64, or a failure.
int64_t plsc_scan(const void* base, int kind, int64_t stride, const float* scales, const float* residues,
                  const float* vectors, int file, int64_t offset, int64_t dim, const int64_t* index, int64_t count,
                  const uint8_t* allowed, const float* queries, const void* low_queries, const float* query_scales,
                  const float* lengths, int64_t query_count, int64_t k, const float* margin, int64_t most,
                  int64_t threads, float* scores, int64_t* rows) {
    try {
        Search search{base, stride, scales, residues, vectors, file, offset, dim, index, count, allowed, queries,
                      low_queries, query_scales, lengths, nullptr, nullptr, query_count, k, margin, most};
        Common common(query_count);
        std::vector<Scanner> scanners;
        if (base)
            with_products(kind, low_queries != nullptr, [&](auto products) {
                using Products = decltype(products);
                Lines packed;
                if (query_count > Products::kFew) search.packed = pack_queries<Products>(search, packed);
                const std::vector<int32_t> offsets = code_offsets<Products>(search);
                search.offsets = offsets.data();
                scanners.reserve(threads);
                for (int64_t number = 0; number < threads; number++) scanners.emplace_back(search, common);
                run_threads(threads, common, [&](int64_t number) { scanners[number].run<Products>(); });
                return 0;
            });
        if (!common.failure)
            run_threads(std::min(threads, query_count), common,
                        [&](int64_t) { Ranker(search, common, scanners, scores, rows).run(); });
        return common.failure ? common.failure.load() : common.ranked.load();
    } catch (const std::exception&) {
        return kNoMemory;
    }
}

// products, found, others (queries): for each query the nearest row, its product in float64, and a bound of the product with
// any other row. The arguments are the fields of two `Coded`, with steps, residues and lengths one behind the other, and
// `least`. Returns 0, or a failure.
int64_t plsc_nearest_rows(const float* rows, const uint8_t* row_codes, const float* row_bounds, int64_t row_count,
                          const float* queries, const uint8_t* query_codes, const float* query_bounds,
                          int64_t query_count, const float* least, int64_t dim, int64_t stride, int64_t threads,
                          float* products, int64_t* found, float* others) {
    const auto coded = [=](const float* vectors, const uint8_t* codes, const float* bounds, int64_t count) {
        return Coded{vectors, codes, bounds, bounds + count, bounds + 2 * count, count, dim, stride};
    };
    const Coded of_rows = coded(rows, row_codes, row_bounds, row_count);
    const Coded of_queries = coded(queries, query_codes, query_bounds, query_count);
    Common common(0);
    Lines memory;
    const uint8_t* tiles = pack_tiles(of_rows, memory);
    run_threads(std::min(threads, (query_count + kChunk - 1) / kChunk), common, [&](int64_t) {
        NearestFinder finder(of_rows, of_queries, least, tiles);
        for (int64_t first; (first = common.next_query.fetch_add(kChunk)) < query_count;)
            finder.find(first, products, found, others);
    });
    return common.failure;
}

}  // extern "C"
