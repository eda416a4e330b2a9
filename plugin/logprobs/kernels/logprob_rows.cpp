// The two passes over [rows, columns] logits: row statistics forward, gradient of the logits backward.
//
// Plain C interface, no dependency: built with one compiler call by cpu_extension.py. Vectors are those of the
// compiler (GCC, Clang), so that the same text serves AVX2, AVX-512 and NEON. Do not build with -ffast-math: NaN and
// infinity are part of the contract (see row_statistics.py).

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>
#include <sys/mman.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// The width of a register: compilers split wider vectors badly.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int64_t kStep = 2 * kLanes;  // columns per iteration: two registers
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

constexpr int64_t kChunk = 2048;  // columns between two updates of the maximum; 8 KiB of float32
constexpr int64_t kPrefetchBytes = 4096;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

inline Floats spread(float value) { return Floats{} + value; }

template <typename Vector>
inline Vector read(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// kStep columns as float32. Their order inside the pair is that of the overload: consecutive for float32 and
// float16, even and odd columns for bfloat16, whose two halves of a 32-bit word need a shift or a mask and no shuffle.
struct Pair {
  Floats first, second;
};

inline Pair load_pair(const float* from) { return {read<Floats>(from), read<Floats>(from + kLanes)}; }
inline void store_pair(float* to, Pair values) { std::memcpy(to, &values, sizeof values); }
inline void set_to_negative_infinity(float* value) { *value = kNegativeInfinity; }

struct bfloat16 {
  uint16_t bits;
};

inline Pair load_pair(const bfloat16* from) {
  const Words words = read<Words>(from);
  return {__builtin_bit_cast(Floats, words << 16), __builtin_bit_cast(Floats, words & 0xffff0000u)};
}
inline void store_pair(bfloat16* to, Pair values) {
  // To nearest. A NaN of bfloat16 logits, or one that the processor made, survives the addition.
  const Words even = __builtin_bit_cast(Words, values.first) + 0x8000u;
  const Words odd = __builtin_bit_cast(Words, values.second) + 0x8000u;
  const Words words = (even >> 16) | (odd & 0xffff0000u);
  std::memcpy(to, &words, sizeof words);
}
inline void set_to_negative_infinity(bfloat16* value) { value->bits = 0xff80; }

#ifdef __FLT16_MANT_DIG__
typedef _Float16 float16;
#if defined(__AVX512F__)
inline Floats widened(const float16* from) { return _mm512_cvtph_ps(read<__m256i>(from)); }
inline __m256i narrowed(Floats lanes) { return _mm512_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__AVX2__) && defined(__F16C__)
inline Floats widened(const float16* from) { return _mm256_cvtph_ps(read<__m128i>(from)); }
inline __m128i narrowed(Floats lanes) { return _mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT); }
#else
typedef float16 Halves __attribute__((vector_size(2 * kLanes)));
inline Floats widened(const float16* from) { return __builtin_convertvector(read<Halves>(from), Floats); }
inline Halves narrowed(Floats lanes) { return __builtin_convertvector(lanes, Halves); }
#endif
inline Pair load_pair(const float16* from) { return {widened(from), widened(from + kLanes)}; }
inline void store_pair(float16* to, Pair values) {
  const auto first = narrowed(values.first), second = narrowed(values.second);
  std::memcpy(to, &first, sizeof first);
  std::memcpy(to + kLanes, &second, sizeof second);
}
inline void set_to_negative_infinity(float16* value) { *value = static_cast<float16>(kNegativeInfinity); }
#else
typedef bfloat16 float16;  // never asked for: see megatron_tis_has_float16
#endif

template <typename Logit>
struct Row {
  const Logit* logits;

  Pair pair(int64_t column) const { return load_pair(logits + column); }

  // The last `count` < kStep columns, filled up with -inf.
  Pair tail(int64_t column, int64_t count) const {
    Logit padded[kStep];
    for (int64_t j = 0; j < kStep; ++j) {
      if (j < count) padded[j] = logits[column + j];
      else set_to_negative_infinity(padded + j);
    }
    return load_pair(padded);
  }

  // The hardware does not look beyond the end of a page.
  void prefetch(int64_t column) const {
    const char* from = reinterpret_cast<const char*>(logits + column) + kPrefetchBytes;
    __builtin_prefetch(from);
    if constexpr (kStep * sizeof(Logit) > 64) __builtin_prefetch(from + 64);
  }
};

