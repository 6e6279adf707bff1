/* What every program begins with: types, loops over elements, and arithmetic that is the same on a GPU and on a CPU.
 *
 * One C++14 source without any header, neither a vendor's nor the C library's. NVRTC compiles it for GPUs; a C++ compiler
 * (GCC or Clang) for CPUs, where each kernel is a function that goes over all elements. Both must not contract a product
 * and a sum into one operation (--fmad=false, -ffp-contract=off): then the bytes are those of numpy. Only the payloads of
 * NaN differ.
 *
 * Source: the names of types are those of distrun's dtypes; f16 is IEEE 754 binary16 and bf16 the upper half of
 * binary32; both are rounded to nearest even, as `arrays.compiled` and `arrays.dtypes` do it.
 */

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

/* KERNEL name(..., i64 n): a function that is launched for n elements.
 * EACH(i, n): for each i below n; on a GPU threads share them. No thread waits for another one.
 * PIECES(begin, end, n, size): for each run of `size` of the n elements; on a GPU blocks share them.
 * UNROLL, before a loop: it goes round a fixed number of times, and is written out as often on a GPU.
 * INSIDE(i, first, last): for each i from first to before last; on a GPU the threads of the block share them.
 * SHARED, before an array: on a GPU the threads of a block have one of it.
 * MEET: what the block's threads wrote before is there for all of them. All of them have to come here.
 * add_to(counter, by): add to a counter that other threads add to as well. */
#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define KERNEL extern "C" __global__ void
#define HELPER __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define EACH(i, n) \
    _Pragma("unroll 1") \
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x, each_##i = (i64)gridDim.x * blockDim.x; i < (i64)(n); \
         i += each_##i)
#define PIECES(begin, end, n, size) \
    for (i64 begin = (i64)blockIdx.x * (size), end; end = least(begin + (size), (n)), begin < (i64)(n); \
         begin += (i64)gridDim.x * (size))
#define INSIDE(i, first, last) \
    _Pragma("unroll 1") \
    for (i64 i = (i64)(first) + threadIdx.x; i < (i64)(last); i += blockDim.x)
#define SHARED __shared__
#define MEET __syncthreads()
HELPER void add_to(u32 *counter, u32 by) { atomicAdd(counter, by); }
HELPER void add_to(u64 *counter, u64 by) { atomicAdd(counter, by); }
HELPER u32 bits_of(f32 x) { return __float_as_uint(x); }
HELPER u64 bits_of(f64 x) { return (u64)__double_as_longlong(x); }
HELPER f32 f32_of(u32 bits) { return __uint_as_float(bits); }
HELPER f64 f64_of(u64 bits) { return __longlong_as_double((i64)bits); }
HELPER f32 root(f32 x) { return __fsqrt_rn(x); }
HELPER f64 root(f64 x) { return __dsqrt_rn(x); }
/* The processor's own conversions, which are IEEE 754's. */
HELPER f32 widen(f16 x)
{
    f32 out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
    return out;
}
HELPER f16 narrowed(f32 x, f16 out)
{
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    return out;
}
/* Four words at a multiple of 16 bytes, two at one of 8. Left alone, the compiler reads and writes some of them one by one. */
HELPER void load_words(u32 *words, const u32 *from)
{
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(__cvta_generic_to_global(from)));
}
HELPER void load_two_words(u32 *words, const u32 *from)
{
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(__cvta_generic_to_global(from)));
}
HELPER void store_words(u32 *into, const u32 *words)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(into)), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}
#else
#define KERNEL extern "C" void
#define HELPER inline
#define UNROLL
#define EACH(i, n) for (i64 i = 0; i < (i64)(n); ++i)
#define PIECES(begin, end, n, size) \
    for (i64 begin = 0, end; end = least(begin + (size), (n)), begin < (i64)(n); begin += (size))
