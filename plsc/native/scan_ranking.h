// The candidates of an exact search, and their ranking in float64.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ios>
#include <limits>
#include <vector>

#include <unistd.h>

#include "vector_units.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kReadRows = 48;  // that are read from a file at once

// The rows and queries of one call. The queries are padded with zeros to whole panels.
struct Search {
    const void* base;            // rows of codes, bf16 or float32, `stride` numbers from one to the next
    int64_t stride;
    const float* scales;         // of codes (N): what one step of a row's codes is
    const float* residues;       // of codes (N): at least the length of the row less what its codes stand for
    const float* vectors;        // (N, dim), the float32 rows
    int file;                    // descriptor of a file to read them from, beginning at `offset`, or -1
    int64_t offset;
    int64_t dim;
    const int64_t* index;        // the rows to visit, ascending; null: rows 0 to count
    int64_t count;
    const uint8_t* allowed;      // a byte for every row, zero where it must not be found; null: all may
    const float* queries;        // (panels·32, stride)
    const void* low_queries;     // the same in bf16, or of codes the digits (panels·32, 2, stride); null: float32
    const float* query_scales;   // of codes (panels·32): what one step of a query's digits is
    const float* lengths;        // of codes (panels·32): at least a query's length
    const int32_t* offsets;      // of codes (2, panels·32): what the sums of each digit's products are too high
    const void* packed;          // the queries, of either kind, as the products take them
    int64_t query_count, k;
    const float* margin;         // (query_count)
    int64_t most;                // candidates of a query, above which all rows are scored in float64 instead

    int64_t row(int64_t position) const { return index ? index[position] : position; }
    const float* queries_of(float) const { return queries; }
    const bf16* queries_of(bf16) const { return static_cast<const bf16*>(low_queries); }
    const int8_t* queries_of(uint8_t) const { return static_cast<const int8_t*>(low_queries); }
    // The lowest score, up to `margin`, of a row whose highest it is.
    float lowest(int64_t query, float score, int64_t row) const {
        return residues ? score - 2 * lengths[query] * residues[row] : score;
    }
    bool may_find(int64_t row) const { return !allowed || allowed[row]; }
};

struct Candidate {
    float score, lowest;
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
                             [](const Candidate& a, const Candidate& b) { return a.lowest > b.lowest; });
            least = std::max(least, entries[k - 1].lowest - margin);
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

typedef float EightFloats __attribute__((vector_size(32)));
typedef double EightDoubles __attribute__((vector_size(64)));

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

// Reads float32 rows: from memory, or from a file by pread, whose pages do not count as resident in this process.
class RowReader {
public:
    explicit RowReader(const Search& what) : search(what), buffer(what.file < 0 ? 0 : kReadRows * what.dim) {}

    // `count` rows, up to kReadRows, from `first` on; valid until the next call.
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

// Turns the candidates of one query after another into its answer. A scanner's found(query) are its own candidates.
template <class Scanner>
class Ranker {
public:
    Ranker(const Search& search, Common& common, std::vector<Scanner>& scanners, float* scores, int64_t* rows)
        : search(search), common(common), scanners(scanners), scores(scores), rows(rows), reader(search),
          query(search.dim) {}

    void run() {
        for (int64_t q; (q = common.next_query.fetch_add(1)) < search.query_count;) {
            for (int64_t d = 0; d < search.dim; d++) query[d] = search.queries[q * search.stride + d];
            ranked.clear();
            // Where the margin overflowed, so may scores have done, and what is not a number was no candidate.
            if (!scanners.empty() && !common.crowded[q] && search.margin[q] < kInfinity) shortlisted(q);
            if (int64_t(ranked.size()) < search.k) all_rows();
            std::partial_sort(ranked.begin(), ranked.begin() + search.k, ranked.end());
            for (int64_t position = 0; position < search.k; position++) {
                scores[q * search.k + position] = float(ranked[position].score);
                rows[q * search.k + position] = ranked[position].row;
            }
        }
        common.ranked += scored;
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
    int64_t scored = 0;

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
        ranked.clear();
        const size_t limit = 2 * search.k + 64 * kReadRows;
        const int64_t together = search.index ? 1 : kReadRows;
        for (int64_t position = 0; position < search.count; position += together) {
            const int64_t here = std::min(together, search.count - position), first = search.row(position);
            const float* numbers = reader.read(first, here);
            for (int64_t r = 0; r < here; r++)
                if (search.may_find(first + r)) score(first + r, numbers + r * search.dim);
            if (ranked.size() < limit) continue;
            std::nth_element(ranked.begin(), ranked.begin() + search.k, ranked.end());
            ranked.resize(search.k);
        }
    }

    void score(int64_t row, const float* numbers) {
        scored++;
        ranked.push_back({multiply_exactly(numbers, query.data(), search.dim), row});
    }
};

}  // namespace
