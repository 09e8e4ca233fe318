// A program that compares the head's kernels with float64, for processors that only an emulator runs.
//
// Prints the products' names and every result that is off, and returns how many are.
#include <cstdio>

#include "head_kernels.cpp"

namespace {

using Doubles = std::vector<double>;

// A normal-like number, the sum of four uniform ones.
double next_number() {
    static uint64_t state = 1;
    double sum = 0;
    for (int i = 0; i < 4; i++) sum += double((state = state * 6364136223846793005u + 1442695040888963407u) >> 40) / (1 << 24);
    return 2 * sum - 4;
}

struct Rows {
    int64_t count, dim;
    int kind;
    std::vector<float> numbers;  // as they are stored
    std::vector<bf16> low;
    std::vector<float> inverse;

    Rows(int64_t count, int64_t dim, int kind, bool unit) : count(count), dim(dim), kind(kind) {
        for (int64_t i = 0; i < count; i++) {
            std::vector<double> row(dim);
            double square = 0;
            for (auto& number : row) square += (number = next_number()) * number;
            for (double number : row) {
                const float value = float(unit ? number / std::sqrt(square) : number);
                low.push_back(bf16(round_to_nearest(value)));
                numbers.push_back(kind == kBfloat16 ? widen(low.back()) : value);
            }
            inverse.push_back(float(1 / std::sqrt(square)));
        }
    }
    void* data() { return kind == kBfloat16 ? static_cast<void*>(low.data()) : numbers.data(); }
    double dot(int64_t row, const Rows& other, int64_t of) const {
        double sum = 0;
        for (int64_t d = 0; d < dim; d++) sum += double(numbers[row * dim + d]) * other.numbers[of * dim + d];
        return sum;
    }
};

int wrong = 0;

template <class Got>
void compare(const char* what, const Rows& table, const std::vector<Got>& got, const Doubles& want, double bound) {
    double error = 0, size = 0;
    for (size_t i = 0; i < want.size(); i++) error += std::pow(got[i] - want[i], 2), size += want[i] * want[i];
    error = std::sqrt(error / size);
    if (error <= bound) return;
    wrong++;
    std::printf("%s, kind %d, D = %d: off by %g, at most %g\n", what, table.kind, int(table.dim), error, bound);
}

void check_passes(int kind, int64_t classes, int64_t batch, int64_t dim, bool listed) {
    const float s = 16;
    Rows table(classes, dim, kind, false), x(batch, dim, kind, true);
    const int64_t labels = 2;
    std::vector<int64_t> index, position(batch * labels, -1);
    for (int64_t c = 0; c < classes; c++)
        if (!listed || c % 3 != 1) index.push_back(c);
    const int64_t count = index.size();
    for (int64_t b = 0; b < batch; b += 2) position[b * labels] = b * 7 % count;
    for (int64_t b = 0; b < batch; b += 3) position[b * labels + 1] = (b * 7 + 1) % count;
    std::vector<float> log_z(batch), scale(batch), target(batch * labels);
    for (int64_t b = 0; b < batch; b++) log_z[b] = 5, scale[b] = 1 + 0.01f * b;
    for (int64_t at = 0; at < batch * labels; at++) target[at] = -0.1f - 0.01f * at;

    Doubles total(batch), pull(batch * dim), gradient(count * dim);
    for (int64_t i = 0; i < count; i++)
        for (int64_t b = 0; b < batch; b++) {
            const double rho = table.inverse[index[i]], z = s * rho * table.dot(index[i], x, b);
            const int64_t at = b * labels, own = position[at] == i ? at : at + 1;
            const bool is_target = position[own] == i;
            const double p = is_target ? target[own] : scale[b] * std::exp(z - log_z[b]);
            if (!is_target) total[b] += std::exp(z);
            for (int64_t d = 0; d < dim; d++) {
                if (!is_target) pull[b * dim + d] += std::exp(z) * rho * table.numbers[index[i] * dim + d];
                gradient[i * dim + d] += p * x.numbers[b * dim + d];
            }
        }

    std::vector<char> columns(batch * dim * plsc_factor_bytes(kind)), rows(columns.size());
    plsc_pack(x.data(), kind, batch, dim, columns.data(), rows.data());
    Doubles own_total(batch);
    std::vector<float> own_pull(batch * dim), own((count + 511) / 256 * 256 * dim), cut(own.size());
    const int64_t* list = listed ? index.data() : nullptr;
    plsc_first_pass(table.data(), kind, table.inverse.data(), list, 0, count, columns.data(), batch, dim, s,
                    position.data(), labels, own_total.data(), own_pull.data());
    const auto find = [&](int64_t start, int64_t here, std::vector<float>& out) {
        std::vector<int64_t> from(position);
        for (auto& each : from) each -= start;
        plsc_gradient(table.data(), kind, table.inverse.data(), listed ? list + start : nullptr, listed ? 0 : start, here,
                      columns.data(), rows.data(), batch, dim, s, from.data(), labels, log_z.data(), scale.data(),
                      target.data(), out.data() + start * dim);
    };
    find(0, count, own);
    const double bound = kind == kBfloat16 ? 1.2e-2 : 2e-5;
    compare("sums", table, own_total, total, 2e-5);
    compare("embeddings' gradient", table, own_pull, pull, bound);
    compare("rows' gradient", table, own, gradient, bound);
    for (int64_t start = 0; start < count; start += 256) find(start, std::min<int64_t>(256, count - start), cut);
    if (std::memcmp(own.data(), cut.data(), count * dim * 4)) wrong++, std::printf("a row depends on the cut\n");
}

void check_update(int kind, int state_kind) {
    const int64_t classes = 60, dim = 40;
    Rows table(classes, dim, kind, false), before(table), gradient(classes, dim, kFloat, false);
    std::vector<int64_t> numbers(classes);
    std::vector<float> state(classes * dim), scale(classes, 0.0f);
    plsc_sgd(table.data(), kind, table.inverse.data(), nullptr, 0, classes, dim, gradient.numbers.data(), 0.5f, 0.1f, 0.9f,
             0.01f, 0, state.data(), state_kind, scale.data(), 7, numbers.data(), 0);
    Doubles want(classes * dim), norms(classes);
    for (int64_t c = 0; c < classes; c++) {
        const double rho = before.inverse[c], along = rho * before.dot(c, gradient, c);
        for (int64_t d = 0; d < dim; d++) {
            const double w = before.numbers[c * dim + d], g = gradient.numbers[c * dim + d];
            want[c * dim + d] = w - 0.1 * ((g - w * rho * along) * rho * 0.5 + 0.01 * w);
        }
    }
    if (kind == kBfloat16)
        for (size_t i = 0; i < want.size(); i++) table.numbers[i] = widen(table.low[i]);
    for (int64_t c = 0; c < classes; c++) norms[c] = 1 / std::sqrt(table.dot(c, table, c));
    compare("update", table, table.numbers, want, kind == kBfloat16 ? 6e-3 : 1e-6);
    compare("1/norms", table, table.inverse, norms, 1e-6);
}

}  // namespace

int main() {
    std::printf("bfloat16 by %s, float32 by %s\n", plsc_products(kBfloat16), plsc_products(kFloat));
    for (int kind : {kFloat, kBfloat16}) {
        for (bool listed : {false, true}) {
            check_passes(kind, 300, 32, 32, listed);
            check_passes(kind, 530, 160, 96, listed);
        }
        for (int state_kind : {kNone, kFloat, kBfloat16, kInt8}) check_update(kind, state_kind);
    }
    return wrong;
}
