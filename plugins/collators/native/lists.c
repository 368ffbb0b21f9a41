/* Lists of Python numbers to one flat array. The numbers lie scattered over the heap, so the time goes into waiting for memory: the
   objects of the next block are asked for while the current block is converted. */
#include "lists.h"

#include <math.h>

#if defined(__GNUC__)
#define ASK_FOR(address) __builtin_prefetch(address)
#else
#define ASK_FOR(address) ((void)(address))
#endif

#define BLOCK 64

/* The numbers of all rows, one after the other. */
typedef struct {
    PyObject *rows, *row;
    const int64_t *lengths;
    size_t row_count, next_row, place, size;
} Stream;

/* The next numbers, borrowed, at most BLOCK; -1 where a row is no list of the stated length. */
static int next_block(Stream *stream, PyObject **block) {
    int filled = 0;
    while (filled < BLOCK) {
        if (stream->place == stream->size) {
            if (stream->next_row == stream->row_count) break;
            size_t number = stream->next_row++;
            stream->row = PyList_GetItem(stream->rows, (Py_ssize_t)number);
            if (stream->row == NULL || !PyList_CheckExact(stream->row)) return -1;
            if ((int64_t)PyList_Size(stream->row) != stream->lengths[number]) return -1;
            stream->size = (size_t)stream->lengths[number];
            stream->place = 0;
            continue;
        }
        PyObject *item = PyList_GetItem(stream->row, (Py_ssize_t)stream->place++);
        if (item == NULL) return -1;
        ASK_FOR(item);
        block[filled++] = item;
    }
    return filled;
}

typedef struct {
    PyObject *zero, *one;
} Known;

/* Exact types only: their conversion runs no Python code, so nothing borrowed can vanish meanwhile. */
static int is_whole(PyObject *item) { return PyLong_CheckExact(item) || Py_IS_TYPE(item, &PyBool_Type); }

static int read_whole(PyObject *item, int64_t *value) {
    if (!is_whole(item)) return 0;
    *value = PyLong_AsLongLong(item);
    return *value != -1 || !PyErr_Occurred();
}

static int read_real(PyObject *item, double *value) {
    if (PyFloat_CheckExact(item)) {
        *value = PyFloat_AsDouble(item);
        return 1;
    }
    if (!is_whole(item)) return 0;
    *value = PyLong_AsDouble(item);
    return *value != -1.0 || !PyErr_Occurred();
}

/* Masks are mostly the interpreter's own 0 and 1, which are known by their address and not looked into. */
static int read_mask(PyObject *item, const Known *known, uint8_t *value) {
    double real;
    int one = item == known->one;
    *value = (uint8_t)one;
    if ((item == known->zero) | one) return 1; /* | and not ||: which of the two it is cannot be predicted */
    if (!read_real(item, &real) || (real != 0.0 && real != 1.0) || signbit(real)) return 0;
    *value = (uint8_t)real;
    return 1;
}

static int convert(PyObject *const *block, int count, const Known *known, const Array *out, size_t place) {
    int64_t whole;
    double real;
    if (out->kind == INT64) {
        int64_t *values = (int64_t *)out->data + place;
        for (int i = 0; i < count; i++) {
            if (!read_whole(block[i], &values[i])) return 0;
        }
    } else if (out->kind == INT32) {
        int32_t *values = (int32_t *)out->data + place;
        for (int i = 0; i < count; i++) {
            if (!read_whole(block[i], &whole) || whole < INT32_MIN || whole > INT32_MAX) return 0;
            values[i] = (int32_t)whole;
        }
    } else if (out->kind == FLOAT32) {
        float *values = (float *)out->data + place;
        for (int i = 0; i < count; i++) {
            if (!read_real(block[i], &real)) return 0;
            values[i] = (float)real;
        }
    } else {
        uint8_t *values = (uint8_t *)out->data + place;
        for (int i = 0; i < count; i++) {
            if (!read_mask(block[i], known, &values[i])) return 0;
        }
    }
    return 1;
}

static int read_all(Stream *stream, const Known *known, const Array *out) {
    PyObject *blocks[2][BLOCK];
    int which = 0, count = next_block(stream, blocks[0]);
    size_t place = 0;
    while (count > 0) {
        int following = next_block(stream, blocks[1 - which]);
        if (following < 0 || (size_t)count > out->count - place || !convert(blocks[which], count, known, out, place)) return 0;
        place += (size_t)count;
        count = following;
        which = 1 - which;
    }
    return count == 0 && place == out->count;
}

const char read_lists_doc[] =
    "read_lists(rows, lengths, out)\n--\n\n"
    "Read the numbers of all rows into the flat `out` and return True. `rows` is a list of n lists that have lengths[i] (int64[n]) numbers;\n"
    "out takes whole numbers as int64 or int32, any as float32, 0 and 1 as uint8. Returns False, and leaves anything in `out`, where a row is\n"
    "no list of that length, or something in it is no int, bool or float itself (but a subclass, an array scalar, ...) or does not fit.\n"
    "Raises TypeError or ValueError for arrays that cannot be used.";

PyObject *read_lists(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *rows, *lengths, *target, *result = NULL;
    Array out = {0};
    if (!PyArg_ParseTuple(arguments, "O!OO:read_lists", &PyList_Type, &rows, &lengths, &target)) return NULL;
    Stream stream = {.rows = rows, .row_count = (size_t)PyList_Size(rows)};
    int64_t *copied = indices_copied(lengths, &stream.row_count, "lengths");
    if (copied == NULL) return NULL;
    stream.lengths = copied;
    if (array_open(&out, target, 1, "out")) {
        Known known = {PyLong_FromLong(0), PyLong_FromLong(1)};
        int complete = read_all(&stream, &known, &out);
        PyErr_Clear(); /* of a number that does not fit */
        Py_XDECREF(known.zero);
        Py_XDECREF(known.one);
        result = PyBool_FromLong(complete);
        array_close(&out);
    }
    PyMem_Free(copied);
    return result;
}