// 2^x is a root 2^(i / kRoots) from a table that fits into registers, times a power of two, times a polynomial of the
// rest. An entry lacks what its i, in the low bits of the rounded exponent, adds when these are shifted into the
// exponent field. Without a table the polynomial covers the whole distance to the nearest integer. The relative error
// is 2^-24 with 32 roots, 2^-25 with 8, 2^-23 without.
#if defined(__AVX512F__)
constexpr int kRoots = 32;
constexpr uint32_t kRootBits[kRoots] = {0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a,
                                        0x3f79c3d3, 0x3f78f4f0, 0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043,
                                        0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6, 0x3f7504f3, 0x3f74fbaf,
                                        0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
                                        0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba,
                                        0x3f7d257d, 0x3f7e83b3};
constexpr float kTerms[] = {6.9315733038e-01f, 2.4022653249e-01f};
inline Words root_bits(Words index) {
  return (Words)_mm512_permutex2var_epi32(read<__m512i>(kRootBits), (__m512i)index, read<__m512i>(kRootBits + 16));
}
#elif defined(__AVX2__)
constexpr int kRoots = 8;
constexpr uint32_t kRootBits[kRoots] = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                        0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
constexpr float kTerms[] = {6.9314721426e-01f, 2.4025762992e-01f, 5.5496221903e-02f};
inline Words root_bits(Words index) {
  return (Words)_mm256_permutevar8x32_epi32(read<__m256i>(kRootBits), (__m256i)index);
}
#else
constexpr int kRoots = 1;
constexpr float kTerms[] = {6.9314720286e-01f, 2.4022647913e-01f, 5.5503324697e-02f,
                            9.6184373664e-03f, 1.3398874867e-03f, 1.5353360627e-04f};
inline Words root_bits(Words) { return Words{} + 0x3f800000u; }
#endif
constexpr int kRootShift = kRoots == 32 ? 18 : kRoots == 8 ? 20 : 23;

// factor * 2^r near 0.
struct Polynomial {
  static constexpr size_t kDegree = std::size(kTerms);
  float terms[kDegree + 1];

  explicit Polynomial(float factor) {
    terms[0] = factor;
    for (size_t k = 0; k < kDegree; ++k) terms[k + 1] = factor * kTerms[k];
  }

  Floats at(Floats r) const {
    Floats value = spread(terms[kDegree]);
    for (size_t k = kDegree; k > 0; --k) value = value * r + terms[k - 1];
    return value;
  }
};

// 2^x = root * polynomial(rest) for x = value * log2_scale with -126 <= x <= 0; NaN stays NaN.
struct Power {
  Floats root, rest;

  Power(Floats value, float log2_scale) {
    constexpr float kRound = 12582912.0f / kRoots;  // adding it leaves x * kRoots, rounded, in the low bits
    const Floats shifted = value * log2_scale + kRound;
    const Words bits = __builtin_bit_cast(Words, shifted);
    root = __builtin_bit_cast(Floats, (bits << kRootShift) + root_bits(bits));
    rest = value * log2_scale - (shifted - kRound);
  }
};

// Sums relative to the largest logit seen so far, in units of the logits.
struct RowSums {
  float maximum = kNegativeInfinity;
  double sum_exp = 0.0;
  double weighted_sum = 0.0;

  void raise_maximum(float candidate, double log2_scale) {
    if (maximum != kNegativeInfinity) {
      const double shift = static_cast<double>(maximum) - candidate;
      const double factor = std::exp2(shift * log2_scale);
      weighted_sum = factor * (weighted_sum + shift * sum_exp);
      sum_exp *= factor;
    }
    maximum = candidate;
  }
};

// The larger; b where one is NaN. Compilers need to be told that this is one instruction.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// Halves what is left at every step: adding one lane after the other would wait for each of them.
template <typename Number, typename Join>
inline Number joined_lanes(Floats values, Join join) {
  Number lanes[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) lanes[j] = values[j];
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t j = 0; j < half; ++j) lanes[j] = join(lanes[j], lanes[j + half]);
  return lanes[0];
}

inline float largest_lane(Floats values) {
  return joined_lanes<float>(values, [](float a, float b) { return a > b ? a : b; });
}

inline double sum_of_lanes(Floats values) {
  return joined_lanes<double>(values, [](double a, double b) { return a + b; });
}

// What lies further below the maximum than this contributes nothing.
inline float lowest_offset(float log2_scale) { return -126.0f / log2_scale; }

template <bool kEntropy>
struct LaneSums {
  float shift, log2_scale, lowest;
  Polynomial polynomial;
  Floats largest, sum{}, weighted{};

  LaneSums(float maximum, float log2_scale)
      : shift(maximum == kNegativeInfinity ? 0.0f : maximum),
        log2_scale(log2_scale),
        lowest(lowest_offset(log2_scale)),
        polynomial(1.0f),
        largest(spread(kNegativeInfinity)) {}

