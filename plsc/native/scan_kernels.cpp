// Exact search over rows of bf16 or float32: products compared with thresholds, then the candidates in float64.
//
// Compiled on demand by build.py for this processor; plain C functions, called through ctypes. Rows are read in blocks
// of 32, queries are multiplied in panels of 32, and threads take stripes of rows from a shared counter, because other
// programs may slow one of them. A row becomes a query's candidate when its score reaches the k-th best so far less
// `margin`, which is twice what rounding can change; so the shortlists contain every row of the true answer.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ios>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

#include "tiles.h"

namespace {

constexpr int64_t kBlock = 32;     // rows whose scores are computed together
constexpr int64_t kPanel = 32;     // queries likewise
constexpr int64_t kGroup = 4;      // panels that are multiplied by one part of the rows while it is in the cache
constexpr int64_t kPart = 256;     // numbers of each row in such a part
constexpr int64_t kAhead = 128;    // rows, the distance at which rows are prefetched
constexpr int64_t kStripe = 2048;  // rows that a thread takes at a time
constexpr int64_t kFour = 4;       // rows that one pass over a query's numbers multiplies
constexpr int64_t kNoMemory = -1, kUnreadable = -2;  // return values of a call that failed
constexpr float kInfinity = std::numeric_limits<float>::infinity();

#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
constexpr int kAtOnce = 4;  // queries whose sums, for four rows, the registers hold
#else
constexpr int64_t kLanes = 8;
constexpr int kAtOnce = 2;
#endif
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef float EightFloats __attribute__((vector_size(32)));
typedef double EightDoubles __attribute__((vector_size(64)));

inline Floats load(const float* from) {
    Floats result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

inline Floats load(const bf16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    Floats result;
    std::memcpy(&result, &words, sizeof result);
    return result;
}

inline float as_float(float value) { return value; }
inline float as_float(bf16 value) { return widen(value); }

// scores[r·kPanel + j] = <row r, query j> for four rows and `queries` queries.
template <int queries, class Number>
inline void multiply_four(const Number* const* row, const float* query, int64_t query_stride, int64_t dim,
                          float* scores) {
    Floats sums[kFour][queries] = {};
    const int64_t whole = dim - dim % kLanes;
    for (int64_t d = 0; d < whole; d += kLanes) {
        Floats numbers[kFour];
        for (int r = 0; r < kFour; r++) numbers[r] = load(row[r] + d);
        for (int j = 0; j < queries; j++) {
            const Floats other = load(query + j * query_stride + d);
            for (int r = 0; r < kFour; r++) sums[r][j] += numbers[r] * other;
        }
    }
    for (int r = 0; r < kFour; r++)
        for (int j = 0; j < queries; j++) {
            float total = 0.0f;
            for (int lane = 0; lane < kLanes; lane++) total += sums[r][j][lane];
            for (int64_t d = whole; d < dim; d++) total += as_float(row[r][d]) * query[j * query_stride + d];
            scores[r * kPanel + j] = total;
        }
}

template <class Number>
inline void multiply_four_any(int64_t queries, const Number* const* row, const float* query, int64_t query_stride,
                              int64_t dim, float* scores) {
    for (; queries >= kAtOnce; queries -= kAtOnce, query += kAtOnce * query_stride, scores += kAtOnce)
        multiply_four<kAtOnce>(row, query, query_stride, dim, scores);
    if (kAtOnce > 2 && queries == 3) multiply_four<3>(row, query, query_stride, dim, scores);
    if (kAtOnce > 2 && queries == 2) multiply_four<2>(row, query, query_stride, dim, scores);
    if (queries == 1) multiply_four<1>(row, query, query_stride, dim, scores);
}

// <row, query> in float64. The order of the additions depends on dim alone, so that equal rows score equally.
inline double multiply_exactly(const float* row, const double* query, int64_t dim) {
    EightDoubles sums[4] = {};
    const int64_t whole = dim - dim % 32;
    for (int64_t d = 0; d < whole; d += 32)
        for (int part = 0; part < 4; part++) {
            EightFloats numbers;
            EightDoubles other;
            std::memcpy(&numbers, row + d + part * 8, sizeof numbers);
            std::memcpy(&other, query + d + part * 8, sizeof other);
            sums[part] += __builtin_convertvector(numbers, EightDoubles) * other;
        }
    const EightDoubles together = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double total = 0.0;
    for (int lane = 0; lane < 8; lane++) total += together[lane];
    for (int64_t d = whole; d < dim; d++) total += double(row[d]) * query[d];
    return total;
}

// The rows and queries of one call. The queries are padded with zeros to whole panels.
struct Search {
    const void* base;            // rows of bf16 or float32, `stride` numbers from one to the next
    int64_t stride;
    const float* vectors;        // (N, dim), the float32 rows
    int file;                    // descriptor of a file to read them from, beginning at `offset`, or -1
    int64_t offset;
    int64_t dim;
    const int64_t* index;        // the rows to visit, ascending; null: rows 0 to count
    int64_t count;
    const uint8_t* allowed;      // a byte for every row, zero where it must not be found; null: all may
    const float* queries;        // (panels·32, stride)
    const bf16* packed;          // the same as bf16 tiles; null: multiply without tiles
    int64_t query_count, k;
    const float* margin;         // (query_count)
    int64_t most;                // candidates of a query, above which all rows are scored in float64 instead

    int64_t row(int64_t position) const { return index ? index[position] : position; }
    bool may_find(int64_t row) const { return !allowed || allowed[row]; }
};

struct Candidate {
    float score;
    int64_t row;
};

// One thread's candidates for one query.
struct Shortlist {
    std::vector<Candidate> entries;
    size_t limit = 0;

    // Drop what can no longer be among the best k; returns the least score that can.
    float prune(int64_t k, float margin, float least) {
        if (int64_t(entries.size()) >= k) {
            std::nth_element(entries.begin(), entries.begin() + (k - 1), entries.end(),
                             [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
            least = std::max(least, entries[k - 1].score - margin);
        }
        entries.erase(std::remove_if(entries.begin(), entries.end(), [least](const Candidate& c) { return c.score < least; }),
                      entries.end());
        limit = std::max(limit, 2 * entries.size());
        return least;
    }
};

// State shared by the threads: the stripe and the query to take next, and for each query the least score that can still
// be among the best k, and a flag for too many candidates. Relaxed loads and stores suffice for the last two: a stale
// threshold is lower than the newest, so it admits more candidates and never loses one.
struct Common {
    std::atomic<int64_t> next_row{0}, next_query{0}, ranked{0};
    std::atomic<int64_t> failure{0};
    std::vector<std::atomic<float>> least;
    std::vector<std::atomic<bool>> crowded;

    explicit Common(int64_t queries) : least(queries), crowded(queries) {
        for (auto& value : least) value = -kInfinity;
        for (auto& value : crowded) value = false;
    }
};

// One thread's part of the scan.
class Scanner {
public:
    Scanner(const Search& search, Common& common)
        : search(search), common(common), shortlists(search.query_count),
          least((search.query_count + kPanel - 1) / kPanel * kPanel, kInfinity) {
        for (auto& list : shortlists) list.limit = 2 * search.k + 64;
    }

    template <class Number>
    void run() {
#ifdef PLSC_TILES
        if (search.packed) configure_tiles();
#endif
        for (int64_t start; (start = common.next_row.fetch_add(kStripe)) < search.count;) {
            for (int64_t q = 0; q < search.query_count; q++) least[q] = known(q);
            const int64_t stop = std::min(start + kStripe, search.count);
            for (int64_t position = start; position < stop; position += kBlock) {
                const int64_t here = std::min(kBlock, stop - position);
                if (search.packed) {
                    multiply_tiles(position, here);
                } else {
                    multiply<Number>(position, here);
                }
            }
        }
#ifdef PLSC_TILES
        if (search.packed) _tile_release();
#endif
    }

    std::vector<Candidate>& found(int64_t query) { return shortlists[query].entries; }

private:
    const Search& search;
    Common& common;
    std::vector<Shortlist> shortlists;
    std::vector<float> least;  // for each query the score from which on a row is a candidate; infinite behind the last
    std::vector<bf16> copied;
    alignas(64) float scores[kGroup * kBlock * kPanel];  // of a panel behind the other

    float known(int64_t query) const {
        return common.crowded[query].load(std::memory_order_relaxed) ? kInfinity
                                                                     : common.least[query].load(std::memory_order_relaxed);
    }

    template <class Number>
    void multiply(int64_t position, int64_t here) {
        const Number* base = static_cast<const Number*>(search.base);
        const Number* row[kBlock];
        for (int64_t r = 0; r < kBlock; r++)
            row[r] = base + search.row(position + std::min(r, here - 1)) * search.stride;
        for (int64_t low = 0; low < search.query_count; low += kPanel) {
            const int64_t width = std::min(kPanel, search.query_count - low);
            for (int64_t r = 0; r < here; r += kFour) {
                if (low == 0 && !search.index) prefetch(row[r], kFour * search.stride * sizeof(Number));
                multiply_four_any(width, row + r, search.queries + low * search.stride, search.stride,
                                  search.stride, scores + r * kPanel);
            }
            take(position, here, low, width, scores);
        }
    }

    // Prefetch the bytes that lie a block behind these.
    void prefetch(const void* from, int64_t bytes) const {
        const char* ahead = static_cast<const char*>(from) + bytes / kFour * kBlock;
        for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(ahead + offset);
    }

#ifdef PLSC_TILES
    // In groups of panels, so that a part of the rows stays in the first-level cache for all panels of a group.
    void multiply_tiles(int64_t position, int64_t here) {
        const bf16* rows = block(position, here);
        for (int64_t first = 0; first < search.query_count; first += kGroup * kPanel) {
            const int64_t stop = std::min(first + kGroup * kPanel, search.query_count);
            const int64_t part = stop - first > kPanel ? kPart : search.stride;
            for (int64_t d = 0; d < search.stride; d += part) {
                const int64_t depth = std::min(part, search.stride - d) / 32;
                for (int64_t low = first; low < stop; low += kPanel) {
                    const bf16* panel = search.packed + low * search.stride + d * 16;
                    float* out = scores + (low - first) / kPanel * kBlock * kPanel;
                    const bool ahead = !search.index && low == 0;
                    if (stop - low <= 16) {
                        multiply_block<1>(rows + d, panel, depth, d > 0, ahead, out);
                    } else {
                        multiply_block<2>(rows + d, panel, depth, d > 0, ahead, out);
                    }
                }
            }
            for (int64_t low = first; low < stop; low += kPanel)
                take(position, here, low, std::min(kPanel, stop - low),
                     scores + (low - first) / kPanel * kBlock * kPanel);
        }
    }

    // out (32, 16·halves) = [out +] the next 32·depth numbers of 32 rows · those of the queries of `panel`, in tiles.
    template <int halves>
    void multiply_block(const bf16* rows, const bf16* panel, int64_t depth, bool accumulate, bool ahead, float* out) {
        const int64_t bytes = search.stride * 2, width = search.stride * 16;
        if (accumulate) {
            _tile_loadd(0, out, kPanel * 4);
            _tile_loadd(2, out + 16 * kPanel, kPanel * 4);
            if (halves == 2) {
                _tile_loadd(1, out + 16, kPanel * 4);
                _tile_loadd(3, out + 16 * kPanel + 16, kPanel * 4);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t t = 0; t < depth; t++) {
            if (ahead)  // the same columns, some blocks further, into the second-level cache: the first is full
                for (int64_t r = kAhead; r < kAhead + kBlock; r++)
                    __builtin_prefetch(rows + r * search.stride + t * 32, 0, 2);
            _tile_loadd(4, rows + t * 32, bytes);
            _tile_loadd(5, rows + 16 * search.stride + t * 32, bytes);
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

    // 32 contiguous rows: in position, or copied where they are not contiguous.
    const bf16* block(int64_t position, int64_t here) {
        const bf16* base = static_cast<const bf16*>(search.base);
        if (!search.index && here == kBlock) return base + position * search.stride;
        copied.resize(kBlock * search.stride);
        for (int64_t r = 0; r < kBlock; r++)
            std::memcpy(copied.data() + r * search.stride,
                        base + search.row(position + std::min(r, here - 1)) * search.stride, search.stride * 2);
        return copied.data();
    }
#else
    void multiply_tiles(int64_t, int64_t) {}
#endif

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
        list.entries.push_back({score, row});
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

// Reads float32 rows: from memory, or from a file by pread, whose pages do not count as resident in this process.
class RowReader {
public:
    explicit RowReader(const Search& what) : search(what), buffer(what.file < 0 ? 0 : kBlock * what.dim) {}

    // `count` rows, up to 32, from `first` on; valid until the next call.
    const float* read(int64_t first, int64_t count) {
        if (search.file < 0) return search.vectors + first * search.dim;
        char* to = reinterpret_cast<char*>(buffer.data());
        int64_t left = count * search.dim * 4, from = search.offset + first * search.dim * 4;
        while (left > 0) {
            const ssize_t got = pread(search.file, to, left, from);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) throw std::ios_base::failure("cannot read");
            to += got, from += got, left -= got;
        }
        return buffer.data();
    }

private:
    const Search& search;
    std::vector<float> buffer;
};

struct Ranked {
    double score;
    int64_t row;
    bool operator<(const Ranked& other) const {
        return score > other.score || (score == other.score && row < other.row);
    }
};

// Turns the candidates of one query after another into its answer.
class Ranker {
public:
    Ranker(const Search& search, Common& common, std::vector<Scanner>& scanners, float* scores, int64_t* rows)
        : search(search), common(common), scanners(scanners), scores(scores), rows(rows), reader(search),
          query(search.dim) {}

    void run() {
        for (int64_t q; (q = common.next_query.fetch_add(1)) < search.query_count;) {
            for (int64_t d = 0; d < search.dim; d++) query[d] = search.queries[q * search.stride + d];
            ranked.clear();
            if (scanners.empty() || common.crowded[q]) {
                all_rows();
            } else {
                shortlisted(q);
            }
            std::partial_sort(ranked.begin(), ranked.begin() + search.k, ranked.end());
            for (int64_t position = 0; position < search.k; position++) {
                scores[q * search.k + position] = float(ranked[position].score);
                rows[q * search.k + position] = ranked[position].row;
            }
            common.ranked += int64_t(ranked.size());
        }
    }

private:
    const Search& search;
    Common& common;
    std::vector<Scanner>& scanners;
    float* scores;
    int64_t* rows;
    RowReader reader;
    std::vector<double> query;
    std::vector<Ranked> ranked;
    Shortlist merged;

    void shortlisted(int64_t q) {
        merged.entries.clear();
        for (auto& scanner : scanners) {
            auto& more = scanner.found(q);
            merged.entries.insert(merged.entries.end(), more.begin(), more.end());
        }
        merged.prune(search.k, search.margin[q], -kInfinity);
        if (search.file < 0)
            for (const auto& candidate : merged.entries) __builtin_prefetch(search.vectors + candidate.row * search.dim);
        for (const auto& candidate : merged.entries) score(candidate.row, reader.read(candidate.row, 1));
    }

    void all_rows() {
        const int64_t together = search.index ? 1 : kBlock;
        for (int64_t position = 0; position < search.count; position += together) {
            const int64_t here = std::min(together, search.count - position), first = search.row(position);
            const float* numbers = reader.read(first, here);
            for (int64_t r = 0; r < here; r++)
                if (search.may_find(first + r)) score(first + r, numbers + r * search.dim);
        }
    }

    void score(int64_t row, const float* numbers) {
        ranked.push_back({multiply_exactly(numbers, query.data(), search.dim), row});
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

}  // namespace

extern "C" {

// 1 if this process can multiply bf16 rows in matrix tiles, else 0.
int plsc_has_tiles() { return tiles_are_allowed(); }

// scores, rows (queries, k): the best rows of each query by float64 products, ties by row number. The arguments are
// the fields of `Search`, with bf16 queries (panels·32, stride) in position of the packed ones; `base` null means
// that every row is scored in float64. At least k rows may be found. Returns how many rows were scored in float64, or
// a failure.
int64_t plsc_scan(const void* base, int is_bf16, int64_t stride, const float* vectors, int file, int64_t offset,
                  int64_t dim, const int64_t* index, int64_t count, const uint8_t* allowed, const float* queries,
                  [[maybe_unused]] const bf16* low_queries, int64_t query_count, int64_t k, const float* margin,
                  int64_t most, int64_t threads, float* scores, int64_t* rows) {
    try {
        std::vector<bf16> packed;
        Search search{base, stride, vectors, file, offset, dim, index, count,
                      allowed, queries, nullptr, query_count, k, margin, most};
#ifdef PLSC_TILES
        if (low_queries) {
            const int64_t padded = (query_count + kPanel - 1) / kPanel * kPanel;
            packed.resize(padded * stride);
            pack_column_pairs(low_queries, padded, stride, packed.data());
            search.packed = packed.data();
        }
#endif
        Common common(query_count);
        std::vector<Scanner> scanners;
        if (base) {
            scanners.reserve(threads);
            for (int64_t number = 0; number < threads; number++) scanners.emplace_back(search, common);
            run_threads(threads, common, [&](int64_t number) {
                if (is_bf16) scanners[number].run<bf16>();
                else scanners[number].run<float>();
            });
        }
        if (!common.failure)
            run_threads(std::min(threads, query_count), common,
                        [&](int64_t) { Ranker(search, common, scanners, scores, rows).run(); });
        return common.failure ? common.failure.load() : common.ranked.load();
    } catch (const std::exception&) {
        return kNoMemory;
    }
}

}  // extern "C"