#define INSIDE(i, first, last) for (i64 i = (first); i < (i64)(last); ++i)
#define SHARED
#define MEET
template <typename T> HELPER void add_to(T *counter, T by) { *counter += by; }
template <typename To, typename From> HELPER To same_bits(From from)
{
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
HELPER u32 bits_of(f32 x) { return same_bits<u32>(x); }
HELPER u64 bits_of(f64 x) { return same_bits<u64>(x); }
HELPER f32 f32_of(u32 bits) { return same_bits<f32>(bits); }
HELPER f64 f64_of(u64 bits) { return same_bits<f64>(bits); }
HELPER f32 root(f32 x) { return __builtin_sqrtf(x); }
HELPER f64 root(f64 x) { return __builtin_sqrt(x); }
HELPER void load_words(u32 *words, const u32 *from) { __builtin_memcpy(words, __builtin_assume_aligned(from, 16), 16); }
HELPER void load_two_words(u32 *words, const u32 *from) { __builtin_memcpy(words, __builtin_assume_aligned(from, 8), 8); }
HELPER void store_words(u32 *into, const u32 *words) { __builtin_memcpy(__builtin_assume_aligned(into, 16), words, 16); }
HELPER f32 widen(f16 x)
{
    u32 size = x.bits & 0x7fffu, bits = (size << 13) + 0x38000000u;
    if (size >= 0x7c00u) /* infinite or NaN */
        bits += 0x38000000u;
    if (size < 0x400u) /* subnormal: as many quanta of 2^-24 */
        bits = bits_of((f32)size * f32_of(0x33800000u));
    return f32_of(bits | (x.bits & 0x8000u) << 16);
}
HELPER f16 narrowed(f32 x, f16 out)
{
    u32 bits = bits_of(x), size = bits & 0x7fffffffu;
    /* The exponent's bias goes from 127 to 15, and just less than half of the last bit is added. */
    u32 half = (size + 0xc8000fffu + (size >> 13 & 1u)) >> 13;
    if (size < 0x38800000u) /* below 2^-14: 0.5 has the quantum of binary16's subnormal numbers */
        half = bits_of(f32_of(size) + 0.5f) - 0x3f000000u;
    if (size >= 0x47800000u) /* from 2^16 on: infinite */
        half = 0x7c00u;
    if (size > 0x7f800000u)
        half = (size >> 13 & 0x3ffu) | 0x7e00u;
    out.bits = (u16)(half | (bits >> 16 & 0x8000u));
    return out;
}
#endif

HELPER i64 least(i64 a, i64 b) { return a < b ? a : b; }

/* numpy's functions, for float and double alike: abs, negative, sign, minimum, maximum, clip. NaN goes through; of zeros
 * of both signs minimum and maximum give the second, and clip, between limits that are one number each, leaves x. */
HELPER f32 magnitude(f32 x) { return f32_of(bits_of(x) & 0x7fffffffu); }
HELPER f64 magnitude(f64 x) { return f64_of(bits_of(x) & 0x7fffffffffffffffull); }
HELPER f32 negative(f32 x) { return f32_of(bits_of(x) ^ 0x80000000u); }
HELPER f64 negative(f64 x) { return f64_of(bits_of(x) ^ 0x8000000000000000ull); }
template <typename T> HELPER bool is_nan(T x) { return x != x; }
template <typename T> HELPER bool is_finite(T x) { return x - x == 0; }
template <typename T> HELPER T sign(T x) { return x > 0 ? (T)1 : x < 0 ? (T)-1 : x == 0 ? (T)0 : x; }
template <typename T> HELPER T minimum(T a, T b) { return a < b || is_nan(a) ? a : b; }
template <typename T> HELPER T maximum(T a, T b) { return a > b || is_nan(a) ? a : b; }
template <typename T> HELPER T clip(T x, T low, T high)
{
    x = x < low || is_nan(low) ? low : x;
    return x > high || is_nan(high) ? high : x;
}

/* 16-bit floats. widen(x) is x in the type to calculate in (f32 for both, else its own), narrow<T>(x) brings it back. */
template <typename T> struct Work {
    typedef T type;
};
template <> struct Work<f16> {
    typedef f32 type;
};
template <> struct Work<bf16> {
    typedef f32 type;
};
template <typename T> HELPER T widen(T x) { return x; }
HELPER f32 widen(bf16 x) { return f32_of((u32)x.bits << 16); }
HELPER bf16 narrowed(f32 x, bf16 out)
{
    u32 bits = bits_of(x);
    out.bits = (u16)(is_nan(x) ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    return out;
}
template <typename T> HELPER T narrowed(T x, T) { return x; }
template <typename T> HELPER T narrow(typename Work<T>::type x) { return narrowed(x, T()); }

/* Run<T, N>: N elements that are read or written at once, by 16 bytes where they are as many. load<N>(from) and
 * store(into, run) want addresses for which is_aligned() holds, unless N is 1. */
template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Run {
    T at[N];
};
template <int N, typename T> HELPER Run<T, N> load(const T *from)
{
    union {
        Run<T, N> run;
        u32 words[(sizeof(Run<T, N>) + 3) / 4];
    } room;
    enum { count = sizeof(room.run) / 16 };
    UNROLL for (int w = 0; w < count; ++w) load_words(room.words + 4 * w, (const u32 *)from + 4 * w);
    if (sizeof(room.run) == 8 && N > 1)
        load_two_words(room.words, (const u32 *)from);
    else if (count == 0)
        room.run = *(const Run<T, N> *)from;
    return room.run;
}
template <typename T, int N> HELPER void store(T *into, const Run<T, N> &run)
{
    union {
        Run<T, N> run;
        u32 words[(sizeof(Run<T, N>) + 3) / 4];
    } room;
    enum { count = sizeof(room.run) / 16 };
    room.run = run;
    UNROLL for (int w = 0; w < count; ++w) store_words((u32 *)into + 4 * w, room.words + 4 * w);
    if (count == 0)
        *(Run<T, N> *)into = run;
}
HELPER bool is_aligned(const void *address) { return ((u64)address & 15) == 0; }

/* Lists of tensors: tensor t has the elements from offsets[t] to before offsets[t + 1] of the list. tensor_of: that of
 * element i. */
HELPER i64 tensor_of(const i64 *offsets, i64 tensors, i64 i)
{
    i64 low = 0, high = tensors; /* offsets[low] <= i < offsets[high] */
    while (high - low > 1) {
        const i64 middle = low + (high - low) / 2;
        if (offsets[middle] <= i)
            low = middle;
        else
            high = middle;
    }
    return low;
}
