// The units of a processor that multiply and add in vector registers: float32 numbers, or pairs of bf16 numbers. The
// compiler's macros decide which of them exist, and how many lanes and registers they have.
#pragma once

#include <cstdint>
#include <cstring>

#include "tiles.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define PLSC_PAIRS 1
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PLSC_PAIRS 1
#include <arm_neon.h>
#endif

namespace {

// kRows x kAcross registers of sums fill the register file but for their factors: 24 of 32, or 12 of 16.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12, kAcross = 2;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 6, kAcross = 2;
#else
constexpr int kLanes = 4, kRows = 6, kAcross = 4;
#endif
constexpr int64_t kWide = kLanes * kAcross;  // columns of a product whose sums, for kRows rows, the registers hold

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// The number, or the register of numbers, that lies at ``from``, aligned or not.
template <class Value>
inline Value read(const void* from) {
    Value value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Float32 factors.
struct FloatUnit {
    using Number = float;
    using Factor = Floats;
    static constexpr int kTogether = 1;  // products that one instruction adds to a sum
#if defined(__AVX512F__)
    static constexpr const char* kName = "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    static constexpr const char* kName = "avx2";
#elif defined(__ARM_NEON)
    static constexpr const char* kName = "neon";
#else
    static constexpr const char* kName = "portable";  // no fused multiply-adds
#endif

    static Factor load(const float* from) { return read<Floats>(from); }
    static Factor load(const bf16* from) {
        const Words words = __builtin_convertvector(read<Halves>(from), Words) << 16;
        return read<Floats>(&words);
    }
    static Factor splat(const float* from) { return *from - Floats{}; }
    static Floats multiply_add(Floats sum, Factor a, Factor b) { return sum + a * b; }
};

#ifdef PLSC_PAIRS

// Pairs of bf16 factors, whose two products are added to one float32 sum.
struct PairUnit {
    using Number = bf16;
    using Factor = Words;
    static constexpr int kTogether = 2;

    static Factor load(const bf16* from) { return read<Words>(from); }
    static Factor splat(const bf16* from) { return read<uint32_t>(from) - Words{}; }
#ifdef __AVX512BF16__
    static constexpr const char* kName = "avx512-bf16";
    static Floats multiply_add(Floats sum, Factor a, Factor b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
#else
    static constexpr const char* kName = "neon-bf16";
    static Floats multiply_add(Floats sum, Factor a, Factor b) {
        return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
    }
#endif
};

#endif  // PLSC_PAIRS

}  // namespace
