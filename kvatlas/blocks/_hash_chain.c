/* The hash chain of `kvatlas.blocks.hashing` for plain blocks, in C: optional, and used only through that module.

   extend(tokens, block_size, parent) computes the same bytes as the Python code there. It knows only the common case: a list or
   tuple of ints, or a buffer of unsigned 32-bit integers, with at least one full block. For anything else it returns None, and
   the Python code computes the result or raises the error. So it never raises anything but MemoryError.

   No Python code runs while it reads: it looks only at exact ints, lists and tuples, and holds the buffer. So no list can change
   under it. It is compiled against the limited API of Python 3.11: one binary serves 3.11 and later.

   The hash is XXH3-64 with a seed, written from its specification: https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md. The
   names of the steps are the specification's. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if PY_BIG_ENDIAN || !defined(__SIZEOF_INT128__)
#error "needs a 64-bit little-endian machine; elsewhere the Python code is used"
#endif

#define SEED UINT64_C(1337)
#define PRIME32_1 UINT64_C(0x9E3779B1)
#define PRIME32_2 UINT64_C(0x85EBCA77)
#define PRIME32_3 UINT64_C(0xC2B2AE3D)
#define PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME64_5 UINT64_C(0x27D4EB2F165667C5)
#define PRIME_MX1 UINT64_C(0x165667919E3779F9)
#define PRIME_MX2 UINT64_C(0x9FB21C651E98DF25)

enum { SECRET = 192, STRIPE = 64, LANES = 8, STRIPES_PER_BLOCK = (SECRET - STRIPE) / 8 };

static const uint8_t default_secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t read64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value); /* any alignment */
    return value;
}

static uint32_t read32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t rotate_left(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

static uint64_t mul128_fold64(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t hash)
{
    hash ^= hash >> 37;
    hash *= PRIME_MX1;
    return hash ^ hash >> 32;
}

static uint64_t mix16(const uint8_t *input, const uint8_t *secret)
{
    return mul128_fold64(
        read64(input) ^ (read64(secret) + SEED), read64(input + 8) ^ (read64(secret + 8) - SEED));
}

static uint64_t hash_4_to_8(const uint8_t *input, size_t length)
{
    uint64_t seed = SEED ^ (uint64_t)__builtin_bswap32((uint32_t)SEED) << 32;
    uint64_t combined = read32(input + length - 4) + ((uint64_t)read32(input) << 32);
    uint64_t hash = combined ^ ((read64(default_secret + 8) ^ read64(default_secret + 16)) - seed);
    hash ^= rotate_left(hash, 49) ^ rotate_left(hash, 24);
    hash *= PRIME_MX2;
    hash ^= (hash >> 35) + length;
    hash *= PRIME_MX2;
    return hash ^ hash >> 28;
}

static uint64_t hash_9_to_16(const uint8_t *input, size_t length)
{
    uint64_t low = read64(input) ^ ((read64(default_secret + 24) ^ read64(default_secret + 32)) + SEED);
    uint64_t high = read64(input + length - 8) ^ ((read64(default_secret + 40) ^ read64(default_secret + 48)) - SEED);
    return avalanche(length + __builtin_bswap64(low) + high + mul128_fold64(low, high));
}

static uint64_t hash_17_to_128(const uint8_t *input, size_t length)
{
    uint64_t sum = length * PRIME64_1;
    for (size_t i = 0; i <= (length - 1) / 32; i++) {
        sum += mix16(input + 16 * i, default_secret + 32 * i);
        sum += mix16(input + length - 16 * (i + 1), default_secret + 32 * i + 16);
    }
    return avalanche(sum);
}

static uint64_t hash_129_to_240(const uint8_t *input, size_t length)
{
    uint64_t sum = length * PRIME64_1;
    for (size_t i = 0; i < 8; i++)
        sum += mix16(input + 16 * i, default_secret + 16 * i);
    sum = avalanche(sum);
    for (size_t i = 8; i < length / 16; i++)
        sum += mix16(input + 16 * i, default_secret + 16 * (i - 8) + 3);
    return avalanche(sum + mix16(input + length - 16, default_secret + 136 - 17));
}

static void accumulate(uint64_t lanes[LANES], const uint8_t *stripe, const uint8_t *secret)
{
    for (int i = 0; i < LANES; i++) {
        uint64_t value = read64(stripe + 8 * i), key = value ^ read64(secret + 8 * i);
        lanes[i ^ 1] += value;
        lanes[i] += (key & 0xFFFFFFFF) * (key >> 32);
    }
}

static uint64_t hash_long(const uint8_t *input, size_t length)
{
    uint64_t lanes[LANES] = {
        PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    uint8_t secret[SECRET];
    for (int i = 0; i < SECRET; i += 16) {
        uint64_t pair[2] = {read64(default_secret + i) + SEED, read64(default_secret + i + 8) - SEED};
        memcpy(secret + i, pair, sizeof pair);
    }
    size_t stripes = (length - 1) / STRIPE; /* the last one is the input's last 64 bytes */
    for (size_t n = 0; n < stripes; n++) {
        size_t of_block = n % STRIPES_PER_BLOCK;
        accumulate(lanes, input + STRIPE * n, secret + 8 * of_block);
        if (of_block == STRIPES_PER_BLOCK - 1)
            for (int i = 0; i < LANES; i++)
                lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ read64(secret + SECRET - STRIPE + 8 * i)) * PRIME32_1;
    }
    accumulate(lanes, input + length - STRIPE, secret + SECRET - STRIPE - 7);
    uint64_t sum = length * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        sum += mul128_fold64(
            lanes[i] ^ read64(secret + 11 + 8 * i), lanes[i + 1] ^ read64(secret + 11 + 8 * i + 8));
    return avalanche(sum);
}

/* XXH3-64 of at least 4 bytes. */
static uint64_t xxh3(const uint8_t *input, size_t length)
{
    if (length <= 8)
        return hash_4_to_8(input, length);
    if (length <= 16)
        return hash_9_to_16(input, length);
    if (length <= 128)
        return hash_17_to_128(input, length);
    return length <= 240 ? hash_129_to_240(input, length) : hash_long(input, length);
}

/* Where the tokens come from: a list or tuple, or else the packed ids of a buffer. */
typedef struct {
    PyObject *items;
    PyObject *(*get)(PyObject *, Py_ssize_t);
    const uint8_t *packed;
} Tokens;

/* Packs `count` tokens from number `first` on. Returns 0 for one that is not an exact int of 32 bits. */
static int pack(const Tokens *tokens, Py_ssize_t first, Py_ssize_t count, uint32_t *into)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *token = tokens->get(tokens->items, first + i); /* borrowed */
        if (token == NULL || !PyLong_CheckExact(token))
            return 0;
        unsigned long value = PyLong_AsUnsignedLong(token);
        if (value >= UINT32_MAX && (value > UINT32_MAX || PyErr_Occurred()))
            return 0;
        into[i] = (uint32_t)value;
    }
    return 1;
}

