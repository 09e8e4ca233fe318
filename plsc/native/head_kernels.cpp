// The class head's inner loops on a CPU: exp fused behind the products, and the whole row update.
//
// Compiled on demand by build.py for this processor; plain C functions, called through ctypes. Shapes: W (rows, D)
// float32 or bf16 row-major; x (B, D) likewise. B is padded to a multiple of 32 by the caller, D is one already. Rows are
// visited in blocks of at most 256 classes (see head_products.h), samples in panels of 128, so that a block's working set stays
// in the second-level cache, and so that no row's result depends on how callers cut the table at multiples of 256.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#include "head_products.h"

namespace {

// Memory in whole lines of the cache: a register of numbers that lies in two takes two reads.
template <class Value>
struct InLines {
    using value_type = Value;
    static constexpr std::align_val_t kLine{64};
    Value* allocate(size_t count) { return static_cast<Value*>(::operator new(count * sizeof(Value), kLine)); }
    void deallocate(Value* values, size_t) { ::operator delete(values, kLine); }
    bool operator==(const InLines&) const { return true; }
    bool operator!=(const InLines&) const { return false; }
};
template <class Value>
using Buffer = std::vector<Value, InLines<Value>>;

constexpr float kSmallestNorm = 1e-12f;

// exp(x) to 2e-7 (Cephes' polynomial), 0 below -87, NaN for NaN; branch-free, so that loops over it vectorise.
inline float exponential(float x) {
    float clamped = x < -87.0f ? -87.0f : x;
    float shifted = clamped * 1.44269504f + 12582912.0f;  // adding 1.5·2^23 rounds to an integer
    float n = shifted - 12582912.0f;
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t power = (bits_of(shifted) + (127u - 0x4B400000u)) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

// random_bits.py's generator: a pure function of (key of seed and step, global row, column).
inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

inline uint32_t row_key(int64_t row, uint32_t key) {
    uint32_t high = uint32_t(uint64_t(row >> 32) * 0x9E3779B9u);
    return mix((uint32_t(row) ^ key) + high);
}

// Which table rows a call visits: `index` where given, else consecutive ones from `first`.
struct Visit {
    const int64_t* index;
    int64_t first;
    int64_t row(int64_t i) const { return index ? index[i] : first + i; }
};

// A block's rows: in place where the table has them as the products take them, else copied and filled up with zeros.
template <class Products, class Number>
struct BlockRows {
    using Factor = typename Products::Number;
    static constexpr int64_t kBlock = Products::kBlock;
    Buffer<Factor> copy;
    std::vector<float> inverse_norm = std::vector<float>(kBlock);

    const Factor* load(const Number* table, const float* inverse, const Visit& visit, int64_t start, int64_t count,
                       int64_t dim) {
        for (int64_t c = 0; c < kBlock; c++) inverse_norm[c] = c < count ? inverse[visit.row(start + c)] : 0.0f;
        if constexpr (std::is_same_v<Factor, Number>)
            if (!visit.index && count == kBlock) return table + visit.row(start) * dim;
        copy.resize(kBlock * dim);
        for (int64_t c = 0; c < count; c++) {
            const Number* row = table + visit.row(start + c) * dim;
#pragma omp simd
            for (int64_t d = 0; d < dim; d++) copy[c * dim + d] = number_of<Factor>(row[d]);
        }
        std::fill(copy.begin() + count * dim, copy.end(), Factor(0));
        return copy.data();
    }
};

// The arguments that both passes have in common; `position` (batch, labels) are the targets' indices among the visited
// classes.
template <class Products, class Number>
struct Pass {
    const Number* table;
    const float* inverse;
    Visit visit;
    int64_t count;
    const typename Products::Number* columns;
    int64_t batch, dim;
    float s;
    const int64_t* position;
    int64_t labels;

    // Set the targets' entries of z, for the samples from `low` on and the `here` classes from `start` on.
    template <class Value>
    void set_targets(float* z, int64_t low, int64_t width, int64_t start, int64_t here, const Value& value) const {
        for (int64_t b = 0; b < width; b++) {
            for (int64_t at = (low + b) * labels; at < (low + b + 1) * labels; at++) {
                const int64_t target = position[at] - start;
                if (target >= 0 && target < here) z[target * kPanel + b] = value(at);
            }
        }
    }
};

template <class Products, class Number>
void first_pass(const Pass<Products, Number>& pass, double* total, float* pull) {
    constexpr int64_t kBlock = Products::kBlock;
    using Factor = typename Products::Number;
    Products::begin();
    BlockRows<Products, Number> block;
    Buffer<float> z(kBlock * kPanel);
    Buffer<Factor> weighted(kPanel * kBlock), packed(pull ? kBlock * pass.dim : 0);
    for (int64_t start = 0; start < pass.count; start += kBlock) {
        const int64_t here = std::min(kBlock, pass.count - start);
        const Factor* rows = block.load(pass.table, pass.inverse, pass.visit, start, here, pass.dim);
        const float* rho = block.inverse_norm.data();
        if (pull) Products::pack_rows(rows, kBlock, pass.dim, packed.data());
        for (int64_t low = 0; low < pass.batch; low += kPanel) {
            const int64_t width = std::min(kPanel, pass.batch - low);
            Products::cosines(rows, pass.columns + low * pass.dim, pass.dim, width, z.data());
            pass.set_targets(z.data(), low, width, start, here, [](int64_t) { return -INFINITY; });
            float sum[kPanel] = {};
            for (int64_t c = 0; c < here; c++) {
                float* row = z.data() + c * kPanel;
                const float factor = pass.s * rho[c];
#pragma omp simd
                for (int64_t b = 0; b < width; b++) {
                    row[b] = exponential(row[b] * factor);
                    sum[b] += row[b];
                }
            }
            for (int64_t b = 0; b < width; b++) total[low + b] += sum[b];
            if (!pull) continue;
            Products::weigh(z.data(), rho, width, weighted.data());
            Products::add_weighted(weighted.data(), packed.data(), pass.dim, width, pull + low * pass.dim);
        }
    }
    Products::end();
}

// What the samples weigh in pass 2, (batch) each; their targets, (batch, labels).
struct Weights {
    const float *log_z, *scale, *target_pull;
};

template <class Products, class Number>
void row_gradients(const Pass<Products, Number>& pass, const typename Products::Number* packed, const Weights& of,
                   float* gradient) {
    constexpr int64_t kBlock = Products::kBlock;
    using Factor = typename Products::Number;
    Products::begin();
    BlockRows<Products, Number> block;
    Buffer<float> z(kBlock * kPanel);
    Buffer<Factor> probability(kBlock * pass.batch);
    for (int64_t start = 0; start < pass.count; start += kBlock) {
        const int64_t here = std::min(kBlock, pass.count - start);
        const Factor* rows = block.load(pass.table, pass.inverse, pass.visit, start, here, pass.dim);
        for (int64_t low = 0; low < pass.batch; low += kPanel) {
            const int64_t width = std::min(kPanel, pass.batch - low);
            Products::cosines(rows, pass.columns + low * pass.dim, pass.dim, width, z.data());
            const float *log_z = of.log_z + low, *scale = of.scale + low;
            for (int64_t c = 0; c < kBlock; c++) {
                float* row = z.data() + c * kPanel;
                const float factor = pass.s * block.inverse_norm[c];
#pragma omp simd
                for (int64_t b = 0; b < width; b++) row[b] = exponential(row[b] * factor - log_z[b]) * scale[b];
            }
            pass.set_targets(z.data(), low, width, start, here, [&](int64_t at) { return of.target_pull[at]; });
            for (int64_t c = 0; c < kBlock; c++)
                Products::store(z.data() + c * kPanel, width, probability.data() + c * pass.batch + low);
        }
        Products::row_gradients(probability.data(), packed, pass.batch, pass.dim, gradient + start * pass.dim);
    }
    Products::end();
}

inline bf16 round_stochastically(float value, uint32_t bits16) { return bf16((bits_of(value) + bits16) >> 16); }

// Storage of rows: W and the momentum in float32 or bf16, the momentum also as int8 with a scale per row.
enum Kind { kNone = 0, kFloat = 1, kBfloat16 = 2, kInt8 = 3 };

template <Kind kind>
inline void read_row(const void* table, int64_t offset, int64_t dim, float scale, float* row) {
#pragma omp simd
    for (int64_t d = 0; d < dim; d++) {
        if constexpr (kind == kFloat) row[d] = static_cast<const float*>(table)[offset + d];
        if constexpr (kind == kBfloat16) row[d] = widen(static_cast<const bf16*>(table)[offset + d]);
        if constexpr (kind == kInt8) row[d] = static_cast<const int8_t*>(table)[offset + d] * scale;
    }
}

// Store a row, rounded by 16 of each element's random bits: the low ones (shift 0) or the high ones (shift 16).
template <Kind kind>
inline void write_row(void* table, int64_t offset, int64_t dim, const uint32_t* bits, int shift, float* scale, float* row) {
    float steps_per_unit = 1.0f;
    if constexpr (kind == kInt8) {
        float largest = 0.0f;
#pragma omp simd reduction(max : largest)
        for (int64_t d = 0; d < dim; d++) largest = std::fabs(row[d]) > largest ? std::fabs(row[d]) : largest;
        *scale = largest / 127.0f;
        steps_per_unit = 1.0f / std::max(*scale, std::numeric_limits<float>::min());
    }
#pragma omp simd
    for (int64_t d = 0; d < dim; d++) {
        const uint32_t chance = (bits[d] >> shift) & 0xFFFFu;
        if constexpr (kind == kFloat) static_cast<float*>(table)[offset + d] = row[d];
        if constexpr (kind == kBfloat16) static_cast<bf16*>(table)[offset + d] = round_stochastically(row[d], chance);
        if constexpr (kind == kInt8) {
            float value = std::floor(row[d] * steps_per_unit + (float(chance) + 0.5f) * (1.0f / 65536.0f));
            value = value > 127.0f ? 127.0f : value;
            static_cast<int8_t*>(table)[offset + d] = int8_t(value < -127.0f ? -127.0f : value);
        }
    }
}

struct Sgd {
    float factor, rate, momentum, decay;
    int nesterov;
};

struct Table {
    void* weight;
    float* inverse_norm;
    void* state;
    float* state_scale;
    int64_t dim;
};

// `numbers` are the rows' numbers less `first_number` in the whole table, which key their random bits.
template <Kind weight_kind, Kind state_kind>
void update_rows(const Table& table, const Visit& visit, int64_t count, const float* gradient, const Sgd& sgd, uint32_t key,
                 const int64_t* numbers, int64_t first_number) {
    const int64_t dim = table.dim;
    Buffer<float> storage(3 * dim);
    Buffer<uint32_t> bit_storage(dim);
    float *w = storage.data(), *step = w + dim, *m = step + dim;
    uint32_t* bits = bit_storage.data();
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = visit.row(i), offset = row * dim;
        const float* g = gradient + i * dim;
        const float rho = table.inverse_norm[row];
        read_row<weight_kind>(table.weight, offset, dim, 1.0f, w);
        float along = 0.0f;
#pragma omp simd reduction(+ : along)
        for (int64_t d = 0; d < dim; d++) along += g[d] * (w[d] * rho);
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) step[d] = (g[d] - w[d] * rho * along) * rho * sgd.factor + sgd.decay * w[d];
        if constexpr (weight_kind != kFloat || state_kind == kBfloat16 || state_kind == kInt8) {
            const uint32_t seed = row_key(numbers[i] + first_number, key);
#pragma omp simd
            for (int64_t d = 0; d < dim; d++) bits[d] = mix(seed ^ (uint32_t(d) * 0x9E3779B9u));
        }
        if constexpr (state_kind != kNone) {
            float* scale = state_kind == kInt8 ? table.state_scale + row : nullptr;
            read_row<state_kind>(table.state, offset, dim, scale ? *scale : 1.0f, m);
#pragma omp simd
            for (int64_t d = 0; d < dim; d++) {
                m[d] = m[d] * sgd.momentum + step[d];
                step[d] = sgd.nesterov ? step[d] + sgd.momentum * m[d] : m[d];
            }
            write_row<state_kind>(table.state, offset, dim, bits, 16, scale, m);
        }
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) w[d] -= sgd.rate * step[d];
        write_row<weight_kind>(table.weight, offset, dim, bits, 0, nullptr, w);
        read_row<weight_kind>(table.weight, offset, dim, 1.0f, w);
        double square = 0.0;  // see renew_norms, which must find the same
#pragma omp simd reduction(+ : square)
        for (int64_t d = 0; d < dim; d++) square += double(w[d]) * double(w[d]);
        const float norm = float(std::sqrt(square));
        table.inverse_norm[row] = 1.0f / (norm < kSmallestNorm ? kSmallestNorm : norm);
    }
}

