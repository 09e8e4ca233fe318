// A program that compares the exact scan with a float64 ranking, for processors that only an emulator runs.
//
// Prints the products' names and every query whose answer is off, and returns how many are.
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>

#include "scan_kernels.cpp"

namespace {

int wrong = 0;
const char* const kNames[] = {"float32", "bfloat16", "codes"};

// A normal-like number, the sum of four uniform ones.
float next_number() {
    static uint64_t state = 1;
    double sum = 0;
    for (int i = 0; i < 4; i++) sum += double((state = state * 6364136223846793005u + 1442695040888963407u) >> 40) / (1 << 24);
    return float(2 * sum - 4);
}

bf16 rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bf16((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Rows of length 1 with zeros behind `dim`; every seventh equals the one before it.
std::vector<float> unit_rows(int64_t count, int64_t dim, int64_t stride) {
    std::vector<float> rows(count * stride);
    for (int64_t i = 0; i < count; i++) {
        float* row = rows.data() + i * stride;
        double square = 0;
        for (int64_t d = 0; d < dim; d++) row[d] = next_number(), square += double(row[d]) * row[d];
        for (int64_t d = 0; d < dim; d++) row[d] = float(row[d] / std::sqrt(square));
        if (i % 7 == 6) std::copy(row - stride, row, row);
    }
    return rows;
}

// Codes of rows as the library makes them, and of queries: two digits of Q = 128·high + low, and steps.
struct Codes {
    std::vector<uint8_t> rows;
    std::vector<int8_t> digits;
    std::vector<float> steps, residues, lengths, query_steps, query_lengths;

    Codes(const std::vector<float>& vectors, int64_t dim, const std::vector<float>& queries, int64_t stride)
        : rows(vectors.size() / dim * stride), digits(2 * queries.size()), steps(vectors.size() / dim), residues(steps),
          lengths(steps), query_steps(queries.size() / stride), query_lengths(query_steps.size(), 1.001f) {
        plsc_encode_rows(vectors.data(), steps.size(), dim, stride, 1.001f, 0x1p-22f, 0x1p-54f, 0x1p-120f, rows.data(),
                         steps.data(), residues.data(), lengths.data());
        for (size_t q = 0; q < query_steps.size(); q++) {
            query_steps[q] = 1.0f / 8127;
            for (int64_t d = 0; d < stride; d++) {
                const int whole = int(std::lrint(queries[q * stride + d] * 8127)), high = (whole + 64) >> 7;
                digits[2 * q * stride + d] = int8_t(high);
                digits[(2 * q + 1) * stride + d] = int8_t(whole - 128 * high);
            }
        }
    }
};

void check(int kind, bool listed, int64_t count, int64_t dim, int64_t query_count, int64_t k) {
    const bool is_bf16 = kind == kBfloats;
    const int64_t width = kind == kCodes ? 64 : is_bf16 ? 32 : 1, stride = (dim + width - 1) / width * width;
    const int64_t padded = (query_count + kPanel - 1) / kPanel * kPanel;
    const std::vector<float> base = unit_rows(count, dim, stride);
    std::vector<float> vectors, queries = unit_rows(query_count, dim, stride), margin(query_count, kind == kFloats ? 1e-4f : 0.02f);
    for (int64_t i = 0; i < count; i++) vectors.insert(vectors.end(), &base[i * stride], &base[i * stride] + dim);
    queries.resize(padded * stride);
    std::vector<bf16> low(base.size()), low_queries(queries.size());
    std::transform(base.begin(), base.end(), low.begin(), rounded);
    std::transform(queries.begin(), queries.end(), low_queries.begin(), rounded);
    std::vector<int64_t> index;
    std::vector<uint8_t> allowed(count);
    for (int64_t i = 0; i < count; i++) {
        allowed[i] = i % 5 != 2;
        if (!listed || i % 3 == 1) index.push_back(i);
    }
    std::vector<float> scores(query_count * k);
    std::vector<int64_t> found(query_count * k);
    const Codes codes(vectors, dim, queries, stride);
    const void* rows = kind == kCodes ? codes.rows.data() : is_bf16 ? static_cast<const void*>(low.data()) : base.data();
    const void* low_rows = kind == kCodes ? static_cast<const void*>(codes.digits.data()) : low_queries.data();
    const bool rounds = kind == kCodes || (is_bf16 && plsc_rounds_queries());
    plsc_scan(rows, kind, stride, codes.steps.data(), kind == kCodes ? codes.residues.data() : nullptr, vectors.data(), -1, 0, dim, listed ? index.data() : nullptr, index.size(), allowed.data(),
              queries.data(), rounds ? low_rows : nullptr, codes.query_steps.data(), codes.query_lengths.data(), query_count, k,
              margin.data(), count, 2, scores.data(), found.data());
    for (int64_t q = 0; q < query_count; q++) {
        std::vector<std::pair<double, int64_t>> truth;
        for (int64_t row : index) {
            double score = 0;
            for (int64_t d = 0; d < dim; d++) score -= double(vectors[row * dim + d]) * queries[q * stride + d];
            if (allowed[row]) truth.emplace_back(score, row);
        }
        std::sort(truth.begin(), truth.end());
        for (int64_t i = 0; i < k; i++) {
            const bool same = std::fabs(truth[i].first + scores[q * k + i]) < 1e-6 && truth[i].second == found[q * k + i];
            if (same) continue;
            wrong++;
            std::printf("%s, %d x %d, query %d of %d: row %d, not %d\n", kNames[kind], int(count), int(dim),
                        int(q), int(query_count), int(found[q * k + i]), int(truth[i].second));
            break;
        }
    }
}

// Rows of length 1, and their codes with a 128 behind the last number.
struct UnitCodes {
    std::vector<float> vectors;
    std::vector<uint8_t> codes;
    std::vector<float> bounds;

    UnitCodes(int64_t count, int64_t dim, int64_t stride)
        : vectors(unit_rows(count, dim, dim)), codes(count * stride, 128), bounds(3 * count) {
        plsc_encode_rows(vectors.data(), count, dim, stride, 1.001f, 0x1p-22f, 0x1p-54f, 0x1p-120f, codes.data(),
                         bounds.data(), bounds.data() + count, bounds.data() + 2 * count);
    }
};

// The nearest rows, the first of equal ones, and bounds of all others.
void check_nearest(int64_t count, int64_t dim, int64_t query_count) {
    const int64_t stride = (dim + 63) / 64 * 64;
    const UnitCodes rows(count, dim, stride), queries(query_count, dim, stride);
    std::vector<float> products(query_count), others(query_count);
    std::vector<int64_t> found(query_count);
    plsc_nearest_rows(rows.vectors.data(), rows.codes.data(), rows.bounds.data(), count, queries.vectors.data(),
                      queries.codes.data(), queries.bounds.data(), query_count, nullptr, dim, stride, 2, products.data(),
                      found.data(), others.data());
    for (int64_t q = 0; q < query_count; q++) {
        std::vector<std::pair<double, int64_t>> truth;
        for (int64_t row = 0; row < count; row++) {
            double product = 0;
            for (int64_t d = 0; d < dim; d++) product -= double(rows.vectors[row * dim + d]) * queries.vectors[q * dim + d];
            truth.emplace_back(product, row);
        }
        std::sort(truth.begin(), truth.end());
        if (truth[0].second == found[q] && (count < 2 || others[q] > -truth[1].first - 1e-6)) continue;
        wrong++;
        std::printf("nearest, %d x %d, query %d: row %d, not %d\n", int(count), int(dim), int(q), int(found[q]),
                    int(truth[0].second));
    }
}

}  // namespace

int main() {
    std::printf("bfloat16 by %s, float32 by %s, codes by %s\n", plsc_scan_products(1), plsc_scan_products(0),
                plsc_scan_products(2));
    for (int kind : {kFloats, kBfloats, kCodes})
        for (bool listed : {false, true})
            for (int64_t query_count : {1, 2, 3, 5, 16, 17, 70}) {
                check(kind, listed, 700, 96, query_count, 9);
                check(kind, listed, 150, 45, query_count, 9);
            }
    const std::string codes_by = plsc_scan_products(2);
    if (codes_by != "avx2" && codes_by != "avx512")  // their sums of two products saturate
        for (int64_t count : {1, 13, 700})
            for (int64_t query_count : {1, 40, 300}) check_nearest(count, 70, query_count);
    return wrong;
}