/* The chain of `length` tokens as bytes; NULL with no exception set for a token that is no exact int of 32 bits. */
static PyObject *chain_of(const Tokens *tokens, Py_ssize_t length, Py_ssize_t block_size, const uint64_t *parent)
{
    Py_ssize_t count = length / block_size;
    PyObject *chain = PyBytes_FromStringAndSize(NULL, count * 8);
    uint32_t *block = tokens->packed == NULL ? PyMem_Malloc(4 * (size_t)block_size) : NULL;
    if (chain == NULL || (block == NULL && tokens->packed == NULL)) {
        Py_XDECREF(chain);
        PyMem_Free(block);
        return PyErr_NoMemory();
    }
    uint64_t pair[2] = {parent == NULL ? 0 : *parent, 0};
    int plain = 1;
    for (Py_ssize_t n = 0; plain && n < count; n++) {
        const uint8_t *input = (const uint8_t *)block;
        if (tokens->packed != NULL)
            input = tokens->packed + 4 * n * block_size;
        else if (!(plain = pack(tokens, n * block_size, block_size, block)))
            break;
        pair[1] = xxh3(input, 4 * (size_t)block_size);
        pair[0] = n == 0 && parent == NULL ? pair[1] : xxh3((const uint8_t *)pair, sizeof pair);
        memcpy(PyBytes_AsString(chain) + 8 * n, pair, 8);
    }
    if (plain && tokens->packed == NULL) /* the tokens after the last full block count for nothing, but must be valid */
        plain = pack(tokens, count * block_size, length % block_size, block);
    PyMem_Free(block);
    if (!plain) {
        PyErr_Clear();
        Py_CLEAR(chain);
    }
    return chain;
}

/* extend(tokens, block_size, parent) -> bytes | None */
static PyObject *extend(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 3 || !PyLong_CheckExact(args[1]) || (args[2] != Py_None && !PyLong_CheckExact(args[2])))
        Py_RETURN_NONE;
    Py_ssize_t block_size = PyLong_AsSsize_t(args[1]), length;
    uint64_t parent = args[2] == Py_None ? 0 : PyLong_AsUnsignedLongLong(args[2]);
    Tokens tokens = {args[0], NULL, NULL};
    Py_buffer buffer;
    if (PyErr_Occurred()) { /* beyond 64 bits */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    if (PyList_CheckExact(args[0])) {
        tokens.get = PyList_GetItem;
        length = PyList_Size(args[0]);
    } else if (PyTuple_CheckExact(args[0])) {
        tokens.get = PyTuple_GetItem;
        length = PyTuple_Size(args[0]);
    } else if (PyObject_GetBuffer(args[0], &buffer, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0) {
        tokens.packed = buffer.buf;
        int is_u32 = buffer.ndim == 1 && buffer.itemsize == 4 && buffer.format != NULL && !strcmp(buffer.format, "I");
        length = is_u32 ? buffer.shape[0] : 0;
    } else {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *chain = NULL;
    if (0 < block_size && block_size <= length)
        chain = chain_of(&tokens, length, block_size, args[2] == Py_None ? NULL : &parent);
    if (tokens.get == NULL)
        PyBuffer_Release(&buffer);
    if (chain == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return chain;
}

static PyMethodDef methods[] = {
    {"extend", (PyCFunction)(void (*)(void))extend, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "kvatlas.blocks._hash_chain",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__hash_chain(void)
{
    return PyModuleDef_Init(&module);
}