  void add(Floats values) {
    largest = larger(values, largest);
    const Floats offset = larger(spread(lowest), values - shift);
    const Power power(offset, log2_scale);
    const Floats weight = power.root * polynomial.at(power.rest);
    sum += weight;
    if constexpr (kEntropy) weighted += weight * offset;
  }
};

template <typename Logit>
float largest_of(Row<Logit> row, int64_t columns) {
  const int64_t full = columns / kStep * kStep;
  Pair largest = row.tail(full, columns - full);
  for (int64_t j = 0; j < full; j += kStep) {
    const Pair values = row.pair(j);
    largest = {larger(values.first, largest.first), larger(values.second, largest.second)};
  }
  return largest_lane(larger(largest.first, largest.second));
}

// Adds a chunk, unless it holds a logit above the maximum, which is returned instead.
template <bool kEntropy, typename Logit>
float add_chunk(RowSums& sums, Row<Logit> row, int64_t begin, int64_t end, float log2_scale) {
  const int64_t full = begin + (end - begin) / kStep * kStep;
  LaneSums<kEntropy> even(sums.maximum, log2_scale), odd = even;
  for (int64_t j = begin; j < full; j += kStep) {
    row.prefetch(j);
    const Pair values = row.pair(j);
    even.add(values.first);
    odd.add(values.second);
  }
  if (full < end) {
    const Pair values = row.tail(full, end - full);
    even.add(values.first);
    odd.add(values.second);
  }
  const float largest = largest_lane(larger(even.largest, odd.largest));
  if (largest > sums.maximum) return largest;
  sums.sum_exp += sum_of_lanes(even.sum + odd.sum);
  if constexpr (kEntropy) sums.weighted_sum += sum_of_lanes(even.weighted + odd.weighted);
  return sums.maximum;
}

// In a row of random order the maximum rises in few chunks after the first; those are read twice, from the cache.
template <bool kEntropy, typename Logit>
RowSums row_sums(Row<Logit> row, int64_t columns, double log2_scale) {
  const float scale = static_cast<float>(log2_scale);
  RowSums sums;
  sums.maximum = largest_of(row, columns < kChunk ? columns : kChunk);
  for (int64_t begin = 0; begin < columns; begin += kChunk) {
    const int64_t end = columns - begin < kChunk ? columns : begin + kChunk;
    const float largest = add_chunk<kEntropy>(sums, row, begin, end, scale);
    if (largest > sums.maximum) {
      sums.raise_maximum(largest, log2_scale);
      add_chunk<kEntropy>(sums, row, begin, end, scale);
    }
  }
  return sums;
}

// With e = exp((logit - maximum) * scale) = sum_exp * p, the gradient away from the target,
// -scale * p * (grad_log_prob + grad_entropy * (log p + entropy)), is e * (constant + slope * (logit - maximum)).
// Without a gradient of the entropy the slope is 0 and the polynomial has the constant as a factor.
template <bool kEntropy>
struct GradientLine {
  float maximum, log2_scale, lowest, constant, slope;
  Polynomial polynomial;

  GradientLine(float maximum, double sum_exp, double on_target, double on_entropy, float entropy, float scale)
      : maximum(maximum),
        log2_scale(static_cast<float>(scale * kLog2E)),
        lowest(lowest_offset(log2_scale)),
        constant(static_cast<float>(
            -(kEntropy ? on_target + on_entropy * (entropy - std::log(sum_exp)) : on_target) / sum_exp)),
        slope(kEntropy ? static_cast<float>(-on_entropy * scale / sum_exp) : 0.0f),
        polynomial(kEntropy ? 1.0f : constant) {}

  Floats at(Floats values) const {
    const Floats offset = values - maximum;
    const Power power(offset, log2_scale);
    Floats gradient = power.root * polynomial.at(power.rest);
    if constexpr (kEntropy) gradient *= offset * slope + constant;
    return offset <= lowest ? spread(0.0f) : gradient;
  }
  Pair at(Pair values) const { return {at(values.first), at(values.second)}; }
};

// `target` < 0: another shard's. Its column is computed before the row is overwritten, and rounded only once.
template <typename Line, typename Logit>
void row_gradient(Row<Logit> row, int64_t columns, Line line, int64_t target, float on_target, Logit* out) {
  Logit at_target[kStep] = {};
  if (target >= 0) {
    const Floats away = line.at(row.tail(target, 1).first);
    store_pair(at_target, {away + on_target, away});
  }
  const int64_t full = columns / kStep * kStep;
  for (int64_t j = 0; j < full; j += kStep) {
    row.prefetch(j);
    store_pair(out + j, line.at(row.pair(j)));
  }
  if (full < columns) {
    Logit last[kStep];
    store_pair(last, line.at(row.tail(full, columns - full)));
    std::memcpy(static_cast<void*>(out + full), last, (columns - full) * sizeof(Logit));
  }
  if (target >= 0) out[target] = at_target[0];
}