template <Kind weight_kind>
auto update_for(int state_kind) {
    switch (state_kind) {
        case kFloat: return update_rows<weight_kind, kFloat>;
        case kBfloat16: return update_rows<weight_kind, kBfloat16>;
        case kInt8: return update_rows<weight_kind, kInt8>;
        default: return update_rows<weight_kind, kNone>;
    }
}

}  // namespace

extern "C" {

// What multiplies tables of this kind (see `Kind`).
const char* plsc_products(int kind) {
    return with_products(kind == kBfloat16, [](auto products, auto) { return decltype(products)::kName; });
}

// The bytes of a number in a packed batch for tables of this kind.
int plsc_factor_bytes(int kind) {
    return with_products(kind == kBfloat16, [](auto products, auto) { return int(sizeof(typename decltype(products)::Number)); });
}

// Lay x (batch, dim) out as the right factor of W·xᵀ (`columns`) and of P·x (`rows`); each has batch·dim numbers.
void plsc_pack(const void* x, int kind, int64_t batch, int64_t dim, void* columns, void* rows) {
    with_products(kind == kBfloat16, [&](auto products, auto number) {
        using Products = decltype(products);
        using Factor = typename Products::Number;
        const auto* features = static_cast<const decltype(number)*>(x);
        Products::pack_columns(features, batch, dim, static_cast<Factor*>(columns));
        Products::pack_rows(features, batch, dim, static_cast<Factor*>(rows));
    });
}

// total (batch) += Σ exp(s·cos) over the visited classes but each sample's targets; pull (batch, dim), where not null,
// += Σ exp(s·cos)·ρ·W. position (batch, labels): the targets' indices among the selected classes, counted from this
// call's first.
void plsc_first_pass(const void* table, int kind, const float* inverse, const int64_t* index, int64_t first, int64_t count,
                     const void* columns, int64_t batch, int64_t dim, float s, const int64_t* position, int64_t labels,
                     double* total, float* pull) {
    with_products(kind == kBfloat16, [&](auto products, auto number) {
        using Products = decltype(products);
        using Number = decltype(number);
        first_pass<Products, Number>({static_cast<const Number*>(table), inverse, {index, first}, count,
                                      static_cast<const typename Products::Number*>(columns), batch, dim, s, position,
                                      labels},
                                     total, pull);
    });
}

// gradient (count rounded up to 256, dim): Σ_b P x over the batch for each visited row, where P = scale·exp(s·cos − log_z)
// and target_pull (batch, labels) for a sample's own classes.
void plsc_gradient(const void* table, int kind, const float* inverse, const int64_t* index, int64_t first, int64_t count,
                   const void* columns, const void* rows, int64_t batch, int64_t dim, float s, const int64_t* position,
                   int64_t labels, const float* log_z, const float* scale, const float* target_pull, float* gradient) {
    with_products(kind == kBfloat16, [&](auto products, auto number) {
        using Products = decltype(products);
        using Number = decltype(number);
        using Factor = typename Products::Number;
        row_gradients<Products, Number>({static_cast<const Number*>(table), inverse, {index, first}, count,
                                         static_cast<const Factor*>(columns), batch, dim, s, position, labels},
                                        static_cast<const Factor*>(rows), {log_z, scale, target_pull}, gradient);
    });
}

// SGD on rows of the table, given the gradient (count, dim) by the unit rows: through the norm, decay, momentum,
// rounding, new norm. The kinds are those of `Kind`.
void plsc_sgd(void* weight, int weight_kind, float* inverse_norm, const int64_t* index, int64_t first, int64_t count,
              int64_t dim, const float* gradient, float factor, float rate, float momentum, float decay, int nesterov,
              void* state, int state_kind, float* state_scale, uint32_t key, const int64_t* numbers, int64_t first_number) {
    const auto update = weight_kind == kFloat ? update_for<kFloat>(state_kind) : update_for<kBfloat16>(state_kind);
    update({weight, inverse_norm, state, state_scale, dim}, {index, first}, count, gradient,
           {factor, rate, momentum, decay, nesterov}, key, numbers, first_number);
}

}  // extern "C"