struct Matrix {
  void* logits;
  int64_t rows, columns, row_stride;
  const int64_t* targets;

  int64_t rows_per_task() const { return columns >= 32768 ? 1 : 32768 / columns; }
};

template <typename Logit>
void forward(Matrix m, float scale, bool with_entropy, float* maximum, float* sum_exp, float* weighted_sum,
             float* target_logit, int threads) {
  const double log2_scale = scale * kLog2E;
#pragma omp parallel for schedule(dynamic, m.rows_per_task()) num_threads(threads)
  for (int64_t i = 0; i < m.rows; ++i) {
    const Logit* logits = static_cast<const Logit*>(m.logits) + i * m.row_stride;
    const Row<Logit> row{logits};
    RowSums sums = with_entropy ? row_sums<true>(row, m.columns, log2_scale)
                                : row_sums<false>(row, m.columns, log2_scale);
    // Nothing above -inf: sums of exactly 0, as in the other kernels, unless they hold a NaN.
    if (sums.maximum == kNegativeInfinity && !std::isnan(sums.sum_exp)) sums = RowSums{};
    maximum[i] = sums.maximum;
    sum_exp[i] = static_cast<float>(sums.sum_exp);
    if (with_entropy) weighted_sum[i] = static_cast<float>(sums.weighted_sum * scale);
    target_logit[i] = m.targets[i] < 0 ? 0.0f : row.tail(m.targets[i], 1).first[0];
  }
}

template <typename Logit>
void backward(Matrix m, const float* maximum, const float* sum_exp, const float* entropy,
              const float* grad_log_probs, const float* grad_entropy, float scale, void* out,
              int64_t out_stride, int threads) {
#pragma omp parallel for schedule(dynamic, m.rows_per_task()) num_threads(threads)
  for (int64_t i = 0; i < m.rows; ++i) {
    const Logit* logits = static_cast<const Logit*>(m.logits) + i * m.row_stride;
    Logit* out_row = static_cast<Logit*>(out) + i * out_stride;
    const double on_target = grad_log_probs == nullptr ? 0.0 : static_cast<double>(grad_log_probs[i]) * scale;
    const double on_entropy =
        grad_entropy == nullptr || entropy == nullptr ? 0.0 : static_cast<double>(grad_entropy[i]) * scale;
    if (on_target == 0.0 && on_entropy == 0.0) {
      std::memset(static_cast<void*>(out_row), 0, m.columns * sizeof(Logit));
      continue;
    }
    const Row<Logit> row{logits};
    const auto write = [&](auto line) {
      row_gradient(row, m.columns, line, m.targets[i], static_cast<float>(on_target), out_row);
    };
    if (on_entropy == 0.0) {
      write(GradientLine<false>(maximum[i], sum_exp[i], on_target, 0.0, 0.0f, scale));
    } else {
      write(GradientLine<true>(maximum[i], sum_exp[i], on_target, on_entropy, entropy[i], scale));
    }
  }
}

}  // namespace

extern "C" {

int megatron_tis_has_float16() { return !std::is_same_v<float16, bfloat16>; }

// In both functions `type` is 0 for float32, 1 for bfloat16, 2 for float16; strides are in elements.
void megatron_tis_forward(void* logits, int type, int64_t rows, int64_t columns, int64_t row_stride,
                          const int64_t* targets, float scale, int with_entropy, float* maximum, float* sum_exp,
                          float* weighted_sum, float* target_logit, int threads) {
  const Matrix m{logits, rows, columns, row_stride, targets};
  const auto pass = type == 0 ? forward<float> : type == 1 ? forward<bfloat16> : forward<float16>;
  pass(m, scale, with_entropy != 0, maximum, sum_exp, weighted_sum, target_logit, threads);
}

// `out` may be `logits`; entropy, grad_log_probs and grad_entropy may be null.
void megatron_tis_backward(void* logits, int type, int64_t rows, int64_t columns, int64_t row_stride,
                           const int64_t* targets, const float* maximum, const float* sum_exp, const float* entropy,
                           const float* grad_log_probs, const float* grad_entropy, float scale, void* out,
                           int64_t out_stride, int threads) {
  const Matrix m{logits, rows, columns, row_stride, targets};
  const auto pass = type == 0 ? backward<float> : type == 1 ? backward<bfloat16> : backward<float16>;
  pass(m, maximum, sum_exp, entropy, grad_log_probs, grad_entropy, scale, out, out_stride, threads);
}

// Asks for large pages where a fresh result will be written: faulting in 4 KiB pages costs more than the pass.
void megatron_tis_prefer_large_pages(void* start, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + kPage - 1) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(start) + bytes) / kPage * kPage;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}
}
